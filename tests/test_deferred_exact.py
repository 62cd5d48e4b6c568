"""Exact means exact: 50 steps with deferred optimizer steps, bit for bit those of plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from tests.distributed import ranks
from tests.parity import SMALL, assert_same, mlp, mlp_loss

STEPS, ACCUMULATE = 50, 2
Groups = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def train(optimizer: str, rank: int, policy: str | None) -> tuple[list[torch.Tensor], int]:
    """Parameters after `STEPS`, and how many steps were deferred; plain DDP where `policy` is None.

    Two parameter groups, a cosine schedule, two micro-batches a step.
    """
    torch.manual_seed(7)
    model = DDP(mlp(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    opt = OPTIMIZERS[optimizer](
        [{"params": weights, "weight_decay": 1e-2}, {"params": biases, "lr": 5e-3}]
    )
    state = None
    if policy is not None:
        state = commsched.attach(model, optimizer=opt, policy=policy, **SMALL)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    deferred = 0
    for step in range(STEPS):
        opt.zero_grad()
        for micro in range(ACCUMULATE):
            with nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
                torch.manual_seed(1000 * step + 10 * micro + rank)
                mlp_loss(model, step, rank).backward()
        opt.step()
        schedule.step()
        if state is not None and state._session is not None and state._session.overlap is not None:
            deferred += len(state._session.overlap.deferred.due) > 0
    values = [param.detach().clone() for param in model.parameters()]
    if state is not None:
        state.close()
    return values, deferred


@pytest.mark.parametrize("policy", ["fifo", "priority", "rs_ag"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@ranks(2)
def test_fifty_steps_are_bitwise_plain_ddps(rank: int, optimizer: str, policy: str) -> None:
    theirs, _ = train(optimizer, rank, None)
    ours, deferred = train(optimizer, rank, policy)
    assert deferred >= STEPS - 8  # all but those in which the profile is taken
    assert_same(ours, theirs)
    for value in ours:
        both = [torch.empty_like(value), torch.empty_like(value)]
        dist.all_gather(both, value)
        assert torch.equal(*both)
