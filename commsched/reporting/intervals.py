"""Sets of time as sorted, disjoint intervals: what `commsched.reporting.analysis` counts with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "intersect", "length", "subtract", "union"]

Interval = tuple[float, float]  # begin, end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that any of them covers: sorted, disjoint, without empty ones."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that both cover. Both as `union` makes them."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The time that `one` covers and `other` does not. Both as `union` makes them."""
    if not one:
        return []
    begin, end = one[0][0], one[-1][1]
    gaps: list[Interval] = []
    for from_s, to_s in other:
        gaps.append((begin, min(from_s, end)))
        begin = max(begin, to_s)
    gaps.append((begin, end))
    return intersect(one, union(gaps))


def length(intervals: Iterable[Interval]) -> float:
    """How long disjoint intervals are, all together."""
    return sum(end - begin for begin, end in intervals)
