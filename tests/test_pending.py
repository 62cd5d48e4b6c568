"""Pending parameters: every use of a value runs the step first, exactly once; nothing else does."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from commsched.pending import (
    Pending,
    Unsummed,
    can_pend,
    mark_grad,
    mark_param,
    settle,
    settle_own,
    unmark,
)

Use = Callable[[nn.Parameter], Any]


class Owner:
    """Settles as a deferred step would: in place, after taking the mark off."""

    def __init__(self) -> None:
        self.settled: list[torch.Tensor] = []

    def settle(self, param: torch.Tensor) -> None:
        self.settled.append(param)
        unmark(param)
        with torch.inference_mode(False), torch.no_grad():
            param.add_(100.0)


def pending(value: torch.Tensor | None = None) -> tuple[nn.Parameter, Owner]:
    value = torch.arange(16.0).view(4, 4) if value is None else value
    param, owner = nn.Parameter(value.clone()), Owner()
    mark_param(param, owner)
    return param, owner


class Listed(list):  # type: ignore[type-arg]
    """What torch takes for a list, and pytree for a leaf."""


class Double(torch.autograd.Function):
    """A custom function."""

    @staticmethod
    def forward(_: Any, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return w * 2

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


@torch.library.custom_op("commsched_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Passing(TorchDispatchMode):
    """A dispatch mode, as profilers and FLOP counters are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def quietly(use: Use) -> Use:
    """With gradients off."""
    return lambda p: torch.no_grad()(use)(p)


def moded(p: nn.Parameter) -> torch.Tensor:
    with Passing():
        return p * 2


X = torch.arange(8.0).view(2, 4)
HEADS = (X[:, None], X[:, None], X[:, None], 4, 2)
USES: dict[str, Use] = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 - p,
    "matmul": lambda p: X @ p,
    "linear": lambda p: functional.linear(X, p),
    "embedding": lambda p: functional.embedding(torch.tensor([1]), p),
    "conv": lambda p: functional.conv1d(torch.ones(1, 4, 4), p[:, :, None]),
    "layer_norm": lambda p: functional.layer_norm(X, (4,), p[0]),
    "attention": lambda p: functional.scaled_dot_product_attention(p[None], p[None], p[None]),
    "multi_head": lambda p: functional.multi_head_attention_forward(
        *HEADS, torch.cat([p] * 3), None, None, None, False, 0.0, p, None
    )[0],
    "einsum": lambda p: torch.einsum("ij->i", p),
    "where": lambda p: torch.where(torch.tensor(True), p, 0),
    "cat": lambda p: torch.cat([p, p]),
    "stack of a tuple": lambda p: torch.stack((p, p)),
    "stack of a list subclass": lambda p: torch.stack(Listed([p, p])),
    "keyword": lambda p: torch.add(input=p, other=1),
    "method": lambda p: p.sum(),
    "unbound method": lambda p: torch.Tensor.mul(X[0], p),
    "foreach": lambda p: torch._foreach_mul([p], 2)[0],
    "aten op": lambda p: torch.ops.aten.mul.Tensor(p, p),
    "custom op": lambda p: thrice(p),
    "custom op by name": lambda p: torch.ops.commsched_tests.thrice(p),
    "autograd function": lambda p: Double.apply(p),
    "autograd.grad": lambda p: torch.autograd.grad((p * p).sum(), p)[0],
    "jacobian": lambda p: torch.autograd.functional.jacobian(lambda w: (w * w).sum(), p),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(Double.apply, p, use_reentrant=False),
    "dispatch mode": moded,
    "inference": lambda p: torch.inference_mode()(lambda: p * 2)(),
    ".data": lambda p: p.data.clone(),
    ".T": lambda p: p.T.clone(),
    "detach": lambda p: p.detach().clone(),
    "view": lambda p: p.view(-1),
    "as_strided": lambda p: torch.as_strided(p, (4,), (1,)),
    "data_ptr": lambda p: p.data_ptr() and None,
    "storage": lambda p: list(p.untyped_storage()),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p.sum()),
    "index": lambda p: p[0],
    "mask": lambda p: p[p > 2],
    "as an index": lambda p: torch.arange(999)[[p.detach()[0].long()]],
    "iteration": lambda p: next(iter(p)),
    "in": lambda p: 103.0 in p,
    "eq": lambda p: p == p,
    "less": lambda p: p < 3,
    "equal": lambda p: torch.equal(p, torch.arange(16.0).view(4, 4)),
    "repr": repr,
    "str": str,
    "format": lambda p: f"{p}",
    "numpy": lambda p: p.detach().numpy().copy().tolist(),
    "asarray": lambda p: np.asarray(p.requires_grad_(False)).tolist(),
    "ufunc": lambda p: np.add(p.requires_grad_(False), 1).tolist(),
    "np.from_dlpack": lambda p: np.from_dlpack(p.requires_grad_(False)).tolist(),
    "from_dlpack": lambda p: torch.from_dlpack(p.requires_grad_(False)).clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy inside": lambda p: copy.deepcopy({"a": [p]})["a"][0],
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved,
    "torch.save inside": lambda p: saved({"a": [p]})["a"][0],
    "to another process": lambda p: multiprocessing.reduction.ForkingPickler.dumps(p) and None,
    "to": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "Parameter of its data": lambda p: nn.Parameter(p.data),
    "to vector": lambda p: nn.utils.parameters_to_vector([p]),
    "total norm": lambda p: nn.utils.get_total_norm([p]),
    "read into out": quietly(lambda p: torch.mul(p, 2, out=torch.empty(4, 4))),
    "copied from": quietly(lambda p: torch.zeros(4, 4).copy_(p)),
    "set into another": quietly(lambda p: torch.zeros(4, 4).__setitem__(slice(None), p)),
    # What writes it comes after the step, too.
    "mul_": quietly(lambda p: p.mul_(2)),
    "clamp_": quietly(lambda p: p.clamp_(0, 3)),
    "out": quietly(lambda p: torch.add(torch.ones(4, 4), 1, out=p)),
    "setitem": quietly(lambda p: p.__setitem__(0, 1.0)),
    "copy_": quietly(lambda p: p.copy_(torch.zeros(4, 4))),
    "init": nn.init.ones_,
    "data assigned": lambda p: setattr(p, "data", torch.zeros(4, 4)),
    "from vector": lambda p: nn.utils.vector_to_parameters(torch.zeros(16), [p]),
    "share_memory_": lambda p: p.share_memory_() is p,
    "backward": lambda p: p.backward(torch.ones(4, 4)),
}


def plain(value: Any) -> Any:
    """As something that == compares."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.tolist()
    return value


@pytest.mark.parametrize("name", USES)
def test_a_use_settles_once_and_sees_the_new_value(name: str) -> None:
    param, owner = pending()
    stepped = nn.Parameter(torch.arange(16.0).view(4, 4) + 100.0)
    wanted = USES[name](stepped)
    result = USES[name](param)
    assert [id(one) for one in owner.settled] == [id(param)]
    assert type(param) is nn.Parameter
    assert "_commsched_owner" not in param.__dict__
    assert plain(result) == plain(wanted)
    assert plain(param) == plain(stepped)


OF_LEAVES = ("backward", "autograd.grad", "jacobian", "init", "torch.save", "torch.save inside")


@pytest.mark.parametrize("name", [name for name in USES if name not in OF_LEAVES])
def test_a_use_of_a_gradient_settles_it_once(name: str) -> None:
    grad, owner = torch.arange(16.0).view(4, 4).clone(), Owner()
    mark_grad(grad, owner)
    whole = torch.arange(16.0).view(4, 4) + 100.0
    wanted = USES[name](whole)
    result = USES[name](grad)
    assert [id(one) for one in owner.settled] == [id(grad)]
    assert type(grad) is torch.Tensor
    assert plain(result) == plain(wanted)
    assert plain(grad) == plain(whole)


def test_gradients_of_a_class_of_their_own_are_left_alone() -> None:
    class Special(torch.Tensor):
        pass

    grad = torch.ones(2).as_subclass(Special)
    mark_grad(grad, Owner())
    assert type(grad) is Special
    grad = torch.ones(2)
    mark_grad(grad, Owner())
    assert type(grad) is Unsummed
    unmark(grad)
    assert type(grad) is torch.Tensor


VALUE_FREE: dict[str, Use] = {
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", torch.ones(4, 4)),
    "delete grad": lambda p: delattr(p, "grad"),
    "zero_grad": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=True),
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0), p.stride(), p.dim(), p.ndim, p.numel()),
    "kind": lambda p: (p.dtype, p.device, p.layout, p.is_leaf, p.requires_grad, p.is_sparse),
    "is_floating_point": lambda p: (p.is_floating_point(), p.is_complex()),
    "is_contiguous": lambda p: p.is_contiguous(),
    "hash": lambda p: hash(p) == id(p) and {p: 1}[p],
    "isinstance": lambda p: (isinstance(p, nn.Parameter), torch.is_tensor(p)),
    "weakref": lambda p: weakref.ref(p)() is p,
    "attribute": lambda p: setattr(p, "tag", 1),
    "version": lambda p: p._version,
    "identity": lambda p: any(one is p for one in [p]),
}


@pytest.mark.parametrize("name", VALUE_FREE)
def test_what_needs_no_value_does_not_settle(name: str) -> None:
    param, owner = pending()
    other = nn.Parameter(torch.zeros(4, 4))
    assert VALUE_FREE[name](param) == VALUE_FREE[name](other)
    assert owner.settled == []
    assert type(param) is Pending
    unmark(param)
    assert param.tolist() == torch.arange(16.0).view(4, 4).tolist()


def test_what_modules_do_without_values_does_not_settle() -> None:
    module, owner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), Owner()
    for param in module.parameters():
        mark_param(param, owner)
    names = [name for name, _ in module.named_parameters()]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module.zero_grad()
    module.train(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.zero_grad()
    assert sum(p.numel() for p in module.parameters()) == 24
    assert owner.settled == []


def test_marks_nest_and_come_off() -> None:
    param, first = pending()
    second = Owner()
    mark_param(param, second)  # a new owner takes over
    param.sum()
    assert (len(first.settled), len(second.settled)) == (0, 1)
    unmark(param)
    unmark(param)
    settle(param)
    settle(None)
    settle(torch.ones(1))
    assert len(second.settled) == 1


def test_only_plain_parameters_pend() -> None:
    class Special(nn.Parameter):
        pass

    assert can_pend(nn.Parameter(torch.ones(1)))
    assert can_pend(pending()[0])
    assert not can_pend(Special(torch.ones(1)))
    assert not can_pend(torch.ones(1))
    assert not can_pend(nn.UninitializedParameter())


def test_copies_are_their_own() -> None:
    param, owner = pending()
    one = copy.deepcopy(param)
    two = copy.copy(param)
    for other in (one, two):
        assert type(other) is nn.Parameter
        assert other.tolist() == param.tolist()
    assert len(owner.settled) == 1
    with torch.no_grad():
        one.zero_()
    assert param[0, 0] == 100.0


def test_an_owner_that_fails_leaves_the_parameter_pending() -> None:
    class Failing:
        def settle(self, _: nn.Parameter) -> None:
            raise RuntimeError("not here")

    param = nn.Parameter(torch.ones(2))
    mark_param(param, Failing())
    for use in (lambda: param + 1, lambda: copy.deepcopy(param), lambda: pickle.dumps(param)):
        with pytest.raises(RuntimeError, match="not here"):
            use()
        assert type(param) is Pending
    assert param.grad is None
    unmark(param)
    assert param.sum() == 2


def test_the_pre_hook_settles_a_modules_own_parameters_only() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.register_parameter("none", None)
    owner = Owner()
    for param in module.parameters():
        mark_param(param, owner)
    settle_own(module, ())
    assert owner.settled == []
    settle_own(module[1], ())
    assert [id(p) for p in owner.settled] == [id(p) for p in module[1].parameters()]
