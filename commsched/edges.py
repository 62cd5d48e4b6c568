"""Hooks on the user's modules: which modules need one, and what a hook may not do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

__all__ = ["Edge", "may_hide"]


def may_hide(module: torch.nn.Module) -> bool:
    """Whether its forward may read its parameters so that PyTorch's functions do not see it.

    torch's own modules do not (tests/test_pending_modules.py). Hooks on them would only slow them
    down: in evaluation a transformer layer with hooks leaves its fast path.
    """
    has_own = any(True for _ in module.parameters(recurse=False))
    return has_own and not type(module).__module__.startswith("torch.nn.")


class Edge:
    """A hook on a module that neither keeps us alive nor is copied or pickled with the module."""

    def __init__(self, method: Callable[[], None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @_disable_dynamo  # else it would compile what it calls
    def __call__(self, *_: Any) -> None:
        """Call the method, if its owner still lives."""
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __deepcopy__(self, memo: dict[int, Any]) -> Edge:
        return Edge(None)

    def __reduce__(self) -> Any:
        return Edge, (None,)
