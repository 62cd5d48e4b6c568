"""fifo: wait-free backpropagation. Chunks go in the order in which DDP makes buckets ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from commsched.plan import Plan, Task
from commsched.profile import Profile
from commsched.rules import tasks_of
from commsched.settings import MB, Settings

__all__ = ["fifo"]

CHUNK_BYTES = 4 * MB
CREDIT_BYTES = 16 * MB
LAG = 4  # chunks between one's first task and its second, which must wait for the first to end


def fifo(profile: Profile, settings: Settings) -> Plan:
    """Each chunk's tasks in bucket order. Needs no measurements.

    Source: wait-free backpropagation (Poseidon, ATC'17), with the tensor fusion of Horovod and the
    tensor partition of ByteScheduler (SOSP'19) at fixed sizes.
    """
    layout = profile.layout
    tasks = tuple(
        replace(task, index=index) for index, task in enumerate(_order(profile, settings))
    )
    return Plan("fifo", layout, tasks, settings.credit_bytes or CREDIT_BYTES)


def _order(profile: Profile, settings: Settings) -> Iterator[Task]:
    """Second tasks come `LAG` chunks later, but before the next bucket, which may be far off."""
    behind: deque[Task] = deque()
    event = -1
    for first, *later in tasks_of(profile.layout, settings, settings.chunk_bytes or CHUNK_BYTES):
        bucket = max(piece.bucket for piece in first.chunk.pieces)
        if bucket != event:
            event = bucket
            yield from behind
            behind.clear()
        yield first
        behind.extend(later)
        if len(behind) > LAG:
            yield behind.popleft()
    yield from behind
