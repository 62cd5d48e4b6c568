"""Pending parameters of modules, and what is known to read them unseen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched.pending import mark_param, settle
from tests.test_pending import Owner, Use, pending, quietly


def settled_by(module: nn.Module, use: Callable[[nn.Module], Any]) -> set[str]:
    """The names of the parameters that `use` settles, each exactly once."""
    owner = Owner()
    names = {id(param): name for name, param in module.named_parameters()}
    for param in module.parameters():
        mark_param(param, owner)
    use(module)
    found = [names[id(param)] for param in owner.settled]
    assert len(found) == len(set(found))
    return set(found)


def every(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def call(module: nn.Module) -> Any:
    return module(torch.ones(2, 4))


def swapped_in(module: nn.Module) -> Any:
    return torch.func.functional_call(module, dict(module.named_parameters()), torch.ones(2, 4))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "linear": (lambda: nn.Linear(4, 4), call),
    "lstm": (lambda: nn.LSTM(4, 3, 2), call),
    "gru": (lambda: nn.GRU(4, 3, bidirectional=True), call),
    "rnn cell": (lambda: nn.LSTMCell(4, 3), call),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8), call),
    "transformer, fast path": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        torch.no_grad()(lambda module: module(torch.ones(1, 2, 4))),
    ),
    "weight norm": (weight_normed, call),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), call),
    "functional_call": (lambda: nn.Linear(4, 4), swapped_in),
    "state_dict": (lambda: nn.Linear(4, 4), lambda m: m.state_dict()),
    "load_state_dict": (
        lambda: nn.Linear(4, 4),
        lambda m: m.load_state_dict(nn.Linear(4, 4).state_dict()),
    ),
    "half": (lambda: nn.Linear(4, 4), lambda m: m.half()),
    "to": (lambda: nn.Linear(4, 4), lambda m: m.to(torch.float64)),
    "deepcopy": (lambda: nn.Linear(4, 4), copy.deepcopy),
    "pickle": (lambda: nn.Linear(4, 4), pickle.dumps),
    "average": (lambda: nn.Linear(4, 4), torch.optim.swa_utils.AveragedModel),
    "stack": (lambda: nn.Linear(4, 4), lambda m: torch.func.stack_module_state([m])),
    "fusion": (
        lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1)).eval(),
        lambda m: nn.utils.fuse_conv_bn_eval(m[0], m[1], transpose=False),
    ),
    "prune": (lambda: nn.Linear(4, 4, False), lambda m: torch.norm(m.weight)),
}


@pytest.mark.parametrize("name", MODULES)
def test_uses_of_modules_settle_all_their_parameters(name: str) -> None:
    make, use = MODULES[name]
    module = make()
    assert settled_by(module, use) == every(module)
    assert all(type(param) is nn.Parameter for param in module.parameters())


# These C++ functions neither ask Python nor go through a module's forward. README says so.
@torch.jit.script
def scripted(w: torch.Tensor) -> torch.Tensor:
    return w * 2


BLIND: dict[str, Use] = {
    "torch.tensor": lambda p: torch.tensor(p),
    "as_tensor to another type": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray": lambda p: torch.asarray(p, copy=True),
    "legacy constructor": lambda p: torch.Tensor(p).clone(),
    "new_tensor": lambda p: torch.zeros(1).new_tensor(p),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).clone(),
    "func.grad": lambda p: torch.func.grad(lambda w: (w * w).sum())(p),
    "vmap": lambda p: torch.vmap(lambda w: w * 1)(p),
    "functionalize": lambda p: torch.func.functionalize(lambda w: w * 2)(p),
    "scripted function": scripted,
    "to_dlpack": lambda p: torch.from_dlpack(torch.utils.dlpack.to_dlpack(p)).clone(),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p]),
    "set_": quietly(lambda p: p.set_(torch.zeros(2))),
    "swap_tensors": lambda p: torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(4, 4))),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BLIND)
def test_known_blind_spots(name: str) -> None:
    param, owner = pending()
    BLIND[name](param)
    assert owner.settled == []  # if this fails: good; move the line to USES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BLIND)
def test_blind_spots_see_the_new_value_once_it_is_settled(name: str) -> None:
    param, owner = pending()
    settle(param)
    BLIND[name](param)
    assert len(owner.settled) == 1
