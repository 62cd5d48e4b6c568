"""Deferred optimizer steps: each parameter's runs in the next forward, just before it is read.

The hook returns at once, `optimizer.step()` records and returns, and the sums travel on while the
next forward begins. Source of the idea: ByteScheduler (SOSP'19), P3 (MLSys'19). Unlike those, the
user's own optimizer does the stepping, and no use of a parameter is missed (see `pending`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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

__all__ = ["Deferred"]

ELSEWHERE = (
    "another thread reads a parameter or gradient whose deferred step has not run; call "
    "state.synchronize() in the training thread before, or leave optimizer= out"
)
REPLACED = (
    "p.grad was replaced between backward() and step(), while gradients were being summed; call "
    "state.synchronize() before, or leave optimizer= out"
)

logger = logging.getLogger("commsched")


class _Observer:
    """Owner of parameters of which we only want to know that they are read."""

    def __init__(self, seen: Callable[[torch.Tensor], None]) -> None:
        self._seen = seen

    def settle(self, tensor: torch.Tensor) -> None:
        unmark(tensor)
        self._seen(tensor)


class Deferred(Listener):
    """The deferred steps of one DDP model. Used by the training thread only."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: tuple[Optimizer, ...],
        engine: Engine,
        recorder: Recorder,
    ) -> None:
        self.recorder = recorder
        self.observing = False  # who is read when: while a profile is taken
        self.whole_forward = False  # compiled: forward's reads cannot be told apart
        self.whole_step = False  # compiled so that not even its beginning is seen
        self._unseen: set[int] = set()  # ids of parameters that were read without our seeing it
        self._params = list(ddp.module.parameters())
        self._names: dict[int, str] = {id(p): name for name, p in ddp.module.named_parameters()}
        self._find_unused = bool(ddp.find_unused_parameters)
        self._ledger = Ledger(engine, recorder, self._names)
        self._late: set[int] = set()  # settled only when forward ended
        self._used: set[int] = set()
        self._said: set[str] = set()
        self._thread = threading.get_ident()  # the training thread
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
        self._late.clear()
        if self.whole_forward:
            self.settle_all()
            self._say("the model is compiled: deferred steps run when its forward begins")
        self._ledger.run([one for key, one in self.due.items() if key in self._unseen])
        if self.observing and not self.whole_forward:
            observer = _Observer(self._observed)
            for param in self._ours():
                if id(param) in self._names and id(param) not in self.due:
                    mark_param(param, observer)

    def forward_ends(self) -> None:
        """After DDP's forward: the coming backward writes into the buckets."""
        late = [due.sum.param for due in self.due.values()]
        self.settle_all()
        self.recorder.forward_ends()
        self._late = {id(param) for param in late}
        observer = _Observer(self._used_late)
        for param in late:
            mark_param(param, observer)

    def backward_begins(self) -> None:
        """At the first bucket of a backward."""
        if self.due or not self._ledger.whole():
            names = (self._name(one.param) for one in self._ledger.sums.values())
            raise CommSchedError(
                "backward() ran while the last step's gradients were on their way, without a "
                f"forward of the DDP model in between ({first_names(names)}). Call the DDP model, "
                "not its module or its forward(), or state.synchronize() before"
            )
        self._ledger.sums.clear()
        self._unmark_all()

    def expect(self, job: Job, params: Sequence[torch.Tensor]) -> None:
        """A bucket whose sums the training thread does not wait for."""
        self._refuse_late(job, params)
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
        self._thread = threading.get_ident()
        loss = None
        if closure is not None:
            loss = self._evaluate(handover, closure)
        whole = handover.must_be_whole()
        if whole is not None:
            self._say(f"not deferred: {whole}")
            self.settle_all()
        if self._ledger.whole():
            self.settle_all()
            params = [param for param in handover.params() if param.grad is not None]
            self._ledger.timed(params, handover.whole_step)
        else:
            self._defer(handover)
            if self.whole_step:
                self.settle_all()
        return loss

    def note_unseen(self, params: Iterable[int]) -> None:
        """Measuring is over: those of `params` (ids) that were not seen to be read step early."""
        self._unseen = {one for one in params if one in self._names} - self._used
        if self._unseen:
            names = first_names(self._names[one] for one in self._unseen)
            logger.info("not seen to be read, so stepped when forward begins: %s", names)
        self._used.clear()

    # ---- settling --------------------------------------------------------------------------

    def settle(self, tensor: torch.Tensor) -> None:
        """Wait for a pending parameter's gradient and run its step; or wait for all gradients.

        Raises:
            CommSchedError: communication failed, or its gradient was changed meanwhile.
        """
        if threading.get_ident() != self._thread:
            raise CommSchedError(ELSEWHERE)
        due = self.due.get(id(tensor))
        if due is not None:
            self._observed(tensor)
            self._ledger.run([due])
            return
        if type(tensor) is Unsummed and not self._ledger.whole():
            self._say(
                "gradients are read after backward(), which waits for all sums there; "
                "state.clip_grad_norm_(max_norm) keeps more of the overlap than torch's"
            )
            self.settle_all()
        unmark(tensor)

    def settle_all(self) -> None:
        """Run all recorded steps, and wait for all sums: gradients are whole from here on.

        Raises:
            CommSchedError: communication failed, or gradients were changed meanwhile.
        """
        self._ledger.finish()

    def before_step_of(self, optimizer: Optimizer) -> None:
        """An optimizer steps for real: where it was not handed over, it must find whole sums."""
        if self._ledger.whole():
            return
        ours = any(handover.optimizer is optimizer for handover in self.handovers)
        params = (param for group in optimizer.param_groups for param in group["params"])
        if not ours and any(id(param) in self._ledger.sums for param in params):
            self._say(f"a {type(optimizer).__name__} that was not handed over steps this model")
            self.settle_all()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """See `State.clip_grad_norm_`."""
        ledger = self._ledger
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
        """Give the optimizers back. What is pending then stays so, and says why when used."""
        for handover in self.handovers:
            handover.give_back()
        self._unmark_all()

    # ---- inside ----------------------------------------------------------------------------

    def _defer(self, handover: Handover) -> None:
        ledger = self._ledger
        ledger.run([due for due in ledger.due.values() if due.handover is handover])
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
                    one.job.refuse_touched()
                    ledger.add(Due(one, grad, handover, recorded, group))
                    mark_param(param, self)
        if now:
            ledger.timed([row[1] for row in now], lambda: handover.run(recorded, now))

    def _evaluate(self, handover: Handover, closure: Callable[[], Any]) -> Any:
        name = type(handover.optimizer).__name__
        if not type(handover.optimizer).__module__.startswith("torch.optim"):
            raise CommSchedError(
                f"{name}.step(closure) cannot be deferred: it may call the closure more than once. "
                "Leave optimizer= out, or call step() without a closure"
            )
        with torch.enable_grad():  # as torch's own optimizers do, once, before they update
            return closure()

    def _observed(self, param: torch.Tensor) -> None:
        self._used.add(id(param))
        self.recorder.used(self._name(param))

    def _used_late(self, param: torch.Tensor) -> None:
        self._late.discard(id(param))

    def _refuse_late(self, job: Job, params: Sequence[torch.Tensor]) -> None:
        for param, (start, stop) in zip(params, job.ranges(), strict=True):
            if id(param) not in self._late:
                continue
            if self._find_unused and not job.buffer[start:stop].any():
                continue
            raise CommSchedError(
                f"{self._name(param)} got a gradient, but its use in forward was not seen (an "
                "extension in C++?), so it was read before its deferred step had run. Call "
                "state.synchronize() before each forward, or leave optimizer= out"
            )

    def _unmark_all(self) -> None:
        for param in self._ours():
            if id(param) not in self.due:
                unmark(param)

    def _ours(self) -> Iterator[nn.Parameter]:
        """The handed-over optimizers' parameters, as far as they can be pending."""
        for handover in self.handovers:
            yield from filter(can_pend, handover.params())

    def _name(self, param: torch.Tensor) -> str:
        return self._names.get(id(param), "a parameter outside the model")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)
