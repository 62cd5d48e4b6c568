"""The iterations of one model: which is running, and what waits for the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from commsched.iteration import Iteration
from commsched.jobs import Job, Progress
from commsched.lane import Lane
from commsched.memory import Memory
from commsched.outstanding import Outstanding
from commsched.planner import Begin, Planner

__all__ = ["Iterations"]


class Iterations:
    """Begins and closes iterations, and counts them. On the engine's thread.

    Args:
        planner: makes the plans.
        memory: has the count, equal on all ranks.
        outstanding: told of jobs whose tasks are known.
    """

    def __init__(self, planner: Planner, memory: Memory, outstanding: Outstanding) -> None:
        self._planner = planner
        self._memory = memory
        self._outstanding = outstanding
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
        if self.running.resumes and self._planner.saved_plan is not None:
            self._planner.resume()
        if job.tasks_left == 0:  # no elements
            self._outstanding.finish(job)
        self._outstanding.tell()

    def on_end(self, progress: Progress) -> None:
        """No more buckets will come in this iteration."""
        if self._held:
            self._held.append(partial(self.on_end, progress))
        else:
            self.running.end()
            progress.end()
            self._outstanding.tell()

    def _begin(self, lane: Lane, begins: Begin | None) -> None:
        # Between two iterations nothing is on the wire, and every rank is at the same place of the
        # lane's order, since all count the same iterations.
        self._memory.step += 1
        self._planner.begin(self._memory.step)
        if begins is not None:
            known = self.running.next_plan()
            plan = self._planner.converse(
                lane, begins, None if known is None else known.plan.layout
            )
            if plan is not None:
                self.running.adopt(plan)
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
        held, self._held = self._held, deque()
        for event in held:
            event()
        return bool(held)
