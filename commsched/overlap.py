"""Overlap with the next forward: what comes together when optimizers are handed over.

Hooks on the model see who reads what, the recorder measures, `Deferred` steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commsched.deferred import Deferred
from commsched.edges import Edge, may_hide
from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.handover import refuse_taken
from commsched.jobs import Job
from commsched.layout import BucketSpec
from commsched.model import compiled_wrappers
from commsched.pending import can_pend, settle_own
from commsched.planner import Begin
from commsched.recorder import Recorder, stats_order
from commsched.tracing.tracer import SILENT, Silent

__all__ = ["Overlap"]


class Overlap:
    """The training thread's side of overlapping with forward, for one DDP model.

    Args:
        ddp: the model.
        optimizers: the handed-over ones.
        engine: sums the gradients.
        tracer: is told of what the training thread does.

    Raises:
        CommSchedError: an optimizer is handed over to another State already.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: tuple[Optimizer, ...],
        engine: Engine,
        tracer: Silent = SILENT,
    ) -> None:
        self.recorder = Recorder(stats_order(ddp), tracer=tracer)
        self.deferred = Deferred(ddp, optimizers, engine, self.recorder, tracer)
        self.deferred.observing = True
        self._ddp = weakref.ref(ddp)
        self._measuring = True
        self._covered: set[int] = set()  # ids of the handed-over optimizers' parameters
        self._handles = self._hook(ddp)

    @staticmethod
    def refuse(ddp: DistributedDataParallel | None, optimizers: Sequence[Optimizer]) -> None:
        """Raise if these optimizers cannot be handed over for this model.

        Raises:
            CommSchedError: says why, and what to do.
        """
        if ddp is None:
            raise CommSchedError(
                "State(optimizer=...) must know its DDP model, which was not found; use "
                "commsched.attach(ddp, optimizer=optimizer)"
            )
        if not ddp.gradient_as_bucket_view:
            raise CommSchedError(
                "State(optimizer=...) needs DistributedDataParallel(..., "
                "gradient_as_bucket_view=True): without it DDP copies gradients out of its "
                "buckets before they are summed. Or leave optimizer= out"
            )
        for optimizer in optimizers:
            refuse_taken(optimizer)
        mine = {id(param) for param in ddp.module.parameters()}
        given = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        if not mine & given:
            raise CommSchedError(
                "State(optimizer=...) has none of this model's parameters: hand over the optimizer "
                "that steps this model"
            )

    # ---- a step ----------------------------------------------------------------------------

    def begin(self, measuring: bool) -> None:
        """The first bucket of a backward is there.

        Args:
            measuring: a profile is being taken.
        """
        self.deferred.observing = self._measuring = measuring
        self._covered = {id(p) for handover in self.deferred.handovers for p in handover.params()}

    def may_defer(
        self, params: Sequence[torch.Tensor], spec: BucketSpec, buffer: torch.Tensor
    ) -> bool:
        """Whether nobody needs this bucket's sums before the next forward."""
        if spec.sparse or not all(id(p) in self._covered and can_pend(p) for p in params):
            return False
        # A hook around ours may have replaced the buffer, and wait for what we return.
        grads = (param.grad for param in params if param.grad is not None)
        grad = next(grads, None)
        return grad is None or _same_memory(grad, buffer)

    def on_bucket(self, job: Job, params: Sequence[torch.Tensor], begins: Begin | None) -> None:
        """A bucket has come.

        Raises:
            CommSchedError: the last step's sums are still on their way, or gradients of gradients
                are wanted, or a parameter was read too early.
        """
        if begins is not None:
            if torch._C._current_graph_task_id() == -1:  # a joined rank, which runs no forward
                self.deferred.make_whole()
            self.deferred.backward_begins()
            if begins.measured is not None:
                self.deferred.watch.conclude(self._covered)
        self.recorder.bucket_ready(job.key, job.spec)
        if not job.visible:
            if torch.is_grad_enabled():
                raise CommSchedError(
                    "backward(create_graph=True) needs whole gradients when it returns; leave "
                    "optimizer= out of State for models with a gradient penalty, or compute the "
                    "penalty with torch.autograd.grad"
                )
            self.deferred.expect(job, params)

    def end_of_backward(self) -> None:
        """All gradients are computed."""
        ddp = self._ddp()
        measuring = self._measuring and ddp is not None
        self.recorder.backward_ends(ddp.reducer.get_backward_stats() if measuring else None)  # type: ignore[union-attr]
        self.deferred.backward_ends()

    def close(self) -> None:
        """Leave the model and the optimizers alone from now on."""
        for handle in self._handles:
            handle.remove()
        self.deferred.close()

    # ---- hooks on the model ----------------------------------------------------------------

    def _hook(self, ddp: DistributedDataParallel) -> list[Any]:
        scripted = False
        handles: list[Any] = []
        for module in ddp.module.modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no such hooks, nor our classes
                scripted = True
            elif may_hide(module):
                handles.append(module.register_forward_pre_hook(settle_own))
        handles.append(ddp.register_forward_pre_hook(Edge(self.forward_begins)))
        handles.append(ddp.register_forward_hook(Edge(self.forward_ends)))
        wrappers, traced = compiled_wrappers(ddp)
        self.deferred.whole_forward = bool(wrappers) or traced or scripted
        self.deferred.whole_step = traced
        handles += [one.register_forward_pre_hook(Edge(self.deferred.run_due)) for one in wrappers]
        return handles

    def forward_begins(self) -> None:
        """Before DDP's forward, which may replace the buckets before it calls the model's."""
        ddp = self._ddp()
        rebuilds = ddp is not None and (ddp.static_graph or not ddp.find_unused_parameters)
        if rebuilds and ddp is not None and not ddp._has_rebuilt_buckets:
            self.deferred.make_whole()
        self.deferred.forward_begins()

    def forward_ends(self) -> None:
        """After DDP's forward."""
        self.deferred.forward_ends()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # asks for no values
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
