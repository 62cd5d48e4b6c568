"""Deferred steps against plain DDP: every kind of model, and of loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.compare import Run, assert_parity
from tests.deferring import slow_wire
from tests.distributed import ranks
from tests.parity import CASES, mlp

STEPS = 20
LATE = 12  # of them at least must be deferred: all but the first few

optim = torch.optim


# ---- all kinds of models -------------------------------------------------------------------------


def one_case(run: Run, name: str, optimizer: str, steps: int = 15) -> None:
    """One of `CASES`."""
    case = CASES[name]
    model, opt = run.start(case.model(), "sgd" if case.sparse else optimizer, **case.ddp)
    for step in range(steps):
        opt.zero_grad()
        for micro in range(case.accumulate):
            with nullcontext() if micro == case.accumulate - 1 else model.no_sync():
                run.backward(model, 10 * step + micro, case.loss)
        run.step(opt)
    run.keep(model.parameters())


# By name, so that each case's plain DDP is run once in the ranks.
@pytest.mark.parametrize("policy", ["fifo", "priority", "rs_ag"])
@pytest.mark.parametrize("name", list(CASES))
@ranks(2)
def test_cases(rank: int, name: str, policy: str) -> None:
    scenario = partial(one_case, name=name, optimizer="adamw")
    assert_parity(scenario, rank, 7, known_as=name, policy=policy)


@pytest.mark.parametrize("policy", ["priority", "rs_ag"])
@pytest.mark.parametrize("name", ["mlp", "find-unused"])
@ranks(4)
def test_cases_on_four_ranks(rank: int, name: str, policy: str) -> None:
    # Sums of four terms depend on where chunks begin.
    scenario = partial(one_case, name=name, optimizer="sgd")
    assert_parity(scenario, rank, 7, rtol=2e-5, known_as=name, policy=policy)


@pytest.mark.parametrize("policy", ["fifo", "priority", "rs_ag"])
@ranks(2)
def test_on_a_slow_wire(rank: int, policy: str) -> None:
    with slow_wire(0.002):
        assert_parity(partial(one_case, name="mlp", optimizer="adamw"), rank, 7, policy=policy)


# ---- all kinds of loops --------------------------------------------------------------------------


def accumulate(run: Run, sync: bool) -> None:
    """Two backwards a step."""
    model, opt = run.start(mlp(), "adamw")
    for step in range(STEPS):
        opt.zero_grad()
        with nullcontext() if sync else model.no_sync():
            run.backward(model, 2 * step)
        run.backward(model, 2 * step + 1)
        run.step(opt)
    run.keep(model.parameters())


def never_zero(run: Run) -> None:
    """Gradients of all steps pile up."""
    model, opt = run.start(mlp(), partial(optim.SGD, lr=1e-3))
    for step in range(STEPS):
        run.backward(model, step)
        run.step(opt)
    run.synchronize()
    run.keep(p.grad for p in model.parameters() if p.grad is not None)
    run.keep(model.parameters())


def zero(run: Run, to_none: bool, after: bool) -> None:
    """zero_grad(set_to_none=...), before or after the step."""
    model, opt = run.start(mlp(), "sgd")
    for step in range(STEPS):
        if not after:
            opt.zero_grad(set_to_none=to_none)
        run.backward(model, step)
        run.step(opt)
        if after:
            opt.zero_grad(set_to_none=to_none)
    run.keep(model.parameters())


def step_twice(run: Run) -> None:
    """A second step on the same gradients, with another learning rate."""
    model, opt = run.start(mlp(), "adamw")
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step)
        opt.step()
        opt.param_groups[0]["lr"] *= 0.9
        run.step(opt)
    run.keep(model.parameters())


def skip_steps(run: Run) -> None:
    """No step now and then, as a guard against NaNs does; gradients dropped or kept."""
    model, opt = run.start(mlp(), "adamw")
    for step in range(30):
        if step % 7 != 3:
            opt.zero_grad()
        run.backward(model, step)
        if step % 5 == 4:
            opt.zero_grad()
            opt.step()  # of nothing
        elif step % 3 != 1:
            run.step(opt)
    run.keep(model.parameters())


class Gan(nn.Module):
    """Two networks under one DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(depth=3), mlp(24, 3)
        self.widen = nn.Linear(3, 24)

    def forward(self, x: torch.Tensor, who: str) -> torch.Tensor:
        fake = self.critic(self.widen(self.generator(x)))
        return fake.mean() if who == "generator" else self.critic(x).mean() - fake.mean()


def gan_loss(model: nn.Module, step: int, rank: int, who: str) -> torch.Tensor:
    return model(torch.randn(5, 24), who)


def gan(run: Run, zero_all: bool) -> None:
    """Two optimizers that step alternately."""
    model = run.ddp(Gan(), find_unused_parameters=True)
    generator = [*model.module.generator.parameters(), *model.module.widen.parameters()]
    opts = {
        "critic": optim.AdamW(model.module.critic.parameters(), lr=1e-3),
        "generator": optim.AdamW(generator, lr=1e-3, maximize=True),
    }
    run.hand_over(model, *opts.values())
    for step in range(STEPS):
        for who, opt in opts.items():
            if zero_all:
                model.zero_grad()
            else:
                opt.zero_grad()
            run.backward(model, step, partial(gan_loss, who=who))
            run.step(opt)
    run.keep(model.parameters())


def two_models(run: Run) -> None:
    """Two DDP models with a State each; their forwards and backwards interleave."""
    models = [run.ddp(mlp(depth=4)), run.ddp(mlp(depth=3))]
    opts = [optim.AdamW(models[0].parameters()), optim.SGD(models[1].parameters(), lr=0.05)]
    for model, opt in zip(models, opts, strict=True):
        run.hand_over(model, opt)
    for step in range(STEPS):
        for opt in opts:
            opt.zero_grad()
        torch.manual_seed(1000 * step + run.rank)
        x = torch.randn(5, 24)
        (models[0](x).square().mean() + models[1](x).square().mean()).backward()
        run.step(*opts)
        run.train(models[1], [step], opts[1])
    run.keep(p for model in models for p in model.parameters())


def closure(run: Run) -> None:
    """step(closure)."""
    model, opt = run.start(mlp(), "adamw")

    def evaluate(step: int) -> torch.Tensor:
        opt.zero_grad()
        return run.backward(model, step)

    for step in range(STEPS):
        run.keep([opt.step(partial(evaluate, step))], shared=False)
        run.deferred += run.due() > 0
    run.keep(model.parameters())


def step_hooks(run: Run) -> None:
    """A hook on the optimizer's step sees all parameters, up to date."""
    model, opt = run.start(mlp(), "adamw")
    opt.register_step_post_hook(lambda *_: run.keep(p for p in model.parameters()))
    run.train(model, range(10), opt)


def jitter(run: Run) -> None:
    """Ranks lag behind each other, now here, now there."""
    chance = random.Random(run.rank)
    model, opt = run.start(mlp(), "adamw")
    for module in model.modules():
        module.register_forward_hook(lambda *_: time.sleep(chance.random() * 1e-3))
    for step in range(STEPS):
        opt.zero_grad()
        run.backward(model, step)
        time.sleep(chance.random() * 0.01)
        run.step(opt)
        time.sleep(chance.random() * 0.01)
    run.keep(model.parameters())


LOOPS: dict[str, tuple[Callable[[Run], None], int | None]] = {
    "accumulate-no-sync": (partial(accumulate, sync=False), LATE),
    "accumulate-sync": (partial(accumulate, sync=True), LATE),
    "never-zero": (never_zero, LATE),
    "zero-in-place": (partial(zero, to_none=False, after=False), LATE),
    "zero-in-place-after": (partial(zero, to_none=False, after=True), LATE),
    "zero-after": (partial(zero, to_none=True, after=True), LATE),
    "step-twice": (step_twice, LATE),
    "skip-steps": (skip_steps, 10),
    "gan": (partial(gan, zero_all=False), 30),
    "gan-zero-all": (partial(gan, zero_all=True), 30),
    "two-models": (two_models, LATE),
    "closure": (closure, LATE),
    "step-hooks": (step_hooks, None),
    "jitter": (jitter, LATE),
}


@pytest.mark.parametrize("name", list(LOOPS))
@ranks(2)
def test_loops(rank: int, name: str) -> None:
    scenario, deferred = LOOPS[name]
    assert_parity(scenario, rank, deferred)
