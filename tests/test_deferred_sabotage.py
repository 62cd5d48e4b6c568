"""Each safety, broken on purpose: the checks that guard it must notice. None of them is vacuous."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import commsched
from commsched import deferred
from commsched.deferred import Deferred
from commsched.handover import Handover
from commsched.jobs import Job
from commsched.ledger import Ledger
from commsched.shadow import Recorded
from commsched.watch import Watch
from tests.deferring import Training, differ, grads, late_sum, slow_wire
from tests.distributed import ranks
from tests.parity import mlp
from tests.test_deferred_hidden import ALONE, Alias, Hidden


class Owning(nn.Module):
    """Has one module of its own that reads its weight where torch does not see it."""

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Alias.apply(x, self.weight, self.alias)

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.store = Owning.Layer(3, 3, bias=False)
        self.store.alias = self.store.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.store(self.body(x))


Train = Callable[[Training, int], list[torch.Tensor]]


def steps(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        training.run(rank, 2)
        return training.values()


def reads(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        training.step(rank)
        return [param * 1 for param in training.model.module.parameters()]


def saves(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        training.step(rank)
        rows = training.optimizer.state_dict()["state"]
        return [rows[key]["momentum_buffer"].clone() for key in sorted(rows)]


def loads(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.step(rank)
        training.optimizer.load_state_dict(saved)
        training.step(rank)
        return training.values()


def clips(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        training.backward(rank)
        nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)
        training.optimizer.step()
        return training.values()


def meddles(training: Training, rank: int) -> list[torch.Tensor]:
    training.synchronize()
    taken = [grad.view(-1) for grad in grads(training)]
    with slow_wire():
        training.backward(rank)
        for grad in taken:
            grad.add_(0.01 * (1 + rank))
        training.optimizer.step()
        return training.values()


def schedules(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        for _ in range(2):
            training.step(rank)
            training.optimizer.param_groups[0]["lr"] *= 0.1
        return training.values()


def another(training: Training, rank: int) -> list[torch.Tensor]:
    with slow_wire():
        training.backward(rank)
        torch.optim.SGD(training.model.parameters(), lr=0.3).step()
        return training.values()


def hides(training: Training, rank: int) -> list[torch.Tensor]:
    training.model.module.hide = True
    with late_sum("store.weight"):
        training.run(rank, 2)
        return training.values()


def runs_late(training: Training, rank: int) -> list[torch.Tensor]:
    with late_sum("store.weight"):
        training.run(rank, 2)
        return training.values()


def nothing(*_: Any, **__: Any) -> None:
    """What stands in for a safety."""


def only_measures(self: Deferred) -> None:
    self.recorder.forward_ends()


def live(self: Handover) -> Recorded:
    return Recorded(tuple(self.optimizer.param_groups))


@contextmanager
def without_hooks(training: Training) -> Any:
    """The model's forward pre-hooks, and an optimizer's for its state, gone."""
    for module in training.model.module.modules():
        module._forward_pre_hooks.clear()
    optimizer: Any = training.optimizer
    optimizer._optimizer_state_dict_pre_hooks.clear()
    optimizer._optimizer_load_state_dict_pre_hooks.clear()
    yield


@contextmanager
def without_hooks_and_marks(training: Training) -> Any:
    """Nor does reading `optimizer.state` run anything."""
    with without_hooks(training), mock.patch.object(Handover, "mark", nothing):
        yield


Sabotage = Callable[[Training], AbstractContextManager[Any]]


def patched(owner: Any, name: str, stand_in: Any = nothing) -> Sabotage:
    return lambda _: mock.patch.object(owner, name, stand_in)


def both(*sabotages: Sabotage) -> ExitStack:
    stack = ExitStack()
    for sabotage in sabotages:
        stack.enter_context(sabotage(None))  # type: ignore[arg-type]
    return stack


# What breaks; what is trained; what comes of it when whole; and when broken.
BROKEN: dict[str, tuple[Sabotage, Train, str, tuple[str, ...]]] = {
    "sums are not waited for": (
        patched(Job, "has", lambda *_: True),
        steps,
        "exact",
        ("differs",),
    ),
    "waiting returns at once": (patched(Ledger, "wait_for"), steps, "exact", ("raises", "refused")),
    "steps left at forward's end": (
        patched(Deferred, "forward_ends", only_measures),
        steps,
        "exact",
        ("refused",),
    ),
    "parameters are not marked, forward": (
        patched(deferred, "mark_param"),
        steps,
        "exact",
        ("raises",),  # autograd's own: changed in place after its use
    ),
    "parameters are not marked, read": (
        patched(deferred, "mark_param"),
        reads,
        "exact",
        ("differs",),
    ),
    "no state_dict hook": (without_hooks, saves, "exact", ("exact",)),  # it reads the state
    "no state_dict hook, and the state is not marked": (
        without_hooks_and_marks,
        saves,
        "exact",
        ("differs",),
    ),
    "no load_state_dict hook": (without_hooks, loads, "exact", ("differs",)),
    "gradients are not marked": (patched(deferred, "mark_grad"), clips, "exact", ("refused",)),
    "gradients are not marked, and touching is not seen": (
        lambda _: both(patched(deferred, "mark_grad"), patched(Job, "refuse_touched")),
        clips,
        "exact",
        ("differs",),
    ),
    "touching is not seen": (
        patched(Job, "refuse_touched"),
        meddles,
        "refused",
        ("differs",),
    ),
    "live hyper-parameters": (patched(Handover, "record", live), schedules, "exact", ("differs",)),
    "another optimizer": (patched(Deferred, "before_step_of"), another, "exact", ("exact",)),
    "another optimizer, and gradients are not marked": (
        lambda _: both(patched(Deferred, "before_step_of"), patched(deferred, "mark_grad")),
        another,
        "exact",
        ("differs", "refused"),
    ),
}
HIDDEN: dict[str, tuple[Sabotage, Train, str, tuple[str, ...]]] = {
    "late reads are not seen": (
        patched(Watch, "refuse_late"),
        hides,
        "refused",
        ("differs",),
    ),
    "modules do not settle their own": (without_hooks, runs_late, "exact", ("refused",)),
}


def outcome(
    rank: int, train: Train, sabotage: Sabotage, make: Callable[[], nn.Module], **settings: Any
) -> str:
    ddp = settings.get("ddp")
    theirs = train(Training(make, plain=True, ddp=ddp).run(rank), rank)
    training = Training(make, **settings).run(rank)
    training.synchronize()
    try:
        with sabotage(training):
            ours = train(training, rank)
    except commsched.CommSchedError:
        return "refused"
    except Exception:
        return "raises"
    else:
        return "differs" if differ(ours, theirs) else "exact"
    finally:
        training.close()


@pytest.mark.parametrize("name", BROKEN)
@ranks(2)
def test_a_broken_safety_is_noticed(rank: int, name: str) -> None:
    sabotage, train, whole, broken = BROKEN[name]
    assert outcome(rank, train, lambda _: nullcontext(), mlp) == whole
    assert outcome(rank, train, sabotage, mlp) in broken


@pytest.mark.parametrize("name", HIDDEN)
@ranks(2)
def test_a_broken_safety_for_hidden_reads_is_noticed(rank: int, name: str) -> None:
    sabotage, train, whole, broken = HIDDEN[name]
    make = (lambda: Hidden("alias")) if train is hides else Owning
    assert outcome(rank, train, lambda _: nullcontext(), make, **ALONE) == whole
    assert outcome(rank, train, sabotage, make, **ALONE) in broken
