"""Exposed communication, measured inside the run: how long training waited, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from commsched.jobs import Timing
from commsched.layout import BucketSpec

__all__ = ["BucketReport", "Exposure", "Report"]

WINDOW = 100  # steps that a report averages over


@dataclass(frozen=True)
class BucketReport:
    """One bucket, averaged over the window. Times in milliseconds."""

    params: tuple[str, ...]
    nbytes: int
    ready_ms: float  # from the first bucket's hook call to this one's
    comm_ms: float  # from its hook call to its averaged gradients
    exposed_ms: float  # the training thread's wait for it, beyond those for others


@dataclass(frozen=True)
class Report:
    """What a State has measured on this rank over its last steps (at most 100).

    `exposed_ms` is the time a step that the training thread stood still for communication, at the
    end of backward or, with deferred optimizer steps, in forward; 0 where commsched does not do the
    communication (`active` False). `predicted_ms` is the step that the plan's profile lets expect,
    `ideal_ms` the one that no exact schedule could beat; None where nothing was measured. As long
    as there are some, only steps after the automatic mode's trials count.

    `plan` is None before there is one, and where torch's own all-reduce was kept.

    `choice` is what is in effect, in words; `tuning` what the automatic mode has tried and why it
    has chosen that (`tuner.Outcome`), None before and where the user has.
    """

    active: bool
    reason: str  # why not active, else ""
    steps: int
    exposed_ms: float
    exposed_max_ms: float
    wire_bytes_per_step: float
    codec: str
    policy: str
    plan: str | None  # the plan's digest
    buckets: tuple[BucketReport, ...]
    deferred_steps: int = 0  # of `steps`: those whose optimizer steps ran in the next forward
    predicted_ms: float | None = None
    ideal_ms: float | None = None
    step_ms: float | None = None  # mean, from one backward's first bucket to the next's
    choice: str = ""
    tuning: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.active:
            return f"commsched is not active: {self.reason}"
        of_ms = "" if self.step_ms is None else f" of {self.step_ms:.2f}"
        lines = [
            f"commsched, last {self.steps} steps: exposed {self.exposed_ms:.2f}{of_ms} ms a step "
            f"(longest {self.exposed_max_ms:.2f}), {self.wire_bytes_per_step / 1e6:.2f} MB sent a "
            f"step, {self.choice or self.policy}, codec {self.codec}"
            + (f", plan {self.plan}" if self.plan else ""),
            *self._expected(),
            *self._tried(),
            "bucket       MB  ready ms   comm ms  exposed ms  first parameters",
        ]
        for index, row in enumerate(self.buckets):
            names = ", ".join(row.params[:3]) + (", ..." if len(row.params) > 3 else "")
            lines.append(
                f"{index:6d} {row.nbytes / 1e6:8.2f} {row.ready_ms:9.2f} {row.comm_ms:9.2f} "
                f"{row.exposed_ms:11.2f}  {names}"
            )
        return "\n".join(lines)

    def _tried(self) -> list[str]:
        if self.tuning is None:
            return []
        lines = [
            f"automatic mode keeps {self.tuning['chosen']}: {self.tuning['why']}",
            "  predicted ms  measured ms  candidate",
        ]
        for row in self.tuning["rows"]:
            tried = "-" if row["measured_ms"] is None else f"{row['measured_ms']:.2f}"
            lines.append(f"  {row['predicted_ms']:12.2f} {tried:>12}  {row['name']}")
        return lines

    def _expected(self) -> list[str]:
        if self.predicted_ms is None or self.ideal_ms is None:
            return []
        late = [f"{self.deferred_steps} of {self.steps} steps deferred into the next forward"]
        return [
            *(late if self.deferred_steps else ()),
            f"predicted {self.predicted_ms:.2f} ms a step; no exact schedule takes less than "
            f"{self.ideal_ms:.2f}",
        ]


@dataclass
class _Step:
    exposed_s: float
    begin_s: float
    step_s: float | None  # None where the next one has not begun
    deferred: bool
    settled: bool
    specs: tuple[BucketSpec, ...]
    times_s: tuple[tuple[float, float, float], ...]  # ready, comm, exposed


class Exposure:
    """Collects the steps of one model. Written and read by the training thread only."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0  # exposed, since the start
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._open: tuple[list[Timing], float, bool] | None = None

    def add(self, timings: list[Timing], free_s: float, settled: bool = True) -> None:
        """One step: its buckets, and when the training thread had nothing left to do but wait.

        `settled`: neither measured nor tried.

        Some may still be on their way: the reducer, which waits for them, is counted as well.
        Timings, not jobs: those hold gradients, also of buckets that DDP is about to replace.
        """
        self._settle()
        begin_s = timings[0].ready_s
        if self._steps and self._open is None:
            self._steps[-1].step_s = begin_s - self._steps[-1].begin_s
        self.count += 1
        self._open = timings, free_s, settled

    def _settle(self) -> None:
        if self._open is None or not all(one.done_s for one in self._open[0]):
            return  # nothing, or still on its way
        (timings, free_s, settled), self._open = self._open, None
        first_s = timings[0].ready_s
        times = []
        for one in timings:
            waited_s = one.waited_s
            if waited_s is None:
                waited_s = max(0.0, one.done_s - free_s)
                free_s += waited_s
            times.append((one.ready_s - first_s, one.done_s - one.ready_s, waited_s))
        total_s = sum(waited_s for _, _, waited_s in times)
        deferred = any(one.waited_s is not None for one in timings)
        self._steps.append(
            _Step(
                total_s,
                first_s,
                None,
                deferred,
                settled,
                tuple(one.spec for one in timings),
                tuple(times),
            )
        )
        self.total_s += total_s

    def report(self, wire_bytes: float, codec: str, policy: str, plan: str | None) -> Report:
        """The report so far; `wire_bytes` is what was sent since the start."""
        self._settle()
        steps = [step for step in self._steps if step.settled] or list(self._steps)
        exposed_ms = [1e3 * step.exposed_s for step in steps]
        lengths_ms = [1e3 * step.step_s for step in steps if step.step_s is not None]
        return Report(
            active=True,
            reason="",
            steps=len(steps),
            exposed_ms=fmean(exposed_ms) if exposed_ms else 0.0,
            exposed_max_ms=max(exposed_ms, default=0.0),
            wire_bytes_per_step=wire_bytes / max(1, self.count),
            codec=codec,
            policy=policy,
            plan=plan,
            buckets=_buckets(steps),
            deferred_steps=sum(step.deferred for step in steps),
            step_ms=fmean(lengths_ms) if lengths_ms else None,
        )


def _buckets(steps: Sequence[_Step]) -> tuple[BucketReport, ...]:
    if not steps:
        return ()
    specs = steps[-1].specs
    like = [step.times_s for step in steps if step.specs == specs]
    rows = []
    for spec, times in zip(specs, zip(*like, strict=True), strict=True):
        ready, comm, exposed = (1e3 * fmean(column) for column in zip(*times, strict=True))
        names = tuple(param.name for param in spec.params)
        rows.append(BucketReport(names, spec.nbytes, ready, comm, exposed))
    return tuple(rows)


def inactive(reason: str) -> Report:
    """The report of a State that leaves communication to torch, or has not begun."""
    return Report(False, reason, 0, 0.0, 0.0, 0.0, "none", "none", None, ())
