"""One iteration as the engine sees it: which tasks are still to be issued, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from commsched.jobs import Job, Run
from commsched.layout import BucketSpec, Chunk, Layout
from commsched.plan import Plan

__all__ = ["Iteration", "KnownPlan"]


@dataclass(frozen=True)
class KnownPlan:
    """A plan all ranks agreed on, and where this rank's buckets stand in its layout."""

    plan: Plan
    place: dict[int, int]  # Job.key -> bucket index in the plan's layout
    specs: dict[BucketSpec, int] = field(default_factory=dict)  # likewise, of a resumed run

    def find(self, job: Job) -> int | None:
        """The bucket index of a job; None where the plan does not know it."""
        return self.place.get(job.key, self.specs.get(job.spec))


class Iteration:
    """Tasks of one iteration in plan order; a bucket that the plan does not know goes as it comes.

    DDP calls the hook strictly in bucket order, on every rank alike. So when a bucket comes, the
    plan's earlier ones that have not come never will (all their parameters are unused), and
    dropping them, or appending an unknown bucket's tasks, changes the order equally everywhere.
    """

    def __init__(
        self,
        plan_of: Callable[[Layout], Plan],
        known: KnownPlan | None,
        step: int = 0,
        saved: Plan | None = None,
    ) -> None:
        self.step = step
        self.resumes = False  # by the saved plan, which a resumed run had
        self._saved = saved
        self.ended = False
        self.closed = False  # its buckets have been compared with the plan's
        self.order: deque[Run] = deque()
        self._plan_of = plan_of
        self._known = known
        self._seen: list[tuple[int, BucketSpec]] = []  # not the jobs: they hold gradients
        self._unknown = False
        self._waiting: dict[int, list[Run]] = {}  # plan bucket index -> runs that need it
        self._settled: set[int] = set()  # plan bucket indices that came, and those given up
        if known is not None:
            self._lay_out(known.plan)

    def _resume(self, job: Job) -> None:
        """Before the first bucket: if only the saved plan knows it, that plan it is."""
        if self._saved is None or (self._known is not None and self._known.find(job) is not None):
            return
        specs = {spec: index for index, spec in enumerate(self._saved.layout.buckets)}
        if job.spec in specs:
            self.order.clear()
            self._waiting.clear()
            self._known = KnownPlan(self._saved, {}, specs)
            self._lay_out(self._saved)
            self.resumes = True

    def _lay_out(self, plan: Plan) -> None:
        for run in self._runs(plan):
            self.order.append(run)
            for bucket in run.missing:
                self._waiting.setdefault(bucket, []).append(run)

    def _runs(self, plan: Plan) -> Iterator[Run]:
        before: dict[Chunk, Run] = {}
        for task in plan.tasks:
            run = Run(task, plan, {piece.bucket for piece in task.chunk.pieces}, step=self.step)
            if task.round:
                run.after = before[task.chunk]
            before[task.chunk] = run
            yield run

    def head(self) -> Run | None:
        """The next run, if it is ready. Readiness delays, never reorders."""
        return self.order[0] if self.order and self.order[0].ready else None

    def add(self, job: Job) -> None:
        """A bucket has come."""
        if not self._seen:
            self._resume(job)
        self._seen.append((job.key, job.spec))
        place = None if self._known is None else self._known.find(job)
        if place is None or place in self._settled:
            self._append(job)
            return
        self._settled.add(place)
        self._drop([bucket for bucket in self._waiting if bucket < place])
        for run in self._waiting.pop(place, []):
            self._give(run, place, job)
        job.placed()

    def end(self) -> None:
        """No more buckets will come."""
        self._drop(list(self._waiting))
        self.ended = True

    def finished(self) -> bool:
        """Whether a new iteration may begin."""
        return self.closed or not self._seen

    def new_layout(self) -> Layout | None:
        """The layout to plan for, if buckets came that the plan does not know."""
        if not self._unknown:
            return None
        return Layout(tuple(spec for _, spec in self._seen))

    def adopt(self, plan: Plan) -> None:
        """From the next iteration on, use this plan, made for `new_layout` or a known layout."""
        if self._known is not None and plan.layout == self._known.plan.layout:
            self._known = replace(self._known, plan=plan)
        else:
            self._known = KnownPlan(plan, {key: at for at, (key, _) in enumerate(self._seen)})

    def next_plan(self) -> KnownPlan | None:
        """The plan of the iteration after this one."""
        return self._known

    def _append(self, job: Job) -> None:
        self._unknown = True
        self._drop(list(self._waiting))
        plan = self._plan_of(Layout((job.spec,)))
        for run in self._runs(plan):
            run.unknown = run.task.index == 0
            self.order.append(run)
            self._give(run, 0, job)
        job.placed()

    def _give(self, run: Run, bucket: int, job: Job) -> None:
        run.missing.discard(bucket)
        run.jobs[bucket] = job
        job.add_task(run.covers[bucket])

    def _drop(self, buckets: list[int]) -> None:
        self._settled.update(buckets)
        for bucket in buckets:
            for run in self._waiting.pop(bucket):
                run.missing.discard(bucket)
                if not run.missing and not run.jobs:
                    self.order.remove(run)
