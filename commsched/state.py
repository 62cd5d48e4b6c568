"""State: what a user registers with DDP. Settings now; a live session from the first bucket on."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commsched import codecs, policies
from commsched.checkpoint import Checkpoint
from commsched.engine import CLOSED
from commsched.errors import CommSchedError, SettingsError
from commsched.group import Board, Membership
from commsched.handover import accept
from commsched.jobs import Poison
from commsched.metrics import MetricsFile, metrics_of
from commsched.model import Buckets, find_ddp
from commsched.overlap import Overlap
from commsched.report import Report, inactive
from commsched.rules import parse_allow, used
from commsched.session import Session
from commsched.settings import Resolved, Settings, resolve

__all__ = ["State"]

logger = logging.getLogger("commsched")


class State:
    """The state of `commsched.hook` for one DDP model.

    Example::

        ddp.register_comm_hook(commsched.State(optimizer=optimizer), commsched.hook)

    Args:
        process_group: DDP's process group. Found by itself where the model is (None).
        optimizer: the model's optimizer, or a list of them: its steps are then deferred into the
            next forward, and communication hides behind that too; DDP must have been made with
            ``gradient_as_bucket_view=True``. None: the program steps as usual.
        **settings: any setting by name (``commsched env`` lists them). A keyword beats the
            ``COMMSCHED_*`` environment variable, which beats the default.

    Raises:
        SettingsError: an unknown setting or environment variable, or a value not allowed.
        CommSchedError: an optimizer whose parameters cannot be stepped a few at a time.

    One State serves one model. It pickles and deep-copies as its settings: the copy is fresh, with
    no threads, no group and no optimizer. Dropping the last reference, or `close`, ends the thread
    it started.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        **settings: Any,
    ) -> None:
        self._set_up(process_group, () if optimizer is None else accept(optimizer), settings)
        if not self._optimizers and self.settings.policy not in (policies.AUTO, "fifo"):
            raise SettingsError(
                f"policy={self.settings.policy!r} (or {policies.VARIABLE}) orders communication "
                "for the next forward, which needs State(optimizer=...); hand the optimizer over, "
                "or use policy='fifo'"
            )

    def _set_up(
        self,
        process_group: dist.ProcessGroup | None,
        optimizers: tuple[Optimizer, ...],
        settings: dict[str, Any],
    ) -> None:
        self._process_group = process_group
        self._optimizers = optimizers
        self._resolved: Resolved = resolve(settings)
        self._keywords = dict(settings)
        self._session: Session | None = None
        self._finalizer: weakref.finalize[..., State] | None = None
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._resumed: Checkpoint | None = None
        self._inactive = "no gradient bucket has come yet"
        self._closed = False
        _set_log_level(self._resolved)
        if self.settings.metrics:
            MetricsFile.require(self.settings.metrics)
        named = [*used(self.settings), *parse_allow(self.settings.allow)]
        for codec in map(codecs.get, named):
            if codec.needs_feedback and self.settings.error_feedback == "0":
                raise SettingsError(f"codec {codec.name!r} does not work with error_feedback='0'")
            if self.settings.enabled:
                codec.prepare()  # not in the first step, where other ranks would wait

    @property
    def settings(self) -> Settings:
        """The effective settings (a frozen `Settings`)."""
        return self._resolved.settings

    def synchronize(self) -> None:
        """Wait until all communication begun so far is done, and run all recorded steps.

        With handed-over optimizers: parameters are up to date after it, and between `backward()`
        and `step()` gradients are whole after it and may be changed.

        Raises:
            CommSchedError: it failed.
        """
        if self._session is not None:
            self._session.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` on all of the model's parameters.

        With handed-over optimizers, whose gradients must not be touched between `backward()` and
        the deferred step: waits for all sums, and has the deferred steps apply the factor.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the norm's p.

        Returns:
            The norm over all gradients, before clipping; the same on every rank.

        Raises:
            CommSchedError: communication failed, or no model is known.
        """
        overlap = None if self._session is None else self._session.overlap
        if overlap is not None:
            return overlap.deferred.clip_grad_norm_(max_norm, norm_type)
        ddp = self._model()
        if ddp is None:
            raise CommSchedError("the DDP model was not found; use commsched.attach")
        return torch.nn.utils.clip_grad_norm_(ddp.module.parameters(), max_norm, norm_type)

    def state_dict(self, gather: bool = False) -> dict[str, Any]:
        """What codecs keep from step to step, to be saved next to the model and the optimizer.

        Plain values and tensors, copied; loads with ``torch.load(weights_only=True)``. Runs
        recorded steps and waits for all communication first. What a rank has not sent yet is its
        own: either every rank saves its dictionary, or one saves a gathered one.

        Args:
            gather: include what all ranks keep. Collective then: every rank must call it, after
                the same step.

        Raises:
            CommSchedError: communication failed.
        """
        if self._session is not None:
            return self._session.checkpoint(gather).to_dict()
        if self._resumed is not None:
            if gather and len(self._resumed.slots) < self._resumed.world_size:
                raise CommSchedError(
                    "state_dict(gather=True) right after load_state_dict() of one rank's part: "
                    "save again after the first step"
                )
            return copy.deepcopy(self._resumed.to_dict())
        return Checkpoint(0, -1).to_dict()

    def load_state_dict(
        self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], errors: str = "keep"
    ) -> None:
        """Go on where `state_dict` was called. All ranks must, before their next step.

        With the same buckets, settings and number of ranks the run goes on bit for bit. With other
        ones nothing is lost either: errors are kept by parameter, and shared out where the number
        of ranks has changed (which needs all ranks' dictionaries).

        Args:
            saved: a gathered dictionary, or this rank's own, or a list of all ranks'.
            errors: "keep"; or "drop" what had not been sent.

        Raises:
            CommSchedError: of another model, or not such a dictionary.
        """
        if errors not in ("keep", "drop"):
            raise CommSchedError(f"errors={errors!r} is not allowed: it is 'keep' or 'drop'")
        resumed = Checkpoint.from_dict(saved)
        ddp = self._model()
        if ddp is not None:
            resumed.refuse_other_model(Buckets(ddp).numels)
        self._close_session()  # the next step begins a new one
        if errors == "drop":
            resumed.slots = {rank: {} for rank in resumed.slots}
        self._resumed = resumed if resumed.step >= 0 else None

    def close(self) -> None:
        """Finish what was begun; end the thread and the process group. Later hook calls raise."""
        self._closed = True
        if self._session is not None:
            self._session.close()

    def _close_session(self) -> None:
        if self._session is not None and self._finalizer is not None:
            self._session.synchronize()
            self._finalizer()
            self._session = None

    def report(self) -> Report:
        """Exposed communication, in total and by bucket, over the last 100 steps of this rank."""
        if self._session is None:
            return inactive(self._inactive)
        return self._session.observer.report()

    def metrics(self) -> dict[str, float]:
        """The report's figures as a flat dictionary of numbers, for TensorBoard's or W&B's loggers.

        Names begin with "commsched/"; what is not known is left out. See `commsched.metrics`.
        """
        if self._session is None:
            return metrics_of(inactive(self._inactive))
        return self._session.observer.metrics()

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Tell the state its model, so that it need not search for it. `attach` does.

        Raises:
            CommSchedError: the optimizers cannot be handed over for this model.
        """
        self._ddp = weakref.ref(ddp)
        if self._optimizers and self.settings.enabled and dist.get_world_size(self._group()) > 1:
            Overlap.refuse(ddp, self._optimizers)

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What `commsched.hook` calls."""
        if self._session is None or bucket.buffer().device.type != "cpu":
            reason = self._why_not(bucket)
            if reason is not None:
                return self._leave(bucket, reason)
        if self._session is None:
            try:
                self._session = self._begin()
            except CommSchedError as error:
                # Raised here it would leave the reducer broken; raised by its use it does not.
                future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                future.set_result(Poison(bucket.buffer(), error))
                return future
        return self._session.on_bucket(bucket)

    def _why_not(self, bucket: GradBucket) -> str | None:
        if not isinstance(bucket, GradBucket):
            raise CommSchedError(
                "torch.compile's optimize_ddp='python_reducer' does not give hooks a GradBucket; "
                "set torch._dynamo.config.optimize_ddp=True before DDP is constructed"
            )
        if self._closed:
            raise CommSchedError(CLOSED)
        if not self.settings.enabled:
            return "switched off (enabled=False)"
        if bucket.buffer().device.type != "cpu":
            return f"{bucket.buffer().device.type} gradients are not scheduled by this version"
        if dist.get_world_size(self._group()) == 1:
            return "world size 1"
        return None

    def _leave(self, bucket: GradBucket, reason: str) -> torch.futures.Future[torch.Tensor]:
        if self._inactive != reason:
            self._inactive = reason
            logger.warning("gradients go through torch's own all-reduce: %s", reason)
            if not self.settings.enabled and dist.get_world_size(self._group()) > 1:
                model = Buckets(self._model()).digest
                Board(Membership(self._group(), model)).switch_off()
        group = self._group()
        if dist.get_world_size(group) == 1:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return allreduce_hook(group, bucket)

    def _model(self) -> DistributedDataParallel | None:
        if self._ddp is None:
            found = find_ddp(self)
            if found is not None:
                self._ddp = weakref.ref(found)
        return None if self._ddp is None else self._ddp()

    def _group(self) -> dist.ProcessGroup:
        if self._process_group is None:
            ddp = self._model()
            if ddp is None:
                logger.warning("the DDP model was not found; assuming the default process group")
            self._process_group = dist.group.WORLD if ddp is None else ddp.process_group
        if self._process_group is None:
            raise CommSchedError("torch.distributed is not initialised")
        return self._process_group

    def _begin(self) -> Session:
        group = self._group()
        session = Session(
            group,
            self.settings,
            Buckets(self._model()),
            self._optimizers,
            self._resumed,
            frozenset(name for name, said in self._resolved.origin.items() if said != "default"),
        )
        self._resumed = None  # it is the session's now
        # Not a bound method of self: the finalizer must not keep this object alive. It also runs
        # at interpreter exit, while threads can still be joined.
        self._finalizer = weakref.finalize(self, session.close)
        logger.info("commsched starts: %s", self._resolved.describe())
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {"keywords": self._keywords}

    def __setstate__(self, data: dict[str, Any]) -> None:
        # A copy has no optimizer, and so no use for an order for the next forward.
        keywords = data["keywords"]
        self._set_up(None, (), {**keywords, "policy": policies.AUTO})
        self._keywords = keywords

    def __repr__(self) -> str:
        return f"commsched.State({self._resolved.describe()})"


def _set_log_level(resolved: Resolved) -> None:
    if resolved.origin["log_level"] == "default":
        return  # the program's own logging configuration stands
    logger.setLevel(resolved.settings.log_level.upper())
    if not logger.hasHandlers():  # asked for, but nobody would print it
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))
        logger.addHandler(handler)
