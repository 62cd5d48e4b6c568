"""Reads of parameters behind torch's back: an error with a name, or exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commsched
from tests.deferring import STEPS, Training, differ, late_sum
from tests.distributed import ranks
from tests.parity import mlp


class Alias(torch.autograd.Function):
    """Multiplies by memory that is the weight's; only the gradient says that it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _: torch.Tensor, alias: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.alias = alias
        return x @ torch.as_tensor(alias).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad @ torch.as_tensor(ctx.alias), grad.t() @ x, None


class Copy(torch.autograd.Function):
    """Copies by a function that does not ask Python."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return torch.tensor(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return grad


class Hidden(nn.Module):
    """Uses `store.weight` at its end: visibly, or, from `hide` on, not.

    The forward of the module that owns it is never called.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = mlp()
        self.store = nn.Linear(3, 3, bias=False)
        weight = self.store.weight.detach()
        self.kind = kind
        self.alias = weight.numpy() if kind == "numpy" else weight
        self.hide = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        if not self.hide:
            return nn.functional.linear(y, self.store.weight)
        if self.kind == "copy":
            return nn.functional.linear(y, Copy.apply(self.store.weight))
        return Alias.apply(y, self.store.weight, self.alias)


ALONE = {"ddp": {"bucket_cap_mb": 1e-9}, "fusion_mb": 0.0}  # the weight's sum has its own chunk


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["numpy", "alias", "copy"])
@ranks(2)
def test_a_hidden_read_is_an_error_that_names_the_parameter(rank: int, kind: str) -> None:
    training = Training(lambda: Hidden(kind), **ALONE).run(rank)
    with late_sum("store.weight"):
        training.step(rank)
        training.model.module.hide = True
        with pytest.raises(commsched.CommSchedError) as caught:
            training.backward(rank)
    assert "store.weight got a gradient" in str(caught.value)
    assert "state.synchronize() before each forward" in str(caught.value)
    training.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["numpy", "alias", "copy"])
@ranks(2)
def test_a_read_that_was_always_hidden_is_exact(rank: int, kind: str) -> None:
    results = []
    for plain in (True, False):
        training = Training(lambda: Hidden(kind), plain=plain, **ALONE)
        training.model.module.hide = True
        training.run(rank, STEPS)
        with late_sum("store.weight"):
            training.run(rank, 2)
            results.append(training.values())
        training.close()
    assert not differ(*results)


@ranks(2)
def test_the_remedy_works(rank: int) -> None:
    results = []
    for plain in (True, False):
        training = Training(lambda: Hidden("alias"), plain=plain, **ALONE).run(rank)
        training.model.module.hide = True
        with late_sum("store.weight"):
            for _ in range(2):
                training.synchronize()
                training.step(rank)
            results.append(training.values())
        training.close()
    assert not differ(*results)
