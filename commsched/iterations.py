"""The iterations of one model: which is running, and what waits for the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from commsched.iteration import Iteration
from commsched.jobs import Job, Progress
from commsched.lane import Lane
from commsched.layout import first_names
from commsched.memory import Memory
from commsched.outstanding import Outstanding
from commsched.planner import Begin, Made, Planner
from commsched.tracing.clock import compare_clocks
from commsched.tracing.tracer import SILENT, Silent

__all__ = ["Iterations"]


class Iterations:
    """Begins and closes iterations, and counts them. On the engine's thread.

    Args:
        planner: makes the plans.
        memory: has the count, equal on all ranks.
        outstanding: told of jobs whose tasks are known.
        tracer: told of buckets, plans and clocks.
    """

    def __init__(
        self, planner: Planner, memory: Memory, outstanding: Outstanding, tracer: Silent = SILENT
    ) -> None:
        self._planner = planner
        self._memory = memory
        self._outstanding = outstanding
        self._tracer = tracer
        self._noted: Made | None = None
        self.running = Iteration(planner.unmeasured, None)
        self._held: deque[Callable[[], None]] = deque()  # events of an iteration begun too early

    def clear(self) -> None:
        """Let go of everything: it holds gradients."""
        self._held.clear()
        self.running = Iteration(self._planner.unmeasured, None)

    def on_ready(self, lane: Lane, job: Job, begins: Begin | None) -> None:
        """A bucket has come; with `begins` the first one of an iteration."""
        if self._held or (begins and not self.running.finished()):
            # The last iteration was never ended (its backward raised, or ran outside autograd).
            self.running.end()
            self._held.append(partial(self.on_ready, lane, job, begins))
            return
        if begins or self.running.closed:
            self._begin(lane, begins)
        self.running.add(job)
        known = self.running.next_plan()
        job.place = None if known is None else known.find(job)
        if self._tracer.on:
            self._trace(job)
        if self.running.resumes and self._planner.saved_plan is not None:
            self._planner.resume()
        if job.tasks_left == 0:  # no elements
            self._outstanding.finish(job)
        self._outstanding.tell()

    def _trace(self, job: Job) -> None:
        self._tracer.instant(
            "ready",
            "buckets",
            job.timing.ready_s,
            step=self._tracer.step,
            bucket=job.place,
            bytes=job.spec.nbytes,
            params=first_names(param.name for param in job.spec.params),
        )

    def _note_plan(self) -> None:
        """Have the trace say by what plan and profile it goes, where they are new."""
        made, noted, at_step = self._planner.made, self._noted, self._tracer.step
        if made is None or made is noted:
            return
        self._noted = made
        profile = made.profile
        if profile is not None and (noted is None or profile is not noted.profile):
            self._tracer.note("commsched_profile", profile=profile, at_step=at_step)
        digest = made.plan.digest
        self._tracer.note("commsched_plan", digest=digest, plan=made.plan, at_step=at_step)

    def _compare_clocks(self, lane: Lane, step: int) -> None:
        if self._tracer.clock_due(step):
            clock = lane.agree("comparing clocks", partial(compare_clocks, lane.group))
            self._tracer.note(
                "commsched_clock",
                at_s=time.monotonic(),
                offset_s=clock.offset_s,
                error_s=clock.error_s,
            )

    def on_end(self, progress: Progress) -> None:
        """No more buckets will come in this iteration."""
        if self._held:
            self._held.append(partial(self.on_end, progress))
        else:
            self.running.end()
            progress.end()
            self._outstanding.tell()

    def count(self) -> None:
        """One more begins."""
        self._memory.step += 1
        self._planner.begin(self._memory.step)
        if self._planner.sends_exactly:
            # What a codec that was tried has kept is of old gradients, should it be used later.
            self._memory.forget()

    def _begin(self, lane: Lane, begins: Begin | None) -> None:
        # Between two iterations nothing is on the wire, and every rank is at the same place of the
        # lane's order, since all count the same iterations.
        self.count()
        if begins is not None:
            self._compare_clocks(lane, begins.step)
            known = self.running.next_plan()
            plan = self._planner.converse(
                lane, begins, None if known is None else known.plan.layout
            )
            if plan is not None:
                self.running.adopt(plan)
            self._note_plan()
        self.running = Iteration(
            self._planner.unmeasured,
            self.running.next_plan(),
            self._memory.step,
            self._planner.saved_plan,
        )

    def close(self, lane: Lane, over: bool) -> bool:
        """Once an ended iteration's last task is done: plan again if its buckets were new.

        Every rank is here at the same place of its lane's order, because all see the same buckets;
        that is what lets the agreement use the lane's own group. True when events held back until
        now have been handled, so that there may be something to issue.

        Args:
            lane: where ranks agree.
            over: whether nothing is on its way.
        """
        iteration = self.running
        if not iteration.ended or iteration.closed or iteration.order or not over:
            return False
        iteration.closed = True
        layout = iteration.new_layout()
        if layout is not None:
            iteration.adopt(self._planner.plan_for(lane, layout))
            self._note_plan()
        held, self._held = self._held, deque()
        for event in held:
            event()
        return bool(held)
