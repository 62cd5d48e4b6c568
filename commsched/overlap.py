"""Overlap with the next forward: what comes together when optimizers are handed over.

Phases say when to measure and when to defer, the recorder measures, `Deferred` steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commsched import policies
from commsched.advice import advise
from commsched.deferred import Deferred
from commsched.edges import Edge, may_hide
from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.handover import refuse_taken
from commsched.jobs import Job
from commsched.layout import BucketSpec
from commsched.model import compiled_wrappers
from commsched.pending import can_pend, settle_own
from commsched.phases import Phases
from commsched.plan import Plan
from commsched.planner import Begin, Made
from commsched.profile import Profile
from commsched.recorder import Recorder, stats_order
from commsched.simulate import ideal, simulate

__all__ = ["Outlook", "Overlap"]

DEFER_S = 1e-5  # what deferring costs the training thread for each parameter
PATIENCE = 50  # steps without a plan until it is said

logger = logging.getLogger("commsched")


@dataclass(frozen=True)
class Outlook:
    """What the plan's profile lets expect, in seconds: with deferred steps, without, at best."""

    deferred_s: float
    synchronous_s: float
    ideal_s: float
    worth_it: bool  # deferring gains more than it costs, or the user wants it

    @property
    def step_s(self) -> float:
        """The step as it will be."""
        return self.deferred_s if self.worth_it else self.synchronous_s


class Overlap:
    """The training thread's side of overlapping with forward, for one DDP model.

    Args:
        ddp: the model.
        optimizers: the handed-over ones.
        engine: sums the gradients.
        wanted: defer steps also where that is predicted to gain nothing.

    Raises:
        CommSchedError: an optimizer is handed over to another State already.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: tuple[Optimizer, ...],
        engine: Engine,
        wanted: bool,
    ) -> None:
        self.recorder = Recorder(stats_order(ddp))
        self.deferred = Deferred(ddp, optimizers, engine, self.recorder)
        self.deferred.observing = True
        self._engine = engine
        self._ddp = weakref.ref(ddp)
        self._phases = Phases()
        self._covered: set[int] = set()  # ids of the handed-over optimizers' parameters
        self._planned: tuple[Made, Outlook] | None = None
        self._begun = 0  # steps
        self._wanted = wanted
        self._advised: Profile | None = None
        self._group = ddp.process_group
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

    def begin(self, previous: Sequence[int]) -> tuple[Begin, bool]:
        """The first bucket of a backward is there.

        Args:
            previous: the keys of the last backward's buckets.

        Returns:
            What to tell the engine; and whether sums may be waited for in the next forward.
        """
        begins = Begin()
        if previous:
            self._phases.end(previous)
        if self._phases.begin():
            begins.measured = self.recorder.summary()
        elif self._phases.check_due():
            outlook = self.outlook()
            begins.drift = 1.0 if outlook is None else self.recorder.drift(outlook.step_s)
        self._begun += 1
        if self._begun == PATIENCE and self._phases.measuring:
            logger.warning(
                "after %d steps DDP's buckets still change from step to step: steps stay "
                "synchronous",
                PATIENCE,
            )
        self.deferred.observing = self._phases.measuring
        self._covered = {id(p) for handover in self.deferred.handovers for p in handover.params()}
        outlook = None if self._phases.measuring else self.outlook()
        return begins, outlook is not None and outlook.worth_it

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

    def agree_on_drift(self, begins: Begin) -> None:
        """Wait for the ranks' verdict on whether the plan still fits."""
        self._engine.wait(lambda: begins.agreed_drift is not None)
        if begins.agreed_drift is not None and self._phases.drifted(begins.agreed_drift):
            logger.info(
                "steps take %.2f x the predicted time: measuring again", begins.agreed_drift
            )
            self.recorder.restart()

    def end_of_backward(self, jobs: Sequence[Job]) -> None:
        """All gradients are computed: wait for those that must be whole now."""
        ddp = self._ddp()
        measuring = self._phases.measuring and ddp is not None
        self.recorder.backward_ends(ddp.reducer.get_backward_stats() if measuring else None)  # type: ignore[union-attr]
        self.deferred.backward_ends()
        if not all(self._phases.knows(job.key) for job in jobs):
            self.deferred.make_whole()  # DDP may be about to replace the buckets

    def outlook(self) -> Outlook | None:
        """What the plan's profile lets expect; None before there is one."""
        made = self._engine.planner.made
        if made is None or made.profile is None or not made.profile.measured:
            return None
        if self._planned is None or self._planned[0] is not made:
            self._planned = made, self._predict(made.plan, made.profile)
        return self._planned[1]

    def _predict(self, plan: Plan, profile: Profile) -> Outlook:
        deferred_s = simulate(plan, profile).step_s
        synchronous_s = simulate(plan, profile, deferred=False).step_s
        cost_s = DEFER_S * len(profile.params)
        worth_it = self._wanted or deferred_s + cost_s < synchronous_s
        if not worth_it:
            logger.warning(
                "optimizer steps are not deferred: that would hide %.1f ms of communication a step "
                "and cost %.1f ms; an explicit policy= defers them all the same",
                1e3 * (synchronous_s - deferred_s),
                1e3 * cost_s,
            )
        return Outlook(deferred_s, synchronous_s, ideal(profile), worth_it)

    def _advise(self) -> None:
        """Say once for each profile, on one rank, which bucket size would be better."""
        made, settings = self._engine.planner.made, self._engine.planner.active
        profile = None if made is None else made.profile
        if profile is self._advised or profile is None or not profile.measured:
            return
        self._advised = profile
        if torch.distributed.get_rank(self._group) == 0:
            advice = advise(profile, settings, policies.get(settings.policy))
            logger.log(logging.WARNING if advice.worth_it else logging.INFO, "%s", advice)

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
        self._advise()

    def forward_ends(self) -> None:
        """After DDP's forward."""
        self.deferred.forward_ends()


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # asks for no values
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
