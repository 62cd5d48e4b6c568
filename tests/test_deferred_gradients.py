"""Deferred steps against plain DDP: what programs do with gradients before the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.compare import Run, assert_parity
from tests.distributed import ranks
from tests.parity import Branches, Norm, Odd, mlp, mlp_loss, odd_loss

STEPS = 15

optim = torch.optim
adamw = partial(optim.AdamW, lr=1e-2)


# Each is a function that is called there; it may keep things.

Meddler = Callable[[Run, DDP, torch.optim.Optimizer], Any]


def clip(run: Run, model: DDP, *norms: float) -> None:
    """As the two ways of clipping have it."""
    for norm in norms or (0.05,):
        if run.hooked:
            run.keep([run.states[0].clip_grad_norm_(norm)])
        else:
            run.keep([nn.utils.clip_grad_norm_(model.parameters(), norm)])


def clip_to_max(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    """With another kind of norm."""
    if run.hooked:
        run.keep([run.states[0].clip_grad_norm_(0.01, float("inf"))])
    else:
        run.keep([nn.utils.clip_grad_norm_(model.parameters(), 0.01, float("inf"))])


def clip_and_read(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    clip(run, model)
    run.synchronize()
    run.keep(p.grad for p in model.parameters() if p.grad is not None)


def clip_and_step(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    clip(run, model)
    opt.step()


def clip_and_save(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    clip(run, model)
    opt.state_dict()


def clip_and_accumulate(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    clip(run, model)
    run.backward(model, 77)
    clip(run, model)


def clip_and_evaluate(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    clip(run, model)
    opt.step()
    with torch.inference_mode():
        run.keep([model.module(torch.ones(2, 24))])


def clip_values(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    run.synchronize()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    run.keep(p.grad for p in model.parameters() if p.grad is not None)


def replace(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    run.synchronize()
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad * 0.5


def penalty_backward(run: Run, model: DDP, opt: torch.optim.Optimizer) -> None:
    """A second backward, of what every rank computes alike, adds to the averages."""
    run.synchronize()
    total = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
    (1e-2 * total).backward()


MEDDLERS: dict[str, Meddler] = {
    "clip": lambda run, model, _: clip(run, model),
    "clip-rarely": lambda run, model, _: clip(run, model, 1e3),
    "clip-twice": lambda run, model, _: clip(run, model, 0.05, 0.02),
    "clip-to-max": clip_to_max,
    "clip-and-read": clip_and_read,
    "clip-and-step": clip_and_step,
    "clip-and-save": clip_and_save,
    "clip-and-accumulate": clip_and_accumulate,
    "clip-and-evaluate": clip_and_evaluate,
    "clip-values": clip_values,
    "replace": replace,
    "penalty-backward": penalty_backward,
}


def meddled(run: Run, name: str, every: int = 1) -> None:
    """Train with SGD, which is sensitive to a gradient's scale, and do it in each step, or some."""
    model, opt = run.start(mlp(), "sgd")
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step)
        if step % every == 0:
            MEDDLERS[name](run, model, opt)
        run.step(opt)
    run.keep(model.parameters())


@pytest.mark.parametrize("name", list(MEDDLERS))
@ranks(2)
def test_gradients(rank: int, name: str) -> None:
    assert_parity(partial(meddled, name=name), rank, 0)


@ranks(2)
def test_gradients_in_some_steps(rank: int) -> None:
    for name in ("clip", "clip-values"):
        assert_parity(partial(meddled, name=name, every=2), rank, 3)


def clip_kept(run: Run) -> None:
    """Clipped gradients that are not dropped; a step only every other time."""
    model, opt = run.start(mlp(), "sgd")
    for step in range(STEPS):
        run.backward(model, step)
        clip(run, model)
        if step % 2:
            run.step(opt)
            opt.zero_grad()
    run.keep(model.parameters())


def clip_with_hook(run: Run) -> None:
    """Steps that cannot be deferred take clipped gradients."""
    model, opt = run.start(mlp(), "sgd")
    opt.register_step_post_hook(lambda *_: run.keep(p for p in model.parameters()))
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step)
        clip(run, model)
        run.step(opt)


def branch_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(5, 24), step % 3 == 0).square().mean()


def clip_models(run: Run, odd: bool) -> None:
    """Several dtypes; parameters without a gradient, always or in some steps."""
    if odd:
        model, opt = run.start(Odd(), adamw)
    else:
        model, opt = run.start(Branches(), "sgd", find_unused_parameters=True)
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step, odd_loss if odd else branch_loss)
        clip(run, model)
        run.step(opt)
    run.keep(model.parameters())


def scaler(run: Run, unscale: bool, fused: bool = False) -> None:
    """GradScaler, with some overflows; whole gradients where it reads them."""
    model, opt = run.start(Norm(), partial(adamw, fused=fused))
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step in range(STEPS):
        opt.zero_grad()
        factor = float("inf") if step % 6 == 5 else 1.0
        run.backward(model, step, lambda m, s, r, f=factor: scale.scale(mlp_loss(m, s, r) * f))
        run.synchronize()
        if unscale:
            scale.unscale_(opt)
            run.keep([nn.utils.clip_grad_norm_(model.parameters(), 0.1).nan_to_num()])
        scale.step(opt)
        scale.update()
        run.keep([torch.tensor(scale.get_scale())])
    run.keep(model.parameters())


SCALED: dict[str, Callable[[Run], None]] = {
    "clip-kept": clip_kept,
    "clip-with-hook": clip_with_hook,
    "clip-odd": partial(clip_models, odd=True),
    "clip-unused": partial(clip_models, odd=False),
    "scaler": partial(scaler, unscale=False),
    "scaler-fused": partial(scaler, unscale=False, fused=True),
    "scaler-unscale": partial(scaler, unscale=True),
}


@pytest.mark.parametrize("name", list(SCALED))
@ranks(2)
def test_scaled_gradients(rank: int, name: str) -> None:
    assert_parity(SCALED[name], rank, 0)
