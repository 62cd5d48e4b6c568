"""Reading parameters runs their steps; what is done to gradients after that is as under DDP."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from tests.deferring import Training, differ, grads, slow_wire
from tests.distributed import ranks

READS: dict[str, Callable[[Training], Any]] = {
    "nothing": lambda _: None,
    "one parameter": lambda t: next(t.model.parameters()).norm(),
    "average": lambda t: AveragedModel(t.model.module),
    "state_dict": lambda t: t.model.module.state_dict(),
    "optimizer's state_dict": lambda t: t.optimizer.state_dict(),
    "evaluation": lambda t: t.model.module(torch.ones(2, 24)),
    "a second step": lambda t: t.optimizer.step(),
}
TOUCHES: dict[str, Callable[[Training], Any]] = {
    "zero_grad": lambda t: t.optimizer.zero_grad(set_to_none=False),
    "_foreach_zero_": lambda t: torch._foreach_zero_(grads(t)),
    "mul_": lambda t: [grad.mul_(0.5) for grad in grads(t)],
    ".data": lambda t: [grad.data.zero_() for grad in grads(t)],
    "norm": lambda t: [float(grad.norm()) for grad in grads(t)],
}


@pytest.mark.parametrize("read", READS)
@ranks(2)
def test_gradients_touched_after_parameters_were_read(rank: int, read: str) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        values, norms = [], []
        with slow_wire(0.005):
            for name, touch in TOUCHES.items():
                for _ in range(2):
                    training.step(rank)
                    READS[read](training)
                    seen = touch(training)
                    norms += seen if name == "norm" else []
                    training.step(rank)
                values += training.values()
        results.append((values, norms))
        training.close()
    (theirs, saw), (ours, we_saw) = results
    assert not differ(ours, theirs)
    assert saw == we_saw
    assert saw


STATE: dict[str, Callable[[Training], Any]] = {
    "read": lambda t: [float(row["momentum_buffer"].norm()) for row in t.optimizer.state.values()],
    "reset": lambda t: [row["momentum_buffer"].zero_() for row in t.optimizer.state.values()],
    "replaced": lambda t: setattr(t.optimizer, "state", defaultdict(dict)),
    "copied": lambda t: copy.deepcopy(t.optimizer).state_dict()["state"][0]["momentum_buffer"],
}


@pytest.mark.parametrize("use", STATE)
@ranks(2)
def test_the_optimizers_state_is_up_to_date_when_used(rank: int, use: str) -> None:
    results, seen = [], []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        with slow_wire(0.005):
            training.step(rank)
            assert plain or training.pending() > 0
            assert isinstance(training.optimizer, torch.optim.SGD)
            seen.append(STATE[use](training))
            assert type(training.optimizer) is torch.optim.SGD
            training.step(rank)
            results.append(training.values())
        training.close()
    assert not differ(*results)
    if use == "read":
        assert seen[0] == seen[1]
    if use == "copied":
        assert torch.equal(*seen)


@ranks(2)
def test_a_forked_process_finds_parameters_up_to_date(rank: int) -> None:
    plain, training = Training(plain=True).run(rank), Training().run(rank)
    with slow_wire():
        plain.step(rank)
        training.step(rank)
        assert training.pending() > 0
        wanted = float(next(plain.model.parameters()).sum())
        child = os.fork()
        if child == 0:
            os._exit(0 if float(next(training.model.parameters()).sum()) == wanted else 7)
    assert os.waitpid(child, 0)[1] == 0
    assert not differ(training.values(), plain.values())
    training.close()
