"""Handed-over optimizers: the user's own `step`, recorded when called, run for a few parameters.

No optimizer is re-implemented. The real `step` runs on a shadow of the user's optimizer: an object
of the same class that shares its state but whose `param_groups` hold only the parameters at hand,
with the hyper-parameters as they were when the user called `step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from commsched import coupling
from commsched.errors import CommSchedError

__all__ = ["Handover", "Listener", "Recorded", "accept", "listen", "refuse_taken"]

Step = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Recorded:
    """Hyper-parameters of every group at the moment the user called `step()`."""

    groups: tuple[dict[str, Any], ...]  # without "params"


class Listener:
    """What the handed-over optimizers tell."""

    def on_step(self, handover: Handover, closure: Callable[[], Any] | None) -> Any:
        """The user called `step()`; returns what that returns."""
        raise NotImplementedError

    def settle_all(self) -> None:
        """Everything recorded must have run, and all sums be there, now."""
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
        raise CommSchedError("State(optimizer=...) takes one optimizer or a list of different ones")
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
    """One optimizer whose `step` and `zero_grad` we answer, until `give_back`.

    Its methods stay ours after that, since LR schedulers may have wrapped them, and pass on what
    they are asked.

    Raises:
        CommSchedError: another State has this optimizer.
    """

    def __init__(self, optimizer: Optimizer, listener: Listener) -> None:
        refuse_taken(optimizer)
        self.optimizer = optimizer
        self.given_back = False
        self._original: Step = optimizer.step
        self._proved = coupling.trusted(optimizer)
        # The optimizer's methods must not keep us alive.
        me, them = weakref.ref(self), weakref.ref(listener)
        optimizer.__dict__["_commsched"] = me
        self._install_step(me, them)
        self._install_zero_grad(them)
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: _settle(them)),
            optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: _settle(them)),
        ]

    def _install_step(self, me: weakref.ref[Handover], them: weakref.ref[Listener]) -> None:
        original = type(self.optimizer).step

        @wraps(original)
        def step(optimizer: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            handover, listener = me(), them()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # for LR schedulers
            if handover is None or listener is None or handover.given_back:
                return original(optimizer, closure, *args, **kwargs)
            if args or kwargs:
                _settle(them)
                return original(optimizer, closure, *args, **kwargs)
            return listener.on_step(handover, closure)

        # LR schedulers made before us have wrapped the optimizer's step, and look for this mark.
        if hasattr(self._original, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method, since LR schedulers made after us take its __func__.
        self.optimizer.step = MethodType(step, self.optimizer)  # type: ignore[method-assign]

    def _install_zero_grad(self, them: weakref.ref[Listener]) -> None:
        original = type(self.optimizer).zero_grad

        @wraps(original)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none:  # it would write zeros into buckets that are being summed
                _settle(them)
            original(optimizer, set_to_none)

        self.optimizer.zero_grad = MethodType(zero_grad, self.optimizer)  # type: ignore[method-assign]

    def give_back(self) -> None:
        """From now on the optimizer steps when it is told to."""
        self.given_back = True
        for handle in self._handles:
            handle.remove()

    def params(self) -> Iterator[nn.Parameter]:
        """All its parameters."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def must_be_whole(self) -> str | None:
        """Why the coming step cannot be deferred, if it cannot."""
        optimizer = self.optimizer
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
        if self._proved:
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
        self._run(self.record(), rows)

    def record(self) -> Recorded:
        """The groups' hyper-parameters, as they are now."""
        return Recorded(
            tuple(
                {key: _kept(value) for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            )
        )

    def run(
        self, recorded: Recorded, rows: Iterable[tuple[int, nn.Parameter, torch.Tensor]]
    ) -> None:
        """Run the optimizer's step for some parameters only.

        Args:
            recorded: the hyper-parameters.
            rows: index of the group, parameter, gradient.

        Raises:
            CommSchedError: it turns out that the step couples the parameters.
        """
        why = self._run(recorded, rows)
        if why is not None:
            raise coupling.refuse(self.optimizer, why)

    def _run(
        self, recorded: Recorded, rows: Iterable[tuple[int, nn.Parameter, torch.Tensor | None]]
    ) -> str | None:
        shadow = object.__new__(type(self.optimizer))
        shadow.__dict__ = dict(self.optimizer.__dict__)
        groups: dict[int, dict[str, Any]] = {}
        saved: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        for index, param, grad in rows:
            if index not in groups:
                groups[index] = {**recorded.groups[index], "params": []}
            groups[index]["params"].append(param)
            saved.append((param, param.grad))
            param.grad = grad
        shadow.param_groups = list(groups.values())
        before = coupling.traces(shadow)
        step: Step = getattr(type(self.optimizer).step, "__wrapped__", type(self.optimizer).step)
        try:
            with _as_after_backward():
                step(shadow)
        finally:
            for param, users in saved:
                param.grad = users
        return coupling.changed(before, coupling.traces(shadow))


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
    listeners.add(listener)


def _kept(value: Any) -> Any:
    # A tensor learning rate is changed in place by LR schedulers.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _settle(them: weakref.ref[Listener]) -> None:
    listener = them()
    if listener is not None:
        listener.settle_all()


@contextmanager
def _as_after_backward() -> Iterator[None]:
    """An optimizer's usual surroundings, whatever the forward that asks for its step is doing."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    jit: Any = torch._C
    tracing = jit._get_tracing_state()  # torch.jit.trace would record the step
    jit._set_tracing_state(None)
    try:
        with (
            temporarily_clear_interpreter_stack() if transformed else nullcontext(),  # torch.func
            _disable_current_modes(),  # fake tensors and the like
            torch._C.DisableTorchFunction(),
            torch.autocast("cpu", enabled=False),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        jit._set_tracing_state(tracing)
