"""State: what a user registers with DDP. Settings now; a live session from the first bucket on."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from commsched.engine import CLOSED
from commsched.errors import CommSchedError
from commsched.group import Board, Membership
from commsched.model import Buckets, find_ddp
from commsched.report import Report, inactive
from commsched.session import Session
from commsched.settings import Resolved, Settings, resolve

__all__ = ["State"]

logger = logging.getLogger("commsched")


class State:
    """The state of `commsched.hook` for one DDP model.

    Example::

        ddp.register_comm_hook(commsched.State(), commsched.hook)

    Args:
        process_group: DDP's process group. Found by itself where the model is (None).
        optimizer: reserved for deferred optimizer steps; must be None in this version.
        **settings: any setting by name (``commsched env`` lists them). A keyword beats the
            ``COMMSCHED_*`` environment variable, which beats the default.

    Raises:
        SettingsError: an unknown setting or environment variable, or a value not allowed.
        CommSchedError: an optimizer was given.

    One State serves one model. It pickles and deep-copies as its settings: the copy is fresh, with
    no threads and no group. Dropping the last reference, or `close`, ends the thread it started.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        optimizer: None = None,
        **settings: Any,
    ) -> None:
        if optimizer is not None:
            raise CommSchedError(
                "State(optimizer=...) (deferred optimizer steps) is not in this version; leave it "
                "out, and gradients are averaged when backward() returns"
            )
        self._process_group = process_group
        self._resolved: Resolved = resolve(settings)
        self._keywords = dict(settings)
        self._session: Session | None = None
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._inactive = "no gradient bucket has come yet"
        self._closed = False
        _set_log_level(self._resolved)

    @property
    def settings(self) -> Settings:
        """The effective settings (a frozen `Settings`)."""
        return self._resolved.settings

    def synchronize(self) -> None:
        """Wait until all communication begun so far is done.

        Raises:
            CommSchedError: it failed.
        """
        if self._session is not None:
            self._session.engine.synchronize()

    def close(self) -> None:
        """End the thread and the process group of this State. Later hook calls raise."""
        self._closed = True
        if self._session is not None:
            self._session.engine.close()

    def report(self) -> Report:
        """Exposed communication, in total and by bucket, over the last 100 steps of this rank."""
        if self._session is None:
            return inactive(self._inactive)
        return self._session.report()

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Tell the state its model, so that it need not search for it. `attach` does."""
        self._ddp = weakref.ref(ddp)

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What `commsched.hook` calls."""
        if self._session is None or bucket.buffer().device.type != "cpu":
            reason = self._why_not(bucket)
            if reason is not None:
                return self._leave(bucket, reason)
        if self._session is None:
            self._session = self._begin()
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
        session = Session(group, self.settings, Buckets(self._model()))
        # Not a bound method of self: the finalizer must not keep this object alive. It also runs
        # at interpreter exit, while threads can still be joined.
        weakref.finalize(self, session.engine.close)
        logger.info("commsched starts: %s", self._resolved.describe())
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {"keywords": self._keywords}

    def __setstate__(self, data: dict[str, Any]) -> None:
        self.__init__(**data["keywords"])  # type: ignore[misc]

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
