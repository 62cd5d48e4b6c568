"""Handed-over optimizers: steps of a few parameters at a time are the whole step, bit for bit."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer, lr_scheduler

from commsched.handover import Handover, Listener
from commsched.pending import Pending, mark_param

Make = Callable[[Any], Optimizer]
optim = torch.optim


class Nobody(Listener):
    """Hears and does nothing."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_step(self, handover: Handover, closure: Callable[[], Any] | None) -> Any:
        self.heard.append("step")

    def run_due(self) -> None:
        self.heard.append("run_due")

    def make_whole(self) -> None:
        self.heard.append("make_whole")

    def before_fork(self) -> None:
        self.heard.append("fork")

    def before_step_of(self, optimizer: Optimizer) -> None:
        self.heard.append("foreign")


def tensor_lr(value: float) -> torch.Tensor:
    return torch.tensor(value)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd tensor lr": lambda p: optim.SGD(p, lr=tensor_lr(0.1), momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adam foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "adam tensor lr": lambda p: optim.Adam(p, lr=tensor_lr(0.1), foreach=False),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1, t0=1, lambd=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "muon": lambda p: optim.Muon(p, lr=0.1),
}
SHAPES = [(3, 4), (1, 1), (2, 5), (6, 2), (4, 4)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def two_groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}]


def grads(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    made: list[torch.Tensor | None] = [torch.randn(s, generator=generator) for s in SHAPES]
    if step % 3 == 2:
        made[step % 5] = None  # unused in this step
    return made


def rows_of(optimizer: Optimizer, given: list[torch.Tensor | None], params: list[nn.Parameter]):  # type: ignore[no-untyped-def]
    by_id = {id(p): g for p, g in zip(params, given, strict=True)}
    return [
        (index, param, by_id[id(param)].clone())
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if by_id[id(param)] is not None
    ]


def give(params: list[nn.Parameter], step: int) -> None:
    for param, grad in zip(params, grads(step), strict=True):
        param.grad = grad


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    orders=st.lists(st.permutations(range(5)), min_size=1, max_size=4),
    cuts=st.sets(st.integers(1, 4)),
    groups=st.booleans(),
    whole_first=st.booleans(),
    scheduled=st.booleans(),
)
def test_steps_of_parts_are_the_whole_step(
    name: str,
    orders: list[list[int]],
    cuts: set[int],
    groups: bool,
    whole_first: bool,
    scheduled: bool,
) -> None:
    theirs, ours = parameters(), parameters()
    whole = OPTIMIZERS[name](two_groups(theirs) if groups else theirs)
    parts = OPTIMIZERS[name](two_groups(ours) if groups else ours)
    handover = Handover(parts, listener := Nobody())
    schedules = [lr_scheduler.ExponentialLR(o, 0.7) for o in (whole, parts)] if scheduled else []
    for step, order in enumerate(orders):
        give(theirs, step)
        give(ours, step)
        whole.step()
        parts.step()
        if whole_first and step == 0:
            handover.whole_step()
        recorded = handover.record()
        for schedule in schedules:  # what comes later must not matter
            schedule.step()
        if not (whole_first and step == 0):
            rows = rows_of(parts, grads(step), ours)
            rows = [rows[i] for i in order if i < len(rows)]
            kept = [param.grad for param in ours]
            for start, stop in itertools.pairwise([0, *sorted(cuts), 5]):
                if rows[start:stop]:
                    handover.run(recorded, rows[start:stop])
            assert all(grad is param.grad for grad, param in zip(kept, ours, strict=True))
        for ours_now, theirs_now in zip(ours, theirs, strict=True):
            assert torch.equal(ours_now, theirs_now)
        same_state(whole, parts)
    assert set(listener.heard) == {"step", "run_due"}  # run_due: for state_dict


def same_state(whole: Optimizer, parts: Optimizer) -> None:
    left, right = whole.state_dict(), parts.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for key, row in left["state"].items():
        other = right["state"][key]
        assert row.keys() == other.keys()
        for field, value in row.items():
            same = (
                torch.equal(value, other[field])
                if torch.is_tensor(value)
                else value == other[field]
            )
            assert same, field


def handed(make: Make) -> tuple[Handover, list[nn.Parameter]]:
    params = parameters()
    for param, grad in zip(params, grads(0), strict=True):
        param.grad = grad
    return Handover(make(params), Nobody()), params


# ---- what the user sees of it ------------------------------------------------------------------


def test_hyper_parameters_are_those_of_the_step_call() -> None:
    for make in (OPTIMIZERS["sgd"], OPTIMIZERS["sgd tensor lr"], OPTIMIZERS["adam"]):
        handover, params = handed(make)
        other, twins = handed(make)
        recorded = handover.record()
        for group in handover.optimizer.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(50.0)  # as LR schedulers do
            else:
                group["lr"] = 50.0
            group["weight_decay"] = 9.0
        handover.run(recorded, rows_of(handover.optimizer, grads(0), params))
        other.whole_step()
        assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


MODES: dict[str, Callable[[Callable[[], None]], Any]] = {
    "no_grad": lambda f: torch.no_grad()(f)(),
    "inference": lambda f: torch.inference_mode()(f)(),
    "autocast": lambda f: torch.autocast("cpu", torch.bfloat16)(f)(),
    "another default device": lambda f: in_device("meta", f),
    "func.grad": lambda f: torch.func.grad(lambda x: (f(), x.sum())[1])(torch.ones(2)),
    "vmap": lambda f: torch.vmap(lambda x: (f(), x)[1])(torch.ones(2)),
    "saved tensors": lambda f: in_saved(f),
    "fake tensors": lambda f: in_fake(f),
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd momentum"])
@pytest.mark.parametrize("mode", MODES)
def test_parts_run_whatever_is_going_on_around_them(mode: str, optimizer: str) -> None:
    handover, params = handed(OPTIMIZERS[optimizer])
    other, twins = handed(OPTIMIZERS[optimizer])
    recorded = handover.record()
    rows = rows_of(handover.optimizer, grads(0), params)
    MODES[mode](lambda: handover.run(recorded, rows))
    other.whole_step()
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))
    for row in handover.optimizer.state.values():
        for value in row.values():
            if torch.is_tensor(value):
                assert type(value) is torch.Tensor
                assert not value.is_inference()
                assert value.device.type == "cpu"


def in_fake(f: Callable[[], None]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        f()


def in_device(device: str, f: Callable[[], None]) -> None:
    with torch.device(device):
        f()


def in_saved(f: Callable[[], None]) -> None:
    with torch.autograd.graph.save_on_cpu():
        f()


def test_step_and_state_dict_are_answered() -> None:
    handover, params = handed(OPTIMIZERS["sgd"])
    listener = handover_listener = Nobody()
    handover.give_back()
    handover = Handover(handover.optimizer, listener)
    optimizer = handover.optimizer
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert listener.heard == ["step"]
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    optimizer.zero_grad()
    assert listener.heard == ["step"]
    optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert handover_listener.heard == ["step"] + ["run_due"] * 3
    handover.give_back()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.state_dict()
    assert len(listener.heard) == 4
    assert not torch.equal(params[0], before[0])


def test_schedulers_made_before_and_after_work() -> None:
    params = parameters()
    optimizer = optim.SGD(params, lr=0.1)
    early = lr_scheduler.StepLR(optimizer, 1)
    handover = Handover(optimizer, listener := Nobody())
    late = lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        optimizer.step()
        early.step()
        late.step()
    assert listener.heard == ["step"]
    assert not handover.given_back


def test_a_copied_or_pickled_optimizer_is_free() -> None:
    handover, params = handed(OPTIMIZERS["adam"])
    other = copy.deepcopy(handover.optimizer)
    before = [p.detach().clone() for p in params]
    for group in other.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    copied = [p for group in other.param_groups for p in group["params"]]
    assert not any(torch.equal(a, b) for a, b in zip(copied, before, strict=True))


def test_a_part_steps_a_pending_parameter_that_was_settled_by_its_owner_only() -> None:
    handover, params = handed(OPTIMIZERS["sgd"])
    for param in params:
        mark_param(param, None)  # type: ignore[arg-type]
    handover.run(handover.record(), [(0, params[0], torch.ones_like(params[0]))])
    assert [type(p) for p in params[1:]] == [Pending] * 4
