"""Costs: what each bucket, parameter and layer costs a step. Pure functions on traced steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from commsched.layout import Layout
from commsched.reporting.culprits import Names, exposed_by_tensor
from commsched.reporting.traced import TracedStep

__all__ = ["BucketFigures", "TensorFigures", "buckets", "by_tensor", "layers", "tensors"]


@dataclass(frozen=True)
class BucketFigures:
    """One bucket of the plan's layout, mean over steps and ranks. Times from the first bucket."""

    index: int
    nbytes: int
    ready_ms: float | None
    done_ms: float | None
    exposed_ms: float
    params: tuple[str, ...]


@dataclass(frozen=True)
class TensorFigures:
    """One parameter, or one layer (`name` is then the module's), mean over steps and ranks."""

    name: str
    nbytes: int
    exposed_ms: float


def by_tensor(steps: Sequence[TracedStep], names: Names) -> dict[str, float]:
    """Mean seconds a step that each tensor is waited for."""
    found: dict[str, float] = defaultdict(float)
    for step in steps:
        for name, seconds in exposed_by_tensor(step, names).items():
            found[name] += seconds / len(steps)
    return dict(found)


def tensors(exposed_s: Mapping[str, float], layout: Layout | None) -> tuple[TensorFigures, ...]:
    """The tensors that were waited for."""
    nbytes = Names({}, layout).nbytes_of
    rows = [TensorFigures(name, nbytes.get(name, 0), 1e3 * s) for name, s in exposed_s.items()]
    return tuple(sorted(rows, key=lambda row: -row.exposed_ms))


def layers(exposed_s: Mapping[str, float], layout: Layout | None) -> tuple[TensorFigures, ...]:
    """By the module that owns the parameters; none where the layout is not known."""
    if layout is None:
        return ()
    sizes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for name, nbytes in Names({}, layout).nbytes_of.items():
        module = name.rpartition(".")[0] or name
        sizes[module] += nbytes
        seconds[module] += exposed_s.get(name, 0.0)
    rows = [TensorFigures(name, sizes[name], 1e3 * seconds[name]) for name in sizes]
    return tuple(sorted(rows, key=lambda row: -row.exposed_ms))


def buckets(
    steps: Sequence[TracedStep], layout: Layout | None, exposed_s: Mapping[str, float]
) -> Iterator[BucketFigures]:
    """The buckets, in the layout's order; without one, those that came."""
    ready, done = _bucket_times(steps)
    sizes: dict[int, int] = {}
    for span in (span for step in steps for span in step.named("ready")):
        if isinstance(span.args.get("bucket"), int):
            sizes[span.args["bucket"]] = int(span.args.get("bytes") or 0)
    for index in sorted(sizes) if layout is None else range(len(layout.buckets)):
        if layout is None:
            names: tuple[str, ...] = ()
            owned, nbytes = [f"bucket {index}"], sizes[index]
        else:
            spec = layout.buckets[index]
            names = tuple(param.name for param in spec.params)
            owned, nbytes = list(names), spec.nbytes
        yield BucketFigures(
            index,
            nbytes,
            1e3 * fmean(ready[index]) if ready[index] else None,
            1e3 * fmean(done[index]) if done[index] else None,
            1e3 * sum(exposed_s.get(name, 0.0) for name in owned),
            names,
        )


def _bucket_times(
    steps: Sequence[TracedStep],
) -> tuple[Mapping[int, list[float]], Mapping[int, list[float]]]:
    """For each bucket, in each step, seconds from the step's begin to its hook's call and end."""
    ready: dict[int, list[float]] = defaultdict(list)
    done: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        for span in step.named("ready"):
            if isinstance(span.args.get("bucket"), int):
                ready[span.args["bucket"]].append(span.begin_s - step.begin_s)
        ends: dict[int, float] = {}
        for span in (*step.named("comm"), *step.named("decode")):
            for bucket in span.args.get("bucket") or ():
                ends[bucket] = max(ends.get(bucket, 0.0), span.end_s - step.begin_s)
        for bucket, end_s in ends.items():
            done[bucket].append(end_s)
    return ready, done
