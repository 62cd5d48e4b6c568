"""Plain mode, where torch's own all-reduce was found to be the fastest: failures are still ours."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from tests.distributed import leaving, outlive, ranks, run_on_ranks
from tests.parity import mlp, mlp_loss
from tests.trying import TUNED, as_if, winning


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    model.zero_grad()
    mlp_loss(model, number, rank).backward()


def settled(rank: int, timeout_s: float) -> tuple[DDP, commsched.State]:
    """A model that plain DDP was kept for."""
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01)
    state = commsched.attach(model, timeout_s=timeout_s)
    with as_if(winning("ddp")):
        for number in range(TUNED):
            step(model, rank, number)
    assert state.report().choice == "ddp"
    return model, state


def dies(rank: int, world_size: int) -> str:
    model, _ = settled(rank, 20.0)
    if rank == 1:
        model.module[4].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank, TUNED)
    assert time.monotonic() - began < 10
    with pytest.raises(commsched.CommSchedError):  # again
        step(model, rank, TUNED + 1)
    return str(caught.value)


def test_killed_peer_is_named_with_the_parameters() -> None:
    survivor, victim = run_on_ranks(dies, fresh=True, timeout_s=40, grace_s=20, check_threads=False)
    assert victim.signal == "SIGKILL"
    assert survivor.status == "ok", str(survivor) + survivor.traceback + survivor.stderr
    assert "torch's all-reduce of the bucket of" in survivor.value
    assert "weight" in survivor.value
    assert "[1]" in survivor.value


def hangs(rank: int, world_size: int) -> str:
    model, _ = settled(rank, 2.0)
    if rank == 1:
        outlive(0)
        return "woke up"
    began = time.monotonic()
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank, TUNED)
    assert 1.5 < time.monotonic() - began < 10
    leaving()
    return str(caught.value)


def test_hung_peer_is_named_within_the_deadline_and_the_process_exits() -> None:
    waiting, _ = run_on_ranks(hangs, fresh=True, timeout_s=40, grace_s=20, check_threads=False)
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert "not done after" in waiting.value
    assert "[1]" in waiting.value


def interrupted(rank: int, world_size: int) -> float:
    model, _ = settled(rank, 60.0)
    if rank == 1:
        outlive(0)
        return 0.0
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        step(model, rank, TUNED)
    except KeyboardInterrupt:
        leaving()
        return time.monotonic() - began
    raise AssertionError("backward() returned without its peer")


def test_ctrl_c_while_waiting() -> None:
    waiting, _ = run_on_ranks(
        interrupted, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    )
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert waiting.value < 20  # of a deadline of 60


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@ranks(2)
def test_other_dtypes_are_bit_equal(rank: int, dtype: torch.dtype) -> None:
    def grads(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DDP(nn.Linear(64, 64).to(dtype), bucket_cap_mb=0.001)
        state = commsched.attach(model, timeout_s=10.0) if hooked else None
        with as_if(winning("ddp")):
            for number in range(TUNED):
                torch.manual_seed(2 * number + rank)
                model.zero_grad()
                model(torch.randn(4, 64).to(dtype)).square().sum().backward()
        if state is not None:
            assert state.report().choice == "ddp"
            assert state.report().exposed_ms > 0
            state.close()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for our, their in zip(grads(True), grads(False), strict=True):
        assert torch.equal(our, their)


@ranks(2)
def test_what_is_reported_is_torchs_way(rank: int) -> None:
    model, state = settled(rank, 10.0)
    report, tasks = state.report(), state.metrics()["commsched/tasks"]
    assert report.plan is None
    assert "plan" not in str(report).partition("\n")[0]
    ddp = next(row for row in report.tuning["rows"] if row["name"] == "ddp")  # type: ignore[index]
    assert report.predicted_ms == pytest.approx(ddp["predicted_ms"])
    step(model, rank, TUNED)
    assert state.metrics()["commsched/tasks"] == tasks + 1  # a rank that is behind shows
    state.close()
    assert state.metrics()["commsched/tasks"] >= tasks


@ranks(2)
def test_closing_ends_its_threads_and_later_steps_raise(rank: int) -> None:
    model, state = settled(rank, 10.0)
    assert any(one.name.startswith("commsched-plain") for one in threading.enumerate())
    state.close()
    assert not any(one.name.startswith("commsched-plain") for one in threading.enumerate())
    with pytest.raises(commsched.CommSchedError, match="closed"):
        step(model, rank)
