"""Optimizers that cannot be handed over, or not so: refused, with a reason and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.handover import Handover, accept
from tests.test_handover import Nobody, handed, parameters

optim = torch.optim


class InGroup(optim.SGD):
    """Keeps a counter in its group, as Prodigy and schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


class InAttribute(optim.SGD):
    """Counts its steps."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class InPrivate(InAttribute):
    """Counts its steps in private."""

    def step(self, closure: Any = None) -> Any:
        self._count = getattr(self, "_count", 0) + 1
        return optim.SGD.step(self, closure)


class InPlace(optim.SGD):
    """Accumulates in a tensor of its own."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.total = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.total += 1.0
        return super().step(closure)


class InGroupInPlace(optim.SGD):
    """The same, in its group."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.param_groups[0]["d"] = torch.ones(1)

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["d"].mul_(2)
        return super().step(closure)


class InState(optim.SGD):
    """Keeps something under a name in its state."""

    def step(self, closure: Any = None) -> Any:
        row = self.state["global"]
        row["k"] = row.get("k", 0) + 1
        return super().step(closure)


class InList(optim.SGD):
    """A history of norms in a list."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.norms.append(0.0)
        return super().step(closure)


class GlobalNorm(optim.SGD):
    """LAMB-like: clips by a norm over all parameters, and keeps nothing."""

    def step(self, closure: Any = None) -> Any:
        every = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(every)
        for grad in every:
            grad.div_(norm + 1)
        return super().step(closure)


TRACES = [InGroup, InAttribute, InPrivate, InPlace, InGroupInPlace, InState, InList]


@pytest.mark.parametrize("kind", TRACES, ids=lambda kind: kind.__name__)
def test_state_that_couples_parameters_is_refused_at_the_first_whole_step(kind: Any) -> None:
    handover, _ = handed(lambda p: kind(p, lr=0.1))
    with pytest.raises(commsched.CommSchedError, match=r"coupled.*optimizer="):
        handover.whole_step()


@pytest.mark.parametrize("kind", TRACES, ids=lambda kind: kind.__name__)
def test_state_that_couples_parameters_is_refused_at_the_first_part(kind: Any) -> None:
    handover, params = handed(lambda p: kind(p, lr=0.1))
    recorded = handover.record()
    with pytest.raises(commsched.CommSchedError, match=r"coupled.*optimizer="):
        handover.run(recorded, [(0, params[0], torch.ones_like(params[0]))])


def test_a_global_norm_in_the_step_is_refused() -> None:
    handover, _ = handed(lambda p: GlobalNorm(p, lr=0.1))
    with pytest.raises(commsched.CommSchedError):
        handover.whole_step()


@pytest.mark.parametrize("name", ["SAM", "Prodigy", "DAdaptAdam", "AdamWScheduleFree"])
def test_known_coupled_kinds_are_refused_by_name(name: str) -> None:
    kind = type(name, (optim.SGD,), {})
    with pytest.raises(commsched.CommSchedError, match=f"{name}.*Leave optimizer= out"):
        commsched.State(optimizer=kind(parameters(), lr=0.1))


def test_lbfgs_and_differentiable_are_refused() -> None:
    with pytest.raises(commsched.CommSchedError, match="LBFGS"):
        commsched.State(optimizer=optim.LBFGS(parameters()))
    for make in (optim.SGD, optim.Adam):
        with pytest.raises(commsched.CommSchedError, match="differentiable=True"):
            commsched.State(optimizer=make(parameters(), lr=0.1, differentiable=True))


@pytest.mark.parametrize("name", ["Samuel", "SAMplingSGD", "Salsa"])
def test_names_that_only_look_alike_are_judged_by_what_they_do(name: str) -> None:
    kind = type(name, (optim.SGD,), {})
    handover, _ = handed(lambda p: kind(p, lr=0.1))
    accept(handover.optimizer)
    handover.whole_step()


@pytest.mark.parametrize("thing", [object(), "sgd", [], {}, [object()], nn.Linear(1, 1), optim.SGD])
def test_what_is_no_optimizer_is_refused(thing: Any) -> None:
    with pytest.raises(commsched.CommSchedError, match="optimizer"):
        commsched.State(optimizer=thing)


def test_the_same_optimizer_twice_is_refused() -> None:
    optimizer = optim.SGD(parameters(), lr=0.1)
    with pytest.raises(commsched.CommSchedError, match="different"):
        commsched.State(optimizer=[optimizer, optimizer])
    handover, listener = Handover(optimizer, Nobody()), Nobody()
    with pytest.raises(commsched.CommSchedError, match="another"):
        Handover(optimizer, listener)
    handover.give_back()
    again = Handover(optimizer, listener)
    assert not again.given_back


def test_a_wrapped_optimizer_is_found() -> None:
    inner = optim.SGD(parameters(), lr=0.1)

    class Wrapped:
        optimizer = inner

    assert accept(Wrapped()) == (inner,)
    assert accept([Wrapped()]) == (inner,)
