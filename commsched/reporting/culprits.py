"""Culprits: whose gradients the training thread waited for. Pure functions on traced steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from commsched.layout import Layout
from commsched.plan import Plan
from commsched.reporting.traced import TracedStep

if TYPE_CHECKING:
    from commsched.tracing.file import Span

__all__ = ["Names", "exposed_by_tensor"]

LATE_S = 2e-3  # a wait ends so much before its task's own end is written, at most
Shares = Mapping[str, float]  # by tensor; they sum up to 1


@dataclass(frozen=True)
class Names:
    """What the trace tells of the model: its plans, by digest, and the layout.

    Without a layout the tensors are the buckets, called by their numbers.
    """

    plans: Mapping[str, Plan]
    layout: Layout | None

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """Each tensor's bucket."""
        if self.layout is None:
            return {}
        buckets = enumerate(self.layout.buckets)
        return {param.name: index for index, spec in buckets for param in spec.params}

    @cached_property
    def nbytes_of(self) -> dict[str, int]:
        """Each tensor's bytes of gradients."""
        specs = () if self.layout is None else self.layout.buckets
        return {param.name: param.numel * spec.itemsize for spec in specs for param in spec.params}

    @cached_property
    def _tasks(self) -> dict[tuple[str, object, str], Shares]:
        return {}

    def of_task(self, comm: Span) -> Shares:
        """The tensors that a task carries, by their bytes."""
        key = str(comm.args.get("plan")), comm.args.get("task"), str(comm.args.get("bucket"))
        if key not in self._tasks:
            self._tasks[key] = self._of_task(comm)
        return self._tasks[key]

    def _of_task(self, comm: Span) -> Shares:
        args = comm.args
        plan = self.plans.get(str(args.get("plan")))
        index = args.get("task")
        if plan is not None and isinstance(index, int) and index < len(plan.tasks):
            spans = plan.layout.spans(plan.tasks[index].chunk)
            return _shares((span.param, span.numel) for span in spans)
        buckets = args.get("bucket")
        rows = buckets if isinstance(buckets, list) else [buckets]
        return _shares(one for bucket in rows for one in self._of_bucket(bucket))

    def of_wait(self, wait: Span) -> Shares:
        """The tensors that a wait is for by its own words; empty: all there are."""
        param = wait.args.get("params")
        if isinstance(param, str) and param in self.bucket_of:
            return {param: 1.0}
        bucket = wait.args.get("bucket")
        return {} if bucket is None else _shares(self._of_bucket(bucket))

    def _of_bucket(self, bucket: object) -> Iterator[tuple[str, int]]:
        if self.layout is None or not isinstance(bucket, int) or bucket >= len(self.layout.buckets):
            yield f"bucket {bucket}", 1
            return
        for param in self.layout.buckets[bucket].params:
            yield param.name, param.numel


def _shares(rows: Iterable[tuple[str, int]]) -> Shares:
    found: dict[str, float] = defaultdict(float)
    for name, numel in rows:
        found[name] += numel
    total = sum(found.values())
    return {name: numel / total if total else 1 / len(found) for name, numel in found.items()}


def exposed_by_tensor(step: TracedStep, names: Names) -> dict[str, float]:
    """Seconds that the training thread stood still for each tensor; in all, `step.exposed_s`.

    A wait for one parameter is that parameter's. Any other is cut where tasks came back within it:
    the time up to each is for what that task carried.
    """
    arrivals = _arrivals(step)
    found: dict[str, float] = defaultdict(float)
    for begin_s, end_s, wanted in _waits(step, names):
        if len(wanted) == 1:
            for name in wanted:
                found[name] += end_s - begin_s
            continue
        for seconds, comm in _cut(begin_s, end_s, arrivals, wanted, names):
            shares = wanted if comm is None else names.of_task(comm)
            for name, share in (shares or {"unknown": 1.0}).items():
                found[name] += seconds * share
    return dict(found)


def _arrivals(step: TracedStep) -> list[tuple[float, Span]]:
    """When each task was done, decoding included; in that order."""
    decoded = {_key(span): span.end_s for span in step.named("decode")}
    rows = [(max(s.end_s, decoded.get(_key(s), s.end_s)), s) for s in step.named("comm")]
    return sorted(rows, key=lambda row: row[0])


def _key(span: Span) -> tuple[object, ...]:
    args = span.args
    return (*map(args.get, ("step", "plan", "task", "round")), str(args.get("bucket")))


def _waits(step: TracedStep, names: Names) -> Iterator[tuple[float, float, Shares]]:
    """`step.exposed`, piece by piece, each with what it was for; an inner wait is the outer's."""
    spans = sorted(step.named("wait"), key=lambda span: span.begin_s)
    at = 0
    for begin_s, end_s in step.exposed:
        while at < len(spans) and spans[at].begin_s < end_s:
            from_s, to_s = max(begin_s, spans[at].begin_s), min(end_s, spans[at].end_s)
            if to_s > from_s:
                if from_s > begin_s:  # the reducer's, as is the rest
                    yield begin_s, from_s, {}
                yield from_s, to_s, names.of_wait(spans[at])
                begin_s = to_s
            at += 1
        if end_s > begin_s:
            yield begin_s, end_s, {}


def _cut(
    begin_s: float,
    end_s: float,
    arrivals: Sequence[tuple[float, Span]],
    wanted: Shares,
    names: Names,
) -> Iterator[tuple[float, Span | None]]:
    ours = [row for row in arrivals if not wanted or wanted.keys() & names.of_task(row[1]).keys()]
    inside = [row for row in ours if begin_s < row[0] <= end_s + LATE_S]
    if not inside:
        nearest = min(ours, key=lambda row: abs(row[0] - end_s), default=None)
        yield end_s - begin_s, None if nearest is None else nearest[1]
        return
    for at, (done_s, comm) in enumerate(inside):
        until_s = end_s if at == len(inside) - 1 else min(done_s, end_s)
        yield until_s - begin_s, comm
        begin_s = until_s
