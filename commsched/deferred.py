"""Deferred optimizer steps: each parameter's runs in the next forward, just before it is read.

The hook returns at once, `optimizer.step()` records and returns, and the sums travel on while the
next forward begins. Source of the idea: ByteScheduler (SOSP'19), P3 (MLSys'19). Unlike those, the
user's own optimizer does the stepping, and no use of a parameter is missed (see `pending`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.handover import Handover, Listener, listen
from commsched.jobs import Job
from commsched.layout import first_names
from commsched.ledger import Due, Ledger, Sum
from commsched.pending import Unsummed, can_pend, mark_grad, mark_param, unmark
from commsched.recorder import Recorder
from commsched.tracing.tracer import SILENT, Silent
from commsched.watch import Watch

__all__ = ["Deferred"]

ELSEWHERE = (
    "another thread or process reads a parameter or gradient whose deferred step has not run; call "
    "state.synchronize() in the training thread before, or leave optimizer= out"
)
REPLACED = (
    "p.grad was replaced between backward() and step(), while gradients were being summed; call "
    "state.synchronize() before, or leave optimizer= out"
)

logger = logging.getLogger("commsched")


class Deferred(Listener):
    """The deferred steps of one DDP model. Used by the training thread only."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: tuple[Optimizer, ...],
        engine: Engine,
        recorder: Recorder,
        tracer: Silent = SILENT,
    ) -> None:
        self.recorder = recorder
        self.observing = False  # who is read when: while a profile is taken
        self.whole_forward = False  # compiled: forward's reads cannot be told apart
        self.whole_step = False  # compiled so that not even its beginning is seen
        self._params = list(ddp.module.parameters())
        names: dict[int, str] = {id(p): name for name, p in ddp.module.named_parameters()}
        self.watch = Watch(recorder, names, bool(ddp.find_unused_parameters))
        self._ledger = Ledger(engine, recorder, names, self, tracer)
        self._open = False  # a backward has begun and not ended
        self._said: set[str] = set()
        self._thread = os.getpid(), threading.get_ident()  # the training thread
        self.handovers = [Handover(optimizer, self) for optimizer in optimizers]
        listen(self)

    @property
    def due(self) -> dict[int, Due]:
        """The recorded steps that have not run, by their parameter's id."""
        return self._ledger.due

    # ---- what happens in a step, in this order ---------------------------------------------

    def forward_begins(self) -> None:
        """Before DDP's forward, and before DDP itself does anything in it."""
        self.recorder.forward_begins()
        self.watch.forget_late()
        if self.whole_forward:
            self.run_due()
            self._say("the model is compiled: deferred steps run when its forward begins")
        self._ledger.run([one for key, one in self.due.items() if key in self.watch.unseen])
        if self.observing and not self.whole_forward:
            self.watch.observe(param for param in self._ours() if id(param) not in self.due)

    def forward_ends(self) -> None:
        """After DDP's forward: the coming backward writes into the buckets."""
        late = [due.sum.param for due in self.due.values()]
        self.make_whole()
        for handover in self.handovers:
            handover.unmark()
        self.recorder.forward_ends()
        self.watch.note_late(late)

    def backward_begins(self) -> None:
        """At the first bucket of a backward."""
        if self.due or not self._ledger.whole():
            names = (self.watch.name(one.param) for one in self._ledger.sums.values())
            raise CommSchedError(
                "backward() ran while the last step's gradients were on their way, without a "
                f"forward of the DDP model in between ({first_names(names)}). Call the DDP model, "
                "not its module or its forward(), or state.synchronize() before"
            )
        self._ledger.clear()
        self._unmark_all()
        self._open = True

    def backward_ends(self) -> None:
        """All buckets of a backward have come; DDP has not finished it yet."""
        self._open = False
        if any(one.grad is None for one in self._ledger.sums.values()):
            # Unused on this rank, used on others: DDP sets the gradient when it finishes.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._mark_rest)

    def _mark_rest(self) -> None:
        for one in self._ledger.sums.values():
            if one.grad is None and one.param.grad is not None and not one.job.visible:
                one.grad = one.param.grad
                mark_grad(one.grad, self)

    def expect(self, job: Job, params: Sequence[torch.Tensor]) -> None:
        """A bucket whose sums the training thread does not wait for."""
        self.watch.refuse_late(job, params)
        for index, param in enumerate(params):
            assert isinstance(param, nn.Parameter)
            self._ledger.sums[id(param)] = Sum(param, job, index, param.grad)
            if param.grad is not None:
                mark_grad(param.grad, self)

    def on_step(self, handover: Handover, closure: Callable[[], Any] | None) -> Any:
        """The user's `optimizer.step()`: record it, or run it where nothing is on its way.

        Raises:
            CommSchedError: gradients were changed since backward(); or a closure is given to an
                optimizer that may call it more than once.
        """
        self._thread = os.getpid(), threading.get_ident()
        loss = None
        if closure is not None:
            loss = handover.evaluate(closure)
        whole = handover.must_be_whole()
        if whole is not None:
            self._say(f"not deferred: {whole}")
            self.make_whole()
        if self._ledger.whole():
            self.run_due()
            params = [param for param in handover.params() if param.grad is not None]
            self._ledger.timed(params, handover.whole_step)
        else:
            self._defer(handover)
            if self.whole_step:
                self.run_due()
        return loss

    # ---- settling --------------------------------------------------------------------------

    def settle(self, tensor: torch.Tensor) -> None:
        """Wait for a pending parameter's gradient and run its step; or wait for all gradients.

        Raises:
            CommSchedError: communication failed, or its gradient was changed meanwhile.
        """
        if self._elsewhere():
            raise CommSchedError(ELSEWHERE)
        due = self.due.get(id(tensor))
        if due is not None:
            self.watch.saw(tensor)
            self._ledger.run([due])
            return
        if self._open and torch._C._current_graph_task_id() != -1:
            return  # a hook in backward: as in plain DDP, it sees what there is
        if type(tensor) is Unsummed and not self._ledger.whole():
            self._say(
                "gradients are read after backward(), which waits for all sums there; "
                "state.clip_grad_norm_(max_norm) keeps more of the overlap than torch's"
            )
            self.make_whole()
        unmark(tensor)

    def run_due(self) -> None:
        """Run all recorded steps: parameters and optimizer state are up to date from here on.

        Raises:
            CommSchedError: communication failed, gradients were changed meanwhile, or this is not
                the training thread.
        """
        if self.due and self._elsewhere():
            raise CommSchedError(ELSEWHERE)
        self._ledger.run_all()

    def make_whole(self) -> None:
        """Run all recorded steps, and wait for all sums: gradients are whole from here on.

        Raises:
            CommSchedError: as `run_due`; or a backward raised before all its buckets had come, so
                that its sums will never be there.
        """
        self.run_due()
        if self._open and not self._ledger.whole():
            self._ledger.clear()
            raise CommSchedError(
                "the last backward() did not end, so its gradients are not summed; other ranks "
                "wait for them. Restart the job"
            )
        self._ledger.finish()

    def before_fork(self) -> None:
        """The process forks, a DataLoader's worker perhaps: it shall find parameters up to date."""
        if self.due and not self._elsewhere():
            self.run_due()

    def _elsewhere(self) -> bool:
        return (os.getpid(), threading.get_ident()) != self._thread

    def before_step_of(self, optimizer: Optimizer) -> None:
        """An optimizer steps for real: where it was not handed over, it must find whole sums."""
        if self._ledger.whole():
            return
        ours = any(handover.is_for(optimizer) for handover in self.handovers)
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not ours and any(id(param) in self._ledger.sums for param in params):
            self._say(
                f"an optimizer ({type(optimizer).__name__}) that was not handed over steps this "
                "model: it waits for all sums, so that forward hides none of them; hand it over "
                "in State(optimizer=...)"
            )
            self.make_whole()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """See `State.clip_grad_norm_`."""
        ledger = self._ledger
        ledger.run_all()  # recorded before this clipping
        ledger.wait_for(ledger.sums.values())
        ledger.refuse_touched()
        ledger.scale(ledger.sums.values())  # a second clipping starts from the first one's outcome
        params = [param for param in self._params if param.grad is not None]
        grads = [param.grad for param in params if param.grad is not None]
        for grad in grads:
            unmark(grad)
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        # The factor that torch's clip_grad_norm_ would multiply with, now.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for param, grad in zip(params, grads, strict=True):
            one = ledger.sums.get(id(param))
            if one is None or one.job.visible:
                grad.mul_(factor)
            else:
                one.grad, one.factor = grad, factor
                mark_grad(grad, self)
        return norm

    def close(self) -> None:
        """Give the optimizers back, and let go of the model.

        What is pending, because its step was lost, stays so and says why when it is used.
        """
        for handover in self.handovers:
            handover.give_back()
        self._unmark_all()
        self._ledger.clear()
        self._params.clear()
        self.handovers.clear()

    # ---- inside ----------------------------------------------------------------------------

    def _defer(self, handover: Handover) -> None:
        ledger = self._ledger
        # A second step() before the next forward, or another optimizer's for the same parameters.
        again = [self.due[id(p)] for p in handover.params() if id(p) in self.due]
        ledger.run(again)
        recorded = handover.record()
        now: list[tuple[int, nn.Parameter, torch.Tensor]] = []
        for group, entry in enumerate(handover.optimizer.param_groups):
            for param in entry["params"]:
                grad = param.grad
                one = ledger.sums.get(id(param))
                if grad is None:
                    continue
                if one is None or one.job.visible:
                    now.append((group, param, grad))
                else:
                    if one.grad is not None and one.grad is not grad:
                        raise CommSchedError(REPLACED)
                    one.grad = grad
                    one.job.refuse_touched()
                    ledger.add(Due(one, grad, handover, recorded, group))
                    mark_param(param, self)
        if any(due.handover is handover for due in self.due.values()):
            handover.mark()
        if now:
            ledger.timed([row[1] for row in now], lambda: handover.run(recorded, now))

    def _unmark_all(self) -> None:
        for param in self._ours():
            if id(param) not in self.due:
                unmark(param)

    def _ours(self) -> Iterator[nn.Parameter]:
        """The handed-over optimizers' parameters, as far as they can be pending."""
        for handover in self.handovers:
            yield from filter(can_pend, handover.params())

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)
