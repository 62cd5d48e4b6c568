"""Whether an optimizer may step a few parameters at a time: by name, by its traces, by trying."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commsched.errors import CommSchedError

__all__ = ["changed", "equal_in_parts", "named_coupled", "refuse", "traces", "trusted"]

# They compute something over all their parameters, or evaluate the loss themselves.
_NAMES = ("SAM", "ASAM", "GSAM", "LBFGS", "Prodigy", "ZeroRedundancyOptimizer")
_BEGINNINGS = ("DAdapt", "PostLocalSGD", "LBFGS")
# Attributes that torch and its LR schedulers write.
_TORCHS = ("_opt_called", "_step_count", "_zero_grad_profile_name", "_commsched")


def trusted(optimizer: Optimizer) -> bool:
    """Whether its step is known to be a sum of steps of single parameters: torch's own are."""
    return type(optimizer).__module__.startswith("torch.optim.")


def refuse(optimizer: Optimizer, why: str) -> CommSchedError:
    """The error for an optimizer that cannot be handed over."""
    return CommSchedError(
        f"{type(optimizer).__name__} cannot be handed over, since its parameters are coupled: "
        f"{why}. Leave optimizer= out; gradients are then averaged when backward() returns"
    )


def named_coupled(optimizer: Optimizer) -> str | None:
    """Why its name, or its options, already tell that it cannot be handed over."""
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True"
    if name in _NAMES or name.startswith(_BEGINNINGS) or "ScheduleFree" in name:
        return "it is known for that"
    return None


def traces(optimizer: Optimizer) -> dict[str, Any]:
    """What a step of single parameters must leave alone, in a form that shows changes."""
    found: dict[str, Any] = {}
    if not trusted(optimizer):
        found = {
            name: _mark(value)
            for name, value in optimizer.__dict__.items()
            if name not in ("state", "param_groups", "step", "zero_grad", *_TORCHS)
            and not name.startswith("_optimizer_")
        }
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"group {index} {k}": _mark(v) for k, v in group.items() if k != "params"}
    others = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    return found | {"state that belongs to no parameter": len(others)}


def changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Which of the traces differ, in words."""
    names = [name for name in after if name not in before or before[name] != after[name]]
    return f"its step() changed {', '.join(names)}" if names else None


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return repr(value) if isinstance(value, list | dict | set | tuple | float | int) else id(value)


def equal_in_parts(
    optimizer: Optimizer, whole: Callable[[], Any], parts: Callable[[Sequence[nn.Parameter]], None]
) -> bool:
    """Step once as a whole, and try whether two steps of halves would have done the same.

    Takes a copy of parameters and state meanwhile. The whole step's outcome stays.

    Args:
        optimizer: has gradients.
        whole: its step.
        parts: its step for some of its parameters.

    Returns:
        Whether the halves gave the same parameters, bit for bit.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    begin = _Snapshot(optimizer, params)
    whole()
    end = _Snapshot(optimizer, params)
    begin.restore()
    try:
        with torch.random.fork_rng(devices=[]):
            parts(params[::2])
            parts(params[1::2])
        same = all(torch.equal(p.data, q) for p, q in zip(params, end.values, strict=True))
    finally:
        end.restore()
    return same


class _Snapshot:
    """Parameters, gradients and state, to come back to."""

    def __init__(self, optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        self.values = [param.detach().clone() for param in params]
        self._grads = [param.grad.clone() for param in params if param.grad is not None]
        self._optimizer = optimizer
        self._params = params
        self._states = {
            p: copy.deepcopy(optimizer.state[p]) for p in params if p in optimizer.state
        }

    def restore(self) -> None:
        for param, value, grad in zip(self._params, self.values, self._grads, strict=True):
            param.data.copy_(value)
            if param.grad is not None:
                param.grad.copy_(grad)
            self._optimizer.state.pop(param, None)
        for param, state in self._states.items():
            self._optimizer.state[param] = copy.deepcopy(state)
