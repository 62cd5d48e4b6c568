"""The ledger of deferred steps: whose gradients are on their way, and which steps are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.handover import Handover
from commsched.jobs import Job
from commsched.layout import first_names
from commsched.pending import Owner, mark_grad, unmark
from commsched.recorder import Recorder
from commsched.shadow import Recorded
from commsched.tracing.tracer import SILENT, Fixed, Silent

__all__ = ["Due", "Ledger", "Sum"]


@dataclass(eq=False, slots=True)
class Sum:
    """One parameter's gradient in the latest backward's buckets."""

    param: nn.Parameter
    job: Job
    index: int  # in the bucket
    grad: torch.Tensor | None  # as DDP shaped it, in the bucket's memory; None: DDP sets it later
    factor: torch.Tensor | None = None  # of gradient clipping, not applied yet


@dataclass(eq=False, slots=True)
class Due:
    """One recorded step that has not run."""

    sum: Sum
    grad: torch.Tensor
    handover: Handover
    recorded: Recorded
    group: int


class Ledger:
    """Sums and due steps of one model's latest backward. For the training thread.

    Args:
        engine: sums the gradients.
        recorder: is told of waits and of steps.
        names: of the model's parameters, by id.
        owner: of the gradients under way.
        tracer: likewise told of waits and of steps.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: Recorder,
        names: dict[int, str],
        owner: Owner,
        tracer: Silent = SILENT,
    ) -> None:
        self.sums: dict[int, Sum] = {}  # by the parameter's id, as is:
        self.due: dict[int, Due] = {}
        self._engine = engine
        self._recorder = recorder
        self._names = names
        self._owner = owner
        self._tracer = tracer
        self._jobs: dict[Job, list[Due]] = {}  # with due steps

    def whole(self) -> bool:
        """Whether all sums are there, and the training program knows it."""
        return all(one.job.visible for one in self.sums.values())

    def add(self, due: Due) -> None:
        """One more step is due."""
        self.due[id(due.sum.param)] = due
        self._jobs.setdefault(due.sum.job, []).append(due)

    def run_all(self) -> None:
        """Wait for the sums of all due steps and run them."""
        self.run(self.due.values())

    def run(self, dues: Iterable[Due]) -> None:
        """Wait for their sums and run them, and what shares a bucket with them and is there.

        Raises:
            CommSchedError: communication failed, or gradients were changed meanwhile.
        """
        dues = list(dues)
        self.wait_for(due.sum for due in dues)
        for job in dict.fromkeys(due.sum.job for due in dues):
            self._run_job(job)

    def finish(self) -> None:
        """No step is due any more: wait for all sums. Gradients are whole from here on.

        Raises:
            CommSchedError: communication failed, or gradients were changed meanwhile.
        """
        under_way = [one for one in self.sums.values() if not one.job.visible]
        self.wait_for(under_way)
        self.refuse_touched()
        self.scale(under_way)
        for one in under_way:
            one.job.visible = True
            if one.grad is not None:
                unmark(one.grad)

    def wait_for(self, sums: Iterable[Sum]) -> None:
        """Wait for sums; meanwhile run the steps whose sums are there."""
        for one in sums:
            job, index = one.job, one.index
            while not job.has(index):
                ready = self._complete()
                if ready is not None:
                    self._run_job(ready)
                    continue
                self._wait(job, index)
            job.raise_error()

    def _wait(self, job: Job, index: int) -> None:
        begin_s = time.monotonic()
        about = partial(_of_job, job, index)
        with self._tracer.region("wait", "training", about, step=self._tracer.step):
            self._engine.wait(lambda: job.has(index) or self._complete())
        end_s = time.monotonic()
        self._recorder.waited(begin_s, end_s)
        job.timing.waited_s = (job.timing.waited_s or 0.0) + end_s - begin_s

    def _complete(self) -> Job | None:
        """A bucket with due steps all of whose sums are there."""
        return next((job for job in self._jobs if job.complete() and job.error is None), None)

    def _run_job(self, job: Job) -> None:
        """Run those of its due steps whose sums are there."""
        dues = self._jobs.get(job, [])
        ready = [due for due in dues if job.has(due.sum.index)]
        if not ready:
            return
        job.raise_error()
        job.refuse_touched()
        rest = [due for due in dues if not job.has(due.sum.index)]
        if rest:
            self._jobs[job] = rest
        else:
            del self._jobs[job]
        for due in ready:
            del self.due[id(due.sum.param)]
            unmark(due.sum.param)
            unmark(due.grad)
        try:
            for recorded in dict.fromkeys(due.recorded for due in ready):
                self._run_together([due for due in ready if due.recorded is recorded])
        except BaseException as error:
            names = first_names(self._names[id(due.sum.param)] for due in ready)
            self._engine.fail(
                CommSchedError(
                    f"the optimizer raised {type(error).__name__} in the deferred step of {names}, "
                    "which is lost; restart the process from a checkpoint"
                )
            )
            raise
        job.version = job.result._version  # some optimizers change gradients
        if not job.visible:
            # Not all of the bucket is whole: who touches one of its gradients must still wait.
            for due in ready:
                if due.sum.param.grad is due.grad:
                    mark_grad(due.grad, self._owner)

    def _run_together(self, dues: list[Due]) -> None:
        """Run steps that were recorded by one call of one optimizer."""
        first = dues[0]
        self.scale(due.sum for due in dues)
        rows = [(due.group, due.sum.param, due.grad) for due in dues]
        params = [due.sum.param for due in dues]
        step = partial(first.handover.run, first.recorded, rows)
        self.timed(params, step, "deferred step")

    def refuse_touched(self) -> None:
        """Raise if the user has changed gradients under way behind our back.

        Raises:
            CommSchedError: says what to do instead.
        """
        for job in dict.fromkeys(one.job for one in self.sums.values()):
            if not job.visible:
                job.refuse_touched()

    @staticmethod
    def scale(sums: Iterable[Sum]) -> None:
        """Apply what gradient clipping has left to be applied; the sums must be there."""
        for one in sums:
            if one.factor is not None and one.grad is not None:
                unmark(one.grad)
                one.grad.data.mul_(one.factor)
                one.factor = None

    def clear(self) -> None:
        """Forget the sums; they must be there, or never come."""
        for one in self.sums.values():
            if one.grad is not None:
                unmark(one.grad)
        self.sums.clear()

    def timed(
        self,
        params: Iterable[nn.Parameter],
        step: Callable[[], object],
        called: str = "optimizer step",
    ) -> None:
        """Run `step`, an optimizer's for `params`, and have it recorded."""
        params = list(params)
        begin_s = time.monotonic()
        about = partial(self._of_params, params)
        with self._tracer.region(called, "training", about, step=self._tracer.step):
            step()
        numels = {self._names.get(id(param), ""): param.numel() for param in params}
        self._recorder.stepped(begin_s, time.monotonic(), numels)

    def _of_params(self, params: list[nn.Parameter]) -> Fixed:
        return Fixed({"params": first_names(self._names.get(id(param), "") for param in params)})


def _of_job(job: Job, index: int) -> Fixed:
    return Fixed({"bucket": job.place, "params": job.spec.params[index].name})
