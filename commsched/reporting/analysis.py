"""Analysis: what the traces of a run say about its communication. Pure: traces in, figures out."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from commsched.errors import CommSchedError
from commsched.layout import Layout
from commsched.plan import Plan
from commsched.profile import Profile
from commsched.reporting.costs import (
    BucketFigures,
    TensorFigures,
    buckets,
    by_tensor,
    layers,
    tensors,
)
from commsched.reporting.culprits import Names
from commsched.reporting.intervals import intersect, length, subtract
from commsched.reporting.stragglers import Lateness, Straggler, lateness, parts_of, straggler
from commsched.reporting.traced import TracedStep, steps_of, usable
from commsched.tracing.writer import END

if TYPE_CHECKING:
    from commsched.tracing.file import RankTrace

__all__ = ["Analysis", "Noted", "RankFigures", "analyse"]


@dataclass(frozen=True)
class RankFigures:
    """One rank, mean over the steps. Times in milliseconds a step.

    Attributes:
        exposed_ms: the training thread stood still for communication.
        idle_ms: the part of it in which nothing was on the wire.
        after_last_ms: the part of it after the last bucket had come.
        compute_ms: the rest of the step.
        overlap: the share of the wire's busy time in which training went on; None: never busy.
        busy: the share of the step in which at least one task was on the wire.
        engine_ms: encoding and decoding, on the engine's thread.
        sent_mb: sent in a step, in MB of 1e6 bytes.
        backward_ms, forward_ms: computing in them; None where the trace has no such spans.
        late_ms, last_share, cost_ms: see `stragglers.Lateness`.
    """

    rank: int
    step_ms: float
    exposed_ms: float
    idle_ms: float
    after_last_ms: float
    compute_ms: float
    overlap: float | None
    busy: float
    engine_ms: float
    sent_mb: float
    backward_ms: float | None
    forward_ms: float | None
    late_ms: float
    last_share: float
    cost_ms: float


@dataclass(frozen=True)
class Noted:
    """What the run has written about itself into its traces.

    Attributes:
        settings: the effective ones, by name.
        handed_over: the optimizer; None where an older trace does not say.
        profile, plan: the last ones; None where none was made.
        plans: all of them, by digest.
        tuning: what the automatic mode has found.
        error_s: how wrong two ranks' clocks may be to each other.
    """

    settings: Mapping[str, Any]
    handed_over: bool | None
    profile: Profile | None
    plan: Plan | None
    plans: Mapping[str, Plan]
    tuning: Mapping[str, Any] | None
    error_s: float

    @property
    def layout(self) -> Layout | None:
        """The buckets."""
        if self.plan is not None:
            return self.plan.layout
        return None if self.profile is None else self.profile.layout


@dataclass(frozen=True)
class Analysis:
    """What the traces say. Times in milliseconds a step; means over steps and ranks.

    Attributes:
        world_size: of the run; `ranks` has those with a trace.
        choice: how gradients travelled, in the run's own words.
        deferred: whether optimizer steps ran in the next forward, in most steps.
        steps: how many were used, the same ones of every rank.
        unsettled: of them, those in which it was measured, or tried, how to communicate.
        left_out: how many were not, and why.
        step_ms, median_ms, max_ms: the step time.
        exposed_ms, exposed_median_ms: training threads stood still for communication.
        tensors, layers: the costliest first.
        typical: the steps, one a rank, whose length is nearest to the median.
    """

    world_size: int
    choice: str
    deferred: bool
    steps: int
    unsettled: int
    left_out: tuple[str, ...]
    step_ms: float
    median_ms: float
    max_ms: float
    exposed_ms: float
    exposed_median_ms: float
    ranks: tuple[RankFigures, ...]
    buckets: tuple[BucketFigures, ...]
    layers: tuple[TensorFigures, ...]
    tensors: tuple[TensorFigures, ...]
    straggler: Straggler | None
    noted: Noted
    typical: tuple[TracedStep, ...]

    @cached_property
    def busy(self) -> float:
        """The share of a step in which a rank's wire was busy."""
        return fmean(rank.busy for rank in self.ranks)

    @cached_property
    def overlap(self) -> float | None:
        """The share of the wire's busy time in which training went on."""
        return _overlap(self.exposed_ms, self.busy * self.step_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: all figures."""
        plain = {"noted", "typical"}
        names = [name for name in self.__dataclass_fields__ if name not in plain]
        figures = {name: _plain(getattr(self, name)) for name in names}
        return {**figures, "busy": self.busy, "overlap": self.overlap}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _overlap(exposed: float, busy: float) -> float | None:
    return max(0.0, 1.0 - exposed / busy) if busy > 0 else None


def analyse(traces: Sequence[RankTrace]) -> Analysis:
    """Say how training runs, and who waits for whom.

    Args:
        traces: of ranks of one run, times on rank 0's clock. Of several models in one process the
            one that waits longest is reported on, and `left_out` says so.

    Raises:
        CommSchedError: they hold no step to report on.
    """
    if not traces:
        raise CommSchedError("no traces were given; COMMSCHED_TRACE=folder makes a run write them")
    traces, left_out = _one_model(traces)
    rows, more = usable([steps_of(trace) for trace in traces])
    left_out += more
    steps = [step for row in rows for step in row]
    noted = _noted(traces)
    late = lateness(rows, noted.error_s)
    by_rank = {row.rank: [step for step in steps if step.rank == row.rank] for row in rows[0]}
    parts = {rank: parts_of(mine) for rank, mine in by_rank.items()}
    step_ms = _ms(step.step_s for step in steps)
    exposed_s = by_tensor(steps, Names(noted.plans, noted.layout))
    over_ranks_ms = [_ms(step.step_s for step in row) for row in rows]
    middle_ms = median(over_ranks_ms)
    return Analysis(
        world_size=max(trace.world_size for trace in traces),
        choice=rows[-1][0].choice,
        deferred=2 * sum(step.is_deferred for step in steps) > len(steps),
        steps=len(rows),
        unsettled=sum(not all(step.is_settled for step in row) for row in rows),
        left_out=tuple(left_out),
        step_ms=step_ms,
        median_ms=middle_ms,
        max_ms=max(1e3 * step.step_s for step in steps),
        exposed_ms=_ms(step.exposed_s for step in steps),
        exposed_median_ms=median(_ms(step.exposed_s for step in row) for row in rows),
        ranks=tuple(_rank(rank, by_rank[rank], parts[rank], late[rank]) for rank in by_rank),
        buckets=tuple(buckets(steps, noted.layout, exposed_s)),
        layers=layers(exposed_s, noted.layout),
        tensors=tensors(exposed_s, noted.layout),
        straggler=straggler(late, parts, step_ms / 1e3),
        noted=noted,
        typical=tuple(min(rows, key=lambda row: abs(_ms(s.step_s for s in row) - middle_ms))),
    )


def _ms(seconds: Iterable[float]) -> float:
    mean_s: float = fmean(seconds)
    return 1e3 * mean_s


def _one_model(traces: Sequence[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """Of several in one process the one that waits longest; and what that leaves out."""
    groups: dict[int, dict[int, RankTrace]] = defaultdict(dict)
    for trace in traces:
        groups[trace.model][trace.rank] = trace

    def waits_s(group: Mapping[int, RankTrace]) -> float:
        spans = (span for trace in group.values() for span in trace.spans if span.name == "wait")
        return sum(span.end_s - span.begin_s for span in spans)

    most = max(groups.values(), key=waits_s)
    left_out = []
    if len(groups) > 1:
        left_out.append(f"{len(groups) - 1} other models: give their files alone to see them")
    for trace in most.values():
        if lost := sum(args.get("lost", 0) for name, args in trace.notes if name == END):
            left_out.append(f"{lost} spans of rank {trace.rank}, which were written too slowly")
    return [most[rank] for rank in sorted(most)], left_out


def _noted(traces: Sequence[RankTrace]) -> Noted:
    settings: Mapping[str, Any] = {}
    handed_over = None
    profile, plan, tuning, error_s = None, None, None, 0.0
    plans: dict[str, Plan] = {}
    for trace in reversed(traces):  # rank 0's last: it is the one that plans
        settings = trace.about.get("settings") or settings
        handed_over = trace.about.get("handed_over", handed_over)
        for name, args in trace.notes:
            if name == "commsched_profile":
                profile = Profile.from_json(_text(args["profile"]))
            elif name == "commsched_plan":
                plan = plans[args["digest"]] = Plan.from_json(_text(args["plan"]))
            elif name == "commsched_tuning":
                tuning = args["outcome"]
            elif name == "commsched_clock":
                error_s = max(error_s, float(args.get("error_s") or 0.0))
    if isinstance(tuning, str):
        tuning = json.loads(tuning)
    return Noted(settings, handed_over, profile, plan, plans, tuning, error_s)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rank(
    rank: int, steps: Sequence[TracedStep], parts: Mapping[str, float], late: Lateness
) -> RankFigures:
    step_ms, exposed_ms = _ms(s.step_s for s in steps), _ms(s.exposed_s for s in steps)
    busy_ms = _ms(length(step.wire) for step in steps)
    sent = (int(span.args.get("sent_bytes") or 0) for s in steps for span in s.named("comm"))
    return RankFigures(
        rank=rank,
        step_ms=step_ms,
        exposed_ms=exposed_ms,
        idle_ms=_ms(length(subtract(step.exposed, step.wire)) for step in steps),
        after_last_ms=_ms(_after_last(step) for step in steps),
        compute_ms=step_ms - exposed_ms,
        overlap=_overlap(exposed_ms, busy_ms),
        busy=busy_ms / step_ms,
        engine_ms=_ms(length(s.times("encode")) + length(s.times("decode")) for s in steps),
        sent_mb=sum(sent) / 1e6 / len(steps),
        backward_ms=1e3 * parts["backward"] if "backward" in parts else None,
        forward_ms=1e3 * parts["forward"] if "forward" in parts else None,
        late_ms=1e3 * late.mean_s,
        last_share=late.last_share,
        cost_ms=1e3 * late.cost_s,
    )


def _after_last(step: TracedStep) -> float:
    last_s = max((span.begin_s for span in step.named("ready")), default=step.end_s)
    return length(intersect(step.exposed, [(last_s, step.end_s)]))
