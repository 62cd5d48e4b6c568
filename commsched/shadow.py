"""Shadows: the user's own optimizer, stepping a few parameters with recorded hyper-parameters.

No optimizer is re-implemented. The real `step` runs on a shadow of the user's optimizer: an object
of the same class that shares its state but whose `param_groups` hold only the parameters at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from commsched import coupling

__all__ = ["Recorded", "Row", "become", "pending_kind", "record", "step"]

Row = tuple[int, nn.Parameter, torch.Tensor | None]  # index of its group, parameter, gradient


@dataclass(frozen=True, eq=False)
class Recorded:
    """Hyper-parameters of every group at the moment the user called `step()`."""

    groups: tuple[dict[str, Any], ...]  # without "params"


def record(optimizer: Optimizer) -> Recorded:
    """The groups' hyper-parameters, as they are now."""
    return Recorded(
        tuple(
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        )
    )


def _kept(value: Any) -> Any:
    # A tensor learning rate is changed in place by LR schedulers.
    return value.clone() if isinstance(value, torch.Tensor) else value


def step(
    optimizer: Optimizer, kind: type[Optimizer], recorded: Recorded, rows: Iterable[Row]
) -> str | None:
    """Run the optimizer's step for some parameters only.

    Args:
        optimizer: the user's.
        kind: its class.
        recorded: the hyper-parameters.
        rows: the parameters.

    Returns:
        How the step turned out to couple its parameters, if it did.
    """
    shadow = object.__new__(kind)
    shadow.__dict__ = dict(optimizer.__dict__)
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
    # Without torch's wrapper, which calls step hooks: those are for whole steps.
    own_step: Callable[..., Any] = kind.step
    own_step = getattr(own_step, "__wrapped__", own_step)
    try:
        with _as_after_backward():
            own_step(shadow)
    finally:
        for param, users in saved:
            param.grad = users
    return coupling.changed(before, coupling.traces(shadow))


@contextmanager
def _as_after_backward() -> Iterator[None]:
    """An optimizer's usual surroundings, whatever the forward that asks for its step is doing."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    jit: Any = torch._C
    tracing = jit._get_tracing_state()  # torch.jit.trace would record the step
    if tracing is not None:  # in a dispatch mode it may not even be asked to stay as it is
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
        if tracing is not None:
            jit._set_tracing_state(tracing)


def become(optimizer: Any, kind: type[Optimizer]) -> None:
    """Give an optimizer another class."""
    optimizer.__class__ = kind


@cache
def pending_kind(kind: Any) -> type[Optimizer]:
    """A subclass of an optimizer's class, of the same name, that runs due steps first."""

    def settle(optimizer: Optimizer) -> None:
        holder = optimizer.__dict__["_commsched"]()
        if holder is not None:
            holder.settle()

    def get(optimizer: Optimizer) -> Any:
        settle(optimizer)
        return optimizer.__dict__["state"]

    def put(optimizer: Optimizer, state: Any) -> None:
        settle(optimizer)
        optimizer.__dict__["state"] = state

    def reduce(optimizer: Optimizer, protocol: Any) -> Any:
        settle(optimizer)
        become(optimizer, kind)
        return optimizer.__reduce_ex__(protocol)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    body = {"state": property(get, put), "__reduce_ex__": reduce, **names}
    return type(kind.__name__, (kind,), body)
