"""Stragglers: which rank keeps the others waiting, and why. Pure functions on traced steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from commsched.reporting.intervals import Interval, intersect, length, subtract, union
from commsched.reporting.traced import TracedStep

__all__ = ["Lateness", "Straggler", "lateness", "straggler"]

NOTABLE = 0.02  # of the step time: a rank that is late by less keeps nobody waiting
OFTEN = 0.5  # of the tasks
SOME_S = 1e-3  # nor one that is late by less than this


@dataclass(frozen=True)
class Lateness:
    """How late one rank's tasks are issued. Seconds; a step's, where they are sums.

    Attributes:
        mean_s: from the first rank's issue of a task to this one's, on average.
        last_share: of the tasks, those that it issued last.
        cost_s: how much longer the others stood still for it, mean over them: with nothing on the
            wire but tasks that waited for this rank, or all that it waits less than they do, where
            it is last more often than not (then they wait later, for what it has delayed).
    """

    mean_s: float
    last_share: float
    cost_s: float


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting."""

    rank: int
    cost_s: float  # a step, of each other rank
    cause: str  # in words


@dataclass
class _Tally:
    late_s: float = 0.0
    tasks: int = 0
    last: int = 0
    cost_s: float = 0.0


def lateness(rows: Sequence[Sequence[TracedStep]], error_s: float = 0.0) -> dict[int, Lateness]:
    """Each rank's lateness.

    Args:
        rows: by step, the steps of all ranks.
        error_s: how wrong the clocks of two ranks may be: who is late by less is not the last.
    """
    tallies: dict[int, _Tally] = {step.rank: _Tally() for step in rows[0]}
    for row in rows:
        issues = _issues(row)
        for by_rank in issues.values():
            first_s, last_s = min(by_rank.values()), max(by_rank.values())
            for rank, at_s in by_rank.items():
                tally = tallies[rank]
                tally.late_s += at_s - first_s
                tally.tasks += 1
                tally.last += at_s == last_s and last_s - first_s > error_s
        for step in row:
            for rank, seconds in _waited_for(step, issues).items():
                tallies[rank].cost_s += seconds
    exposed_s = {step.rank: 0.0 for step in rows[0]}
    for step in (step for row in rows for step in row):
        exposed_s[step.rank] += step.exposed_s / len(rows)
    return {rank: _lateness(rank, tally, exposed_s, len(rows)) for rank, tally in tallies.items()}


def _lateness(rank: int, tally: _Tally, exposed_s: Mapping[int, float], steps: int) -> Lateness:
    others = [seconds for one, seconds in exposed_s.items() if one != rank]
    cost_s = tally.cost_s / steps / max(1, len(others))
    last_share = tally.last / max(1, tally.tasks)
    if others and last_share > OFTEN:
        cost_s = max(cost_s, fmean(others) - exposed_s[rank])
    return Lateness(tally.late_s / max(1, tally.tasks), last_share, cost_s)


Key = tuple[object, ...]
Issues = Mapping[Key, Mapping[int, float]]  # by task, when each rank issued it


def _key(args: Mapping[str, object]) -> Key:
    # Plain all-reduces are no tasks of a plan: their buckets tell them apart.
    return (*map(args.get, ("step", "plan", "task", "round")), str(args.get("bucket")))


def _issues(row: Sequence[TracedStep]) -> Issues:
    """Of the tasks that every rank has."""
    found: dict[Key, dict[int, float]] = defaultdict(dict)
    for step in row:
        for span in step.named("comm"):
            found[_key(span.args)].setdefault(step.rank, span.begin_s)
    return {key: by_rank for key, by_rank in found.items() if len(by_rank) == len(row) > 1}


def _waited_for(step: TracedStep, issues: Issues) -> dict[int, float]:
    """Seconds in which `step`'s rank stood still because of each rank that issued later.

    While any task is on the wire whose ranks are all there, the link works, and nobody is to blame.
    """
    working: list[Interval] = []
    waiting: dict[int, list[Interval]] = defaultdict(list)
    for span in step.named("comm"):
        by_rank = issues.get(_key(span.args), {step.rank: span.begin_s})
        last = max(by_rank, key=lambda rank: by_rank[rank])
        met_s = min(span.end_s, max(span.begin_s, by_rank[last]))
        working.append((met_s, span.end_s))
        if last != step.rank:
            waiting[last].append((span.begin_s, met_s))
    idle = subtract(step.exposed, union(working))
    return {rank: length(intersect(idle, union(times))) for rank, times in waiting.items()}


def straggler(
    late: Mapping[int, Lateness], parts: Mapping[int, Mapping[str, float]], step_s: float
) -> Straggler | None:
    """The rank that costs the others most, if that is worth a word.

    Args:
        late: each rank's lateness.
        parts: each rank's seconds in "backward", "forward" and the "rest" of a step.
        step_s: the mean step time.
    """
    rank = max(late, key=lambda one: late[one].cost_s)
    cost_s = late[rank].cost_s
    if len(late) < 2 or cost_s < max(SOME_S, NOTABLE * step_s):
        return None
    return Straggler(rank, cost_s, _cause(rank, parts))


def _cause(rank: int, parts: Mapping[int, Mapping[str, float]]) -> str:
    """What of its own is longer than the other ranks' median."""
    excess = {}
    for name in ("backward", "forward", "rest"):
        others = [row[name] for one, row in parts.items() if one != rank and name in row]
        if others and name in parts[rank]:
            excess[name] = parts[rank][name] - median(others), median(others)
    name = max(excess, key=lambda one: excess[one][0], default="")
    more_s, usual_s = excess.get(name, (0.0, 0.0))
    if more_s < SOME_S:
        return "it starts late, though it computes no longer than the others"
    if name == "rest":
        return (
            f"it starts late: what it does outside of forward and backward (data loading, "
            f"optimizer) takes {1e3 * more_s:.0f} ms longer than elsewhere"
        )
    share = f", {more_s / usual_s:.0%}" if usual_s > 0 else ""
    return f"it computes longer: its {name} takes {1e3 * more_s:.0f} ms{share} more than elsewhere"


def parts_of(steps: Sequence[TracedStep]) -> dict[str, float]:
    """Mean seconds that one rank computes in "backward", "forward" and the "rest" of a step.

    Without what the training thread waits in them; a part without spans is left out.
    """
    found: dict[str, float] = {}
    wholes: list[float] = []
    for name in ("backward", "forward"):
        seconds = [length(subtract(step.times(name), step.exposed)) for step in steps]
        if any(seconds):
            found[name] = fmean(seconds)
    wholes = [step.compute_s for step in steps]
    return {**found, "rest": fmean(wholes) - sum(found.values())}
