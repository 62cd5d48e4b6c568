"""Deferred steps against plain DDP: every optimizer, and schedule, whose parameters whatever."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer, lr_scheduler

from tests.compare import Make, Run, assert_parity
from tests.distributed import ranks
from tests.parity import mlp, mlp_loss

STEPS = 20
LATE = 12  # of them at least must be deferred: all but the first few

optim = torch.optim

MAKERS: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=0.05),
    "sgd-momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "sgd-nesterov": partial(
        optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True
    ),
    "sgd-fused": partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "adamw": partial(optim.AdamW, lr=1e-2),
    "adamw-foreach": partial(optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": partial(optim.AdamW, lr=1e-2, fused=True),
    "adamw-amsgrad": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "adamw-maximize": partial(optim.AdamW, lr=1e-3, maximize=True),
    "adam-tensor-lr": lambda params: optim.Adam(params, lr=torch.tensor(1e-2)),
    "adagrad": partial(optim.Adagrad, lr=1e-2, lr_decay=0.01),
    "rmsprop": partial(optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "nadam": partial(optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.01),
    "asgd": partial(optim.ASGD, lr=0.05),
    "adafactor": partial(optim.Adafactor, lr=1e-2),
}


def plainly(run: Run, make: str, steps: int = STEPS) -> None:
    """The usual loop."""
    model, opt = run.start(mlp(), MAKERS[make])
    run.train(model, range(steps), opt)
    run.keep(model.parameters())
    for state in opt.state_dict()["state"].values():
        run.keep(value for value in state.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("make", list(MAKERS))
@ranks(2)
def test_optimizers(rank: int, make: str) -> None:
    assert_parity(partial(plainly, make=make), rank, LATE)


@ranks(2)
def test_many_steps(rank: int) -> None:
    assert_parity(partial(plainly, make="adamw", steps=50), rank, 42)


# ---- schedules -----------------------------------------------------------------------------------


def in_two_phases(opt: Optimizer) -> lr_scheduler.SequentialLR:
    phases = lr_scheduler.LinearLR(opt, 0.1, total_iters=8), lr_scheduler.ExponentialLR(opt, 0.9)
    return lr_scheduler.SequentialLR(opt, list(phases), [8])


one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS + 1)
SCHEDULES: dict[str, tuple[str, Callable[[Optimizer], Any]]] = {
    "cosine": ("sgd-momentum", partial(lr_scheduler.CosineAnnealingLR, T_max=12)),
    "cosine-tensor-lr": ("adam-tensor-lr", partial(lr_scheduler.CosineAnnealingLR, T_max=12)),
    "one-cycle-momentum": ("sgd-momentum", one_cycle),
    "one-cycle-betas": ("adamw", one_cycle),
    "sequential": ("adamw-fused", in_two_phases),
}


def scheduled(run: Run, kind: str, make: Callable[[Optimizer], Any], made: str) -> None:
    """With a schedule, made before or after handing over, or once steps are deferred."""
    model = run.ddp(mlp())
    opt = MAKERS[kind](model.parameters())
    schedule = make(opt) if made == "before" else None
    run.hand_over(model, opt)
    if made == "late":
        run.train(model, range(100, 108), opt)
    schedule = schedule or make(opt)
    run.train(model, range(STEPS), opt, after=schedule.step)
    run.keep(model.parameters())
    run.keep(torch.as_tensor(group["lr"]) for group in opt.param_groups)


@pytest.mark.parametrize("made", ["before", "after", "late"])
@pytest.mark.parametrize("name", list(SCHEDULES))
@ranks(2)
def test_schedules(rank: int, name: str, made: str) -> None:
    kind, make = SCHEDULES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_parity(partial(scheduled, kind=kind, make=make, made=made), rank, LATE)
    texts = [str(one.message) for one in caught]
    assert not [t for t in texts if "lr_scheduler.step()" in t or "overridden" in t], texts


# ---- which parameters are whose ------------------------------------------------------------------


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Every other parameter."""
    params = list(model.parameters())
    return params[::2], params[1::2]


def two_groups(run: Run) -> None:
    """Other options for other parameters."""
    model = run.ddp(mlp())
    first, *rest = model.parameters()
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() == 1], "lr": 0.2, "nesterov": False},
        {"params": [first], "lr": 0.01, "maximize": True},
    ]
    opt = optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    run.hand_over(model, opt)
    run.train(model, range(STEPS), opt)
    run.keep(model.parameters())


def several(run: Run, handed: tuple[int, ...], muon: bool = False, mixed: bool = False) -> None:
    """Two optimizers, and who of them is handed over."""
    model = run.ddp(mlp(), **({} if mixed else {"bucket_cap_mb": 1e-9}))
    mine, other = halves(model)  # weights, biases
    first = optim.Muon(mine, lr=1e-2) if muon else optim.AdamW(mine, lr=1e-2)
    opts = first, optim.SGD(other, lr=0.05, momentum=0.9)
    run.hand_over(model, *(opts[i] for i in handed))
    run.train(model, range(STEPS), *opts)
    run.keep(model.parameters())


def part(run: Run) -> None:
    """Nobody steps the rest of the model."""
    model = run.ddp(mlp(), bucket_cap_mb=1e-9)
    opt = optim.AdamW(halves(model)[0], lr=1e-2)
    run.hand_over(model, opt)
    run.train(model, range(STEPS), opt)
    run.keep(model.parameters())
    run.synchronize()
    run.keep(p.grad for p in model.parameters() if p.grad is not None)


def add_group(run: Run) -> None:
    """Groups come later, while steps are recorded, and between backward and step."""
    model = run.ddp(mlp(), bucket_cap_mb=1e-9)
    mine, other = halves(model)
    opt = optim.SGD(mine, lr=0.05, momentum=0.9)
    run.hand_over(model, opt)
    run.train(model, range(8), opt)
    opt.add_param_group({"params": other[:3], "lr": 0.01})
    run.train(model, range(8, 14), opt)
    opt.zero_grad()
    run.backward(model, 14)
    opt.add_param_group({"params": other[3:], "lr": 0.02})
    run.step(opt)
    run.train(model, range(15, 24), opt)
    run.keep(model.parameters())


def edited_options(run: Run) -> None:
    """Options changed by hand right before, and right after, a step."""
    model, opt = run.start(mlp(), MAKERS["sgd-momentum"])
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step)
        opt.param_groups[0]["momentum"] = 0.5 + 0.02 * step
        run.step(opt)
        opt.param_groups[0]["lr"] = 0.05 / (1 + step)
    run.keep(model.parameters())


def outsiders(run: Run) -> None:
    """The optimizer also has parameters that are not in the model, or that DDP ignores."""
    module, ignored = mlp(), ["0.bias", "4.weight"]
    DDP._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = run.ddp(module)
    outside = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))]
    opt = optim.AdamW([*outside, *model.parameters()], lr=1e-2)
    run.hand_over(model, opt)

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        return mlp_loss(model, step, rank) + outside[0].square().sum()

    run.train(model, range(STEPS), opt, loss=loss)
    run.keep([*outside, *model.parameters()], shared=False)


class Own(nn.Parameter):
    """A subclass, which cannot be made pending."""


def subclass(run: Run) -> None:
    """One parameter is of a class of its own."""
    module: Any = mlp()
    module[4].weight = Own(module[4].weight.detach().clone())
    model, opt = run.start(module, MAKERS["adamw"], bucket_cap_mb=1e-9)
    run.train(model, range(STEPS), opt)
    run.keep(model.parameters())


OWNERS: dict[str, tuple[Callable[[Run], None], int | None]] = {
    "two-groups": (two_groups, LATE),
    "several": (partial(several, handed=(0, 1), mixed=True), LATE),
    "muon": (partial(several, handed=(1, 0), muon=True, mixed=True), LATE),
    "one-kept-back": (partial(several, handed=(0,)), LATE),
    "one-kept-back-first": (partial(several, handed=(1,)), LATE),
    "one-kept-back-mixed": (partial(several, handed=(1,), mixed=True), None),
    "part": (part, LATE),
    "add-group": (add_group, LATE),
    "edited-options": (edited_options, LATE),
    "outsiders": (outsiders, LATE),
    "subclass": (subclass, LATE),
}


@pytest.mark.parametrize("name", list(OWNERS))
@ranks(2)
def test_owners(rank: int, name: str) -> None:
    scenario, deferred = OWNERS[name]
    assert_parity(scenario, rank, deferred)
