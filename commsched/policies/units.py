"""Units: what policies put in order: chunks, with what their place depends on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from commsched.exchange import sent_share
from commsched.plan import MOST_IN_FLIGHT, Task
from commsched.profile import Link, Profile
from commsched.rules import tasks_of
from commsched.settings import Settings
from commsched.simulate import link_seconds

__all__ = ["Sizes", "Unit", "margin", "next_event", "sizes_for", "units"]

CHUNK_S = 8e-3  # a task's time on the wire: how long the most urgent gradient may have to wait
ALPHAS = 8.0  # ... but at least so many latencies, in case nothing hides them
MIN_CHUNK_BYTES = 2**18
MAX_CHUNK_BYTES = 2**24
IN_FLIGHT = 3  # tasks: one on the wire, one behind it, one being encoded or decoded
MARGIN = 1.0  # chunks that should still be waiting for the link when the next bucket comes


@dataclass(frozen=True)
class Sizes:
    """Gradients a chunk, and encoded bytes in flight at once."""

    chunk_bytes: int
    credit_bytes: int


@dataclass(frozen=True)
class Unit:
    """A chunk with what its place in the order depends on."""

    index: int  # in bucket order
    tasks: tuple[Task, ...]
    event: int  # the bucket whose hook makes it ready
    use_s: float  # when forward first reads one of its parameters
    wire_s: float  # how long one of its tasks keeps the link busy


def sizes_for(profile: Profile, settings: Settings, halves: bool = False) -> Sizes:
    """What the user has set; else small chunks, and just enough of them to hide the latency.

    Args:
        profile: for its link.
        settings: `chunk_mb` and `credit_mb`, where they are not 0.
        halves: a chunk is two tasks.
    """
    link = profile.link
    # Bytes encoded, and sent by one task, for one byte of gradients: on average over the layout.
    share, factor = _wire_shares(profile, settings)
    factor /= 2 if halves else 1
    chunk_bytes = settings.chunk_bytes or _chunk_bytes(link, factor)
    wire_bytes = max(1, int(chunk_bytes * share))
    count = _in_flight(link.alpha_s, chunk_bytes * factor * link.beta_s)
    return Sizes(chunk_bytes, settings.credit_bytes or count * wire_bytes)


def _in_flight(alpha_s: float, wire_s: float) -> int:
    """How many tasks hide each other's latency."""
    if alpha_s >= MOST_IN_FLIGHT * wire_s:
        return MOST_IN_FLIGHT if wire_s > 0 else IN_FLIGHT
    return min(MOST_IN_FLIGHT, IN_FLIGHT + math.ceil(alpha_s / wire_s))


def _chunk_bytes(link: Link, factor: float) -> int:
    """A power of two, so that a link measured again gives the same chunks again."""
    wire_s = max(CHUNK_S, ALPHAS * link.alpha_s)
    byte_s = link.beta_s * factor
    if byte_s * MAX_CHUNK_BYTES <= wire_s:
        return MAX_CHUNK_BYTES
    return max(MIN_CHUNK_BYTES, 1 << round(math.log2(wire_s / byte_s)))


def _wire_shares(profile: Profile, settings: Settings) -> tuple[float, float]:
    layout = profile.layout
    rows = list(tasks_of(layout, settings, max(1, layout.nbytes)))
    if not rows:
        return 1.0, sent_share("all_reduce", profile.world_size)
    encoded = sum(tasks[0].wire_bytes for tasks in rows)
    sent = sum(task.sent_bytes(profile.world_size) for tasks in rows for task in tasks)
    return encoded / layout.nbytes, sent / layout.nbytes


def units(profile: Profile, settings: Settings, sizes: Sizes) -> list[Unit]:
    """The chunks, in bucket order."""
    use_s = {param.name: param.use_s for param in profile.params}
    found = []
    for index, tasks in enumerate(tasks_of(profile.layout, settings, sizes.chunk_bytes)):
        chunk = tasks[0].chunk
        event = max(piece.bucket for piece in chunk.pieces)
        first_s = min(use_s[span.param] for span in profile.layout.spans(chunk))
        wire_s = sum(link_seconds(task, profile) for task in tasks) / len(tasks)
        found.append(Unit(index, tasks, event, first_s, wire_s))
    return found


def margin(found: Iterable[Unit]) -> float:
    """`MARGIN` in seconds."""
    return MARGIN * max((unit.wire_s for unit in found), default=0.0)


def next_event(profile: Profile, event: int) -> float:
    """When the hook is called for the bucket after `event`; infinity after the last."""
    return profile.ready_s[event + 1] if event + 1 < len(profile.ready_s) else math.inf
