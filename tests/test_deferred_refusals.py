"""Deferred steps where they cannot be, and steps around the DDP model or its optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from tests.deferring import Training, differ, slow_wire
from tests.distributed import ranks
from tests.parity import SMALL, mlp, mlp_loss
from tests.test_deferred_safety import says_what_to_do


@ranks(2)
def test_no_gradient_as_bucket_view(rank: int) -> None:
    with pytest.raises(commsched.CommSchedError, match="gradient_as_bucket_view=True"):
        Training(ddp={"gradient_as_bucket_view": False})  # attach says so at once
    model = DDP(mlp(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = commsched.State(optimizer=optimizer, **SMALL)
    model.register_comm_hook(state, commsched.hook)
    for number in range(2):  # the reducer is not broken by the first one
        with pytest.raises(commsched.CommSchedError, match="gradient_as_bucket_view=True"):
            mlp_loss(model, number, rank).backward()
    state.close()


@ranks(2)
def test_gradients_of_gradients(rank: int) -> None:
    # DDP's own buckets fail with it, too, unless each holds one parameter.
    training = Training(ddp={"bucket_cap_mb": 1e-9}).run(rank)
    training.optimizer.zero_grad()
    loss = mlp_loss(training.model, 0, rank)
    with pytest.raises(commsched.CommSchedError, match=r"create_graph=True.*optimizer="):
        loss.backward(create_graph=True)
    training.close()


def test_policy_priority_needs_an_optimizer() -> None:
    with pytest.raises(commsched.CommSchedError, match=r"priority.*optimizer="):
        commsched.State(policy="priority")


@ranks(2)
def test_handed_over_on_one_rank_only(rank: int) -> None:
    torch.manual_seed(7)
    model = DDP(mlp(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if rank == 0 else None
    state = commsched.attach(model, optimizer=optimizer, policy="fifo", **SMALL)
    with pytest.raises(commsched.SettingsError) as caught:
        mlp_loss(model, 0, rank).backward()
    assert "optimizer is True on rank 0 and False on rank 1" in str(caught.value)
    state.close()


@ranks(2)
def test_another_policy_on_each_rank(rank: int) -> None:
    training = Training(policy=("priority", "fifo")[rank])
    with pytest.raises(commsched.SettingsError) as caught:
        training.step(rank)
    assert "policy is 'priority' on rank 0 and 'fifo' on rank 1" in str(caught.value)
    training.close()


@ranks(2)
def test_an_optimizer_serves_one_live_state(rank: int) -> None:
    training = Training().run(rank)
    other = DDP(mlp(), gradient_as_bucket_view=True)
    with pytest.raises(commsched.CommSchedError, match=r"another commsched.State"):
        commsched.attach(other, optimizer=training.optimizer, **SMALL)
    second = commsched.State(optimizer=training.optimizer, **SMALL)
    other.register_comm_hook(second, commsched.hook)
    for number in range(2):
        with pytest.raises(commsched.CommSchedError, match=r"another commsched.State"):
            mlp_loss(other, number, rank).backward()
    training.step(rank)  # the first goes on
    training.close()
    second.close()


# ---- around the DDP model's forward ----------------------------------------------------------


def around(training: Training, how: str) -> torch.Tensor:
    x = torch.randn(5, 24)
    if how == "module":
        return training.model.module(x)
    if how == "ddp.forward":
        return training.model.forward(x)
    first, *rest = training.model.module  # "functional": not even one whole module
    return nn.Sequential(*rest)(nn.functional.linear(x, first.weight, first.bias))


@pytest.mark.parametrize("how", ["module", "ddp.forward", "functional"])
@ranks(2)
def test_around_the_models_forward(rank: int, how: str) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        try:
            with slow_wire():
                training.step(rank)
                for number in range(2):
                    torch.manual_seed(number + rank)
                    training.optimizer.zero_grad()
                    around(training, how).square().mean().backward()
                    training.optimizer.step()
            results.append(training.values())
        except commsched.CommSchedError as error:
            says_what_to_do(str(error))
        training.close()
    assert len(results) == 1 or not differ(*results)


@ranks(2)
def test_another_optimizer_for_the_same_parameters_is_exact(rank: int) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.01)
        with slow_wire():
            for _ in range(3):
                training.step(rank)
            results.append(training.values())
        training.close()
    assert not differ(*results)


@ranks(2)
def test_a_step_of_another_optimizer_in_between_is_exact(rank: int) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        other = torch.optim.SGD(training.model.module[4].parameters(), lr=0.3)
        with slow_wire():
            for _ in range(3):
                training.step(rank)
                other.step()  # the same gradients once more
            results.append(training.values())
        training.close()
    assert not differ(*results)
