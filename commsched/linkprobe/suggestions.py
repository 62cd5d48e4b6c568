"""What a measured link suggests for `chunk_mb`, `credit_mb` and tasks in flight, and why."""

from __future__ import annotations

from dataclasses import dataclass

from commsched.linkprobe.sweep import MIB, Sweep, own_sizes
from commsched.plan import MOST_IN_FLIGHT
from commsched.policies.units import IN_FLIGHT as LEAST_IN_FLIGHT
from commsched.policies.units import MAX_CHUNK_BYTES, Sizes
from commsched.profile import Link

__all__ = ["Advice", "advise", "compared"]

ENOUGH = 0.95  # of the best bandwidth: more lanes are not worth it
FAR_FROM = 0.9  # ... larger chunks are


@dataclass(frozen=True)
class Advice:
    """What to set, and why.

    Attributes:
        chunk_bytes: for `chunk_mb`.
        credit_bytes: for `credit_mb`.
        lanes: how many collectives at once fill the link.
        reasons: in words.
    """

    chunk_bytes: int
    credit_bytes: int
    lanes: int
    reasons: tuple[str, ...]

    def environment(self) -> tuple[str, ...]:
        """As lines to copy."""
        return (
            f"COMMSCHED_CHUNK_MB={self.chunk_bytes / MIB:g}",
            f"COMMSCHED_CREDIT_MB={self.credit_bytes / MIB:g}",
        )


def advise(found: Sweep, world_size: int) -> Advice:
    """Suggest sizes: the policies' own rule on the line found, corrected by what was measured.

    Args:
        found: with all-reduces alone.
        world_size: the number of ranks.
    """
    line = found.line("all_reduce")
    own = own_sizes(Link(line.alpha_s, line.beta_s), world_size)
    chunk, why_chunk = _chunk(found, own.chunk_bytes)
    if line.points < 3:
        why_chunk += "; of little worth here, as too few sizes were measured: give more --seconds"
    if not found.together("all_reduce", chunk):
        count = own.credit_bytes // own.chunk_bytes
        why = "credit_mb: as the policies choose it; several at once were not measured"
        return Advice(chunk, count * chunk, count, (why_chunk, why))
    lanes, *reasons = _lanes(found, "all_reduce", chunk)
    count = min(MOST_IN_FLIGHT, max(LEAST_IN_FLIGHT, lanes + 1))
    reasons.append(
        f"credit_mb: {count} chunks: {min(lanes, count)} on the wire, and what is being encoded, "
        f"decoded or about to leave; at least {LEAST_IN_FLIGHT}, at most {MOST_IN_FLIGHT}"
    )
    for half in ("reduce_scatter", "all_gather"):
        if found.together(half, chunk):
            reasons.append(f"With policy=rs_ag: {_lanes(found, half, chunk)[1]}")
    return Advice(chunk, count * chunk, lanes, (why_chunk, *reasons))


def compared(advice: Advice, short: Link, world_size: int) -> str:
    """What commsched chooses where nothing is set, beside the suggestion.

    Args:
        advice: the suggestion.
        short: the link as the engine's own short probe finds it.
        world_size: the number of ranks.
    """
    own = own_sizes(short, world_size)
    speed = f", {1e-9 / short.beta_s:.4g} GB/s" if short.beta_s else ""
    found = f"alpha {1e6 * short.alpha_s:.0f} us{speed}"
    if own == Sizes(advice.chunk_bytes, advice.credit_bytes):
        return f"Left alone, commsched chooses the same (its own short probe: {found})."
    return (
        f"Left alone, commsched would choose chunk_mb={own.chunk_bytes / MIB:g} and "
        f"credit_mb={own.credit_bytes / MIB:g}: its own short probe finds {found}, and its credit "
        "is 3 chunks and as many more as hide alpha, without trying."
    )


def _chunk(found: Sweep, own: int) -> tuple[int, str]:
    best, larger = _best_gb_s(found, own), _best_gb_s(found, 4 * own)
    if 4 * own <= MAX_CHUNK_BYTES and 0 < best < FAR_FROM * larger:
        return 4 * own, (
            f"chunk_mb: {own / MIB:g} would be about 8 ms on the wire, but reaches only "
            f"{best / larger:.0%} of the bandwidth of {4 * own / MIB:g}"
        )
    return own, (
        "chunk_mb: about 8 ms on the wire, which is how long the most urgent gradient may have to "
        "wait, but at least 8 alphas, and from 0.25 to 16"
    )


def _best_gb_s(found: Sweep, nbytes: int) -> float:
    return max((point.gb_s for point in found.together("all_reduce", nbytes)), default=0.0)


def _lanes(found: Sweep, name: str, nbytes: int) -> tuple[int, str]:
    points = found.together(name, nbytes)
    best = max(point.gb_s for point in points)
    enough = next(point for point in points if point.gb_s >= ENOUGH * best)
    others = ", ".join(
        f"{point.in_flight} give {point.gb_s / enough.gb_s - 1:+.1%}"
        for point in points
        if point is not enough
    )
    said = f"lanes, {name}: {enough.in_flight} in flight reach {enough.gb_s:.4g} GB/s"
    return enough.in_flight, f"{said}; {others}" if others else said
