"""Pending parameters: their optimizer step is recorded but has not run, and any use runs it first.

Forward hooks alone miss every parameter that is read outside its own module: weights used
functionally, tied weights, parameters of containers, moving averages, clamping in place. So while a
parameter is pending its class is `Pending`, and whatever Python does with its value comes through
`__torch_function__` first. The same trick shows, while a profile is taken, who is read when.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["Owner", "Pending", "can_pend", "mark", "settle", "settle_own", "unmark"]

_OWNER = "_commsched_owner"


class Owner(Protocol):
    """Who made a parameter pending."""

    def settle(self, param: nn.Parameter) -> None:
        """Bring the parameter up to date, and `unmark` it."""
        ...


class Pending(nn.Parameter):
    """A parameter that is to be brought up to date before its value is used."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Settle every pending argument, unless `func` does not touch values."""
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            settle(leaf)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the parameter, up to date, and not pending."""
        settle(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the parameter pickles, up to date."""
        settle(self)
        return self.__reduce_ex__(protocol)


_GRAD: Any = torch.Tensor.grad
_PROPERTIES = (
    *("grad", "requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim"),
    *("is_sparse", "is_cuda", "is_cpu", "is_meta", "_version"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
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
}


def can_pend(param: torch.Tensor) -> bool:
    """Whether a parameter can be made pending: a subclass of Parameter has ways of its own."""
    return type(param) in (nn.Parameter, Pending)


def mark(param: nn.Parameter, owner: Owner) -> None:
    """Make it pending: its next use calls ``owner.settle(param)``."""
    param.__dict__[_OWNER] = owner
    _become(param, Pending)


def unmark(param: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    if type(param) is Pending:
        param.__dict__.pop(_OWNER, None)
        _become(param, nn.Parameter)


def _become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    param.__class__ = kind  # both are Python classes with the same layout


def settle_own(module: nn.Module, _args: Any) -> None:
    """A forward pre-hook: settle the module's own parameters, however its forward reads them.

    An extension in C++ does not ask `__torch_function__`.
    """
    for param in module._parameters.values():
        settle(param)


def settle(value: Any) -> None:
    """Bring `value` up to date if it is a pending parameter; nothing for everything else."""
    if type(value) is not Pending:
        return
    owner = value.__dict__.get(_OWNER)
    if owner is None:  # somebody's copy of a pending one
        unmark(value)
    else:
        owner.settle(value)
