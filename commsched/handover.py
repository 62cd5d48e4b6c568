"""Handed-over optimizers: we answer their `step`, and know when others step."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from commsched import coupling, shadow
from commsched.errors import CommSchedError
from commsched.shadow import Recorded, Row

__all__ = ["Handover", "Listener", "accept", "listen", "refuse_taken"]

Step = Callable[..., Any]
logger = logging.getLogger("commsched")


class Listener:
    """What the handed-over optimizers tell."""

    def on_step(self, handover: Handover, closure: Callable[[], Any] | None) -> Any:
        """The user called `step()`; returns what that returns."""
        raise NotImplementedError

    def run_due(self) -> None:
        """Everything recorded must have run, now."""
        raise NotImplementedError

    def make_whole(self) -> None:
        """Everything recorded must have run, and all sums be there, now."""
        raise NotImplementedError

    def before_fork(self) -> None:
        """This process is about to fork."""
        raise NotImplementedError

    def before_step_of(self, optimizer: Optimizer) -> None:
        """Any optimizer is about to read gradients, and write parameters."""
        raise NotImplementedError


def accept(optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers in what the user handed over: one, or a list; unwrapped.

    Raises:
        CommSchedError: not an optimizer, or one whose parameters cannot be stepped a few at a time.
    """
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    found = tuple(_unwrap(one) for one in given)
    for one in found:
        if (why := coupling.named_coupled(one)) is not None:
            raise coupling.refuse(one, why)
    if len({id(one) for one in found}) != len(found) or not found:
        raise CommSchedError(
            "State(optimizer=...) takes one optimizer or a list of different ones, not "
            f"{'an empty list' if not found else 'the same one twice'}"
        )
    return found


def _unwrap(optimizer: Any) -> Optimizer:
    # Frameworks wrap optimizers, and call the inner one's step().
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _unwrap(inner)
    if not isinstance(optimizer, Optimizer):
        raise CommSchedError(
            f"State(optimizer=...) takes a torch.optim.Optimizer or a list of them, not "
            f"{type(optimizer).__name__}"
        )
    return optimizer


class Handover:
    """One optimizer whose `step` we answer, until `give_back`.

    The method stays ours after that, since LR schedulers may have wrapped it, and passes on what it
    is asked.

    Raises:
        CommSchedError: another State has this optimizer.
    """

    def __init__(self, optimizer: Optimizer, listener: Listener) -> None:
        refuse_taken(optimizer)
        self.optimizer = optimizer
        self.given_back = False
        self._kind: Any = type(optimizer)
        self._original: Step = optimizer.step
        self._replaced = _is_replaced(optimizer)
        self._proved = coupling.trusted(optimizer)
        # The optimizer's methods must not keep us alive.
        self._them = them = weakref.ref(listener)
        me = weakref.ref(self)
        optimizer.__dict__["_commsched"] = me
        self._install_step(me, them)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: _run_due(them)),
            optimizer.register_load_state_dict_pre_hook(lambda _, _state: _run_due(them)),
        ]

    def _install_step(self, me: weakref.ref[Handover], them: weakref.ref[Listener]) -> None:
        original = self._original

        @wraps(type(self.optimizer).step)
        def step(optimizer: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            handover, listener = me(), them()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # for LR schedulers
            active = handover is not None and listener is not None and not handover.given_back
            if not active or args or kwargs:
                if active and listener is not None:
                    listener.make_whole()
                return original(*([] if closure is None else [closure]), *args, **kwargs)
            assert handover is not None
            assert listener is not None
            return listener.on_step(handover, closure)

        step._commsched_step = True  # type: ignore[attr-defined]
        # Else dynamo would trace what step() does now, which is not what it does later.
        hidden: Any = _disable_dynamo(step)
        # LR schedulers made before us have wrapped the optimizer's step, and look for this mark.
        if hasattr(original, "_wrapped_by_lr_sched"):
            hidden._wrapped_by_lr_sched = True
        # A bound method, since LR schedulers made after us take its __func__.
        self.optimizer.step = MethodType(hidden, self.optimizer)  # type: ignore[method-assign]

    def mark(self) -> None:
        """Steps are due: whoever reads `optimizer.state` must have them run first."""
        shadow.become(self.optimizer, shadow.pending_kind(self._kind))

    def unmark(self) -> None:
        """No step is due any more."""
        shadow.become(self.optimizer, self._kind)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Call a closure as torch's own optimizers do: once, before they update.

        Raises:
            CommSchedError: the optimizer is not torch's, and may do otherwise.
        """
        if not coupling.trusted(self.optimizer):
            raise CommSchedError(
                f"{type(self.optimizer).__name__}.step(closure) cannot be deferred: it may call "
                "the closure more than once. Leave optimizer= out, or call step() without one"
            )
        with torch.enable_grad():
            return closure()

    def settle(self) -> None:
        """Run what is due, for whoever reads `optimizer.state`."""
        _run_due(self._them)
        self.unmark()

    def give_back(self) -> None:
        """From now on the optimizer steps when it is told to."""
        self.given_back = True
        self.unmark()
        for handle in self._handles:
            handle.remove()

    def params(self) -> Iterator[nn.Parameter]:
        """All its parameters."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def must_be_whole(self) -> str | None:
        """Why the coming step cannot be deferred, if it cannot."""
        optimizer = self.optimizer
        if self._replaced:
            return "the optimizer's step was replaced on the object by another function"
        everybodys = {**torch_optimizer._global_optimizer_pre_hooks}
        everybodys |= torch_optimizer._global_optimizer_post_hooks
        everybodys |= optimizer._optimizer_step_pre_hooks
        everybodys |= optimizer._optimizer_step_post_hooks
        if any(hook is not before_foreign_step for hook in everybodys.values()):
            return "the optimizer has step hooks, which expect a whole step"
        return None

    def whole_step(self) -> None:
        """The user's own step, as it was, with a check that it can be deferred later on.

        Raises:
            CommSchedError: it turns out that the step couples the parameters.
        """
        before = coupling.traces(self.optimizer)
        same = True
        if self._proved or self._replaced:
            self._original()
        else:
            self._proved = True
            same = coupling.equal_in_parts(self.optimizer, self._original, self._part)
        why = coupling.changed(before, coupling.traces(self.optimizer))
        if why is None and not same:
            why = "two steps of half its parameters gave another result than one step of all"
        if why is not None:
            raise coupling.refuse(self.optimizer, why)

    def _part(self, params: Sequence[nn.Parameter]) -> None:
        chosen = {id(param) for param in params}
        rows = [
            (index, param, param.grad)
            for index, group in enumerate(self.optimizer.param_groups)
            for param in group["params"]
            if id(param) in chosen
        ]
        shadow.step(self.optimizer, self._kind, self.record(), rows)

    def record(self) -> Recorded:
        """The groups' hyper-parameters, as they are now."""
        return shadow.record(self.optimizer)

    def run(self, recorded: Recorded, rows: Iterable[Row]) -> None:
        """Run the optimizer's step for some parameters only.

        Raises:
            CommSchedError: it turns out that the step couples the parameters.
        """
        why = shadow.step(self.optimizer, self._kind, recorded, rows)
        if why is not None:
            raise coupling.refuse(self.optimizer, why)

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` is the handed-over one, or a shadow of it."""
        holder = optimizer.__dict__.get("_commsched")
        return holder is not None and holder() is self


def _is_replaced(optimizer: Optimizer) -> bool:
    """Whether the object's `step` is neither its class's nor that in what torch or we put on it."""
    own: Any = optimizer.__dict__.get("step")
    while own is not None and (
        hasattr(own, "_wrapped_by_lr_sched") or hasattr(own, "_commsched_step")
    ):
        own = getattr(own, "__wrapped__", None)
    kind: Any = type(optimizer).step
    own = getattr(own, "__func__", own)
    return own is not None and own not in (kind, getattr(kind, "__wrapped__", kind))


def refuse_taken(optimizer: Optimizer) -> None:
    """Raise if a living State has this optimizer.

    Raises:
        CommSchedError: it has.
    """
    other = optimizer.__dict__.get("_commsched")
    if other is not None and (holder := other()) is not None and not holder.given_back:
        raise CommSchedError(
            f"this {type(optimizer).__name__} is handed over to another commsched.State; one "
            "optimizer serves one State (close() the other one first)"
        )


def before_foreign_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Before any optimizer steps for real: one that was not handed over needs whole gradients.

    Registered once, for all optimizers of the process: a program may make a new optimizer and
    forget to hand it over.
    """
    for listener in tuple(listeners):
        listener.before_step_of(optimizer)


listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """From now on tell `listener` of every step of any optimizer."""
    if before_foreign_step not in torch_optimizer._global_optimizer_pre_hooks.values():
        torch_optimizer.register_optimizer_step_pre_hook(before_foreign_step)
        os.register_at_fork(before=_before_fork)
    listeners.add(listener)


def _before_fork() -> None:
    for listener in tuple(listeners):
        try:
            listener.before_fork()
        except CommSchedError as error:  # whoever needs the parameters will hear it
            logger.error("before a fork: %s", error)


def _run_due(them: weakref.ref[Listener]) -> None:
    listener = them()
    if listener is not None:
        listener.run_due()
