"""Tensors whose values are not there yet: any use of them brings the values first.

`Pending` parameters: their optimizer step is recorded but has not run. Forward hooks alone miss
every parameter that is read outside its own module: weights used functionally, tied weights,
parameters of containers, moving averages, clamping in place. `Unsummed` gradients: their sum over
ranks is under way. So while it waits a tensor has another class, and whatever Python does with it
comes through `__torch_function__` first. The same trick shows, while a profile is taken, which
parameter is read when.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn

__all__ = [
    "Owner",
    "Pending",
    "Unsummed",
    "can_pend",
    "mark_grad",
    "mark_param",
    "settle",
    "settle_own",
    "unmark",
]

_OWNER = "_commsched_owner"


class Owner(Protocol):
    """Who made a tensor wait."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Bring its values, and `unmark` it; leave it marked if it may be used as it is."""
        ...


class _Waiting(torch.Tensor):
    """What both kinds do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Settle every waiting argument, unless `func` does not touch values."""
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _settle_within(args) & _settle_within(kwargs):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # its owner lets it be used as it is
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with its values, which does not wait."""
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As it pickles with its values."""
        settle(self)
        return self.__reduce_ex__(protocol)


class Pending(_Waiting, nn.Parameter):
    """A parameter that is to be brought up to date before its value is used."""


class Unsummed(_Waiting):
    """A gradient that is to be summed before its value is used."""


_PROPERTIES = (
    *("grad", "grad_fn", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "_version"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_GRAD: Any = torch.Tensor.grad
_VALUE_FREE = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    _GRAD.__set__,
    _GRAD.__delete__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
}


def _settle_within(value: Any) -> bool:
    """Settle all waiting tensors in a call's arguments; whether none waits any more."""
    if isinstance(value, torch.Tensor):
        settle(value)
        return type(value) not in _PLAIN
    # As torch itself takes arguments apart: into subclasses of list and tuple too. `min` rather
    # than `all`, which would stop at the first that still waits.
    if isinstance(value, list | tuple):
        return min((_settle_within(one) for one in value), default=True)
    if isinstance(value, dict):
        return _settle_within([*value.values()])
    return True


def can_pend(param: torch.Tensor) -> bool:
    """Whether a parameter can be made pending: a subclass of Parameter has ways of its own."""
    return type(param) in (nn.Parameter, Pending)


def mark_param(param: nn.Parameter, owner: Owner) -> None:
    """Make it pending: its next use calls ``owner.settle(param)``."""
    _become(param, Pending, owner)


def mark_grad(grad: torch.Tensor, owner: Owner) -> None:
    """Make it wait: its next use calls ``owner.settle(grad)``. Nothing for a subclass of Tensor."""
    if type(grad) is torch.Tensor:
        _become(grad, Unsummed, owner)


def unmark(tensor: torch.Tensor) -> None:
    """Make it an ordinary parameter, or tensor, again."""
    kind = _PLAIN.get(type(tensor))
    if kind is not None:
        _become(tensor, kind, None)


_PLAIN: dict[type, type[torch.Tensor]] = {Pending: nn.Parameter, Unsummed: torch.Tensor}


def _become(tensor: torch.Tensor, kind: type[torch.Tensor], owner: Owner | None) -> None:
    tensor.__class__ = kind  # all of them are Python classes with the same layout
    if owner is None:
        tensor.__dict__.pop(_OWNER, None)
    else:
        tensor.__dict__[_OWNER] = owner


def settle_own(module: nn.Module, _args: Any) -> None:
    """A forward pre-hook: settle the module's own parameters, however its forward reads them.

    An extension in C++ does not ask `__torch_function__`.
    """
    if torch.compiler.is_compiling():  # all was settled before; no guards, no graph breaks
        return
    for param in module._parameters.values():
        settle(param)


def settle(value: Any) -> None:
    """Bring a waiting tensor's values; nothing for everything else."""
    if type(value) not in _PLAIN:
        return
    owner = value.__dict__.get(_OWNER)
    if owner is None:  # somebody's copy of a waiting one
        unmark(value)
    else:
        owner.settle(value)
