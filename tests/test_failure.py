"""Failures: an error of our own type, with names, within the deadline; and the process ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched import codecs
from commsched.codecs.cast import Fp16
from tests.distributed import leaving, outlive, ranks, run_on_ranks
from tests.parity import mlp, mlp_loss


def step(model: nn.Module, rank: int, number: int = 0) -> None:
    model.zero_grad()
    mlp_loss(model, number, rank).backward()


def hooked(**settings: object) -> tuple[DDP, commsched.State]:
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01)
    return model, commsched.attach(model, **{"timeout_s": 3.0, **settings})


def die_in_the_middle(rank: int, world_size: int, at_step: int, static_graph: bool) -> str:
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01, static_graph=static_graph)
    # A peer that dies before it has ever connected is only missed when the deadline has passed.
    commsched.attach(model, timeout_s=20.0 if at_step else 3.0)
    for number in range(6):
        if rank == 1 and number == at_step:
            # In the middle of backward: some buckets have gone, some have not.
            model.module[4].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        try:
            step(model, rank, number)
        except commsched.CommSchedError as error:
            assert time.monotonic() - began < 10
            return str(error)
    return "no error"


@pytest.mark.parametrize(("at_step", "static_graph"), [(0, False), (4, False), (0, True)])
def test_killed_peer(at_step: int, static_graph: bool) -> None:
    survivor, victim = run_on_ranks(
        die_in_the_middle,
        at_step,
        static_graph,
        fresh=True,
        timeout_s=40,
        grace_s=20,
        check_threads=False,
    )
    assert victim.signal == "SIGKILL"
    assert survivor.status == "ok", str(survivor) + survivor.traceback + survivor.stderr
    assert "[1]" in survivor.value or "first gradient bucket" in survivor.value
    if at_step:
        assert "weight" in survivor.value
        assert "task" in survivor.value


def hang_in_the_middle(rank: int, world_size: int) -> str:
    model, _ = hooked(timeout_s=2.0)
    for number in range(3):
        step(model, rank, number)
    if rank == 1:
        outlive(0)
        return "woke up"
    began = time.monotonic()
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank, 3)
    assert 1.5 < time.monotonic() - began < 10
    with pytest.raises(commsched.CommSchedError):  # again, and not the reducer's own error
        step(model, rank, 4)
    leaving()
    return str(caught.value)


def test_hung_peer_is_named_within_the_deadline_and_the_process_exits() -> None:
    # Rank 0's collective is still stuck in gloo when it exits: that must not hold it back.
    waiting, _ = run_on_ranks(
        hang_in_the_middle, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    )
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert "[1]" in waiting.value
    assert "weight" in waiting.value


def interrupted(rank: int, world_size: int) -> float:
    model, _ = hooked(timeout_s=60.0)
    for number in range(3):
        step(model, rank, number)
    if rank == 1:
        outlive(0)
        return 0.0
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        step(model, rank, 3)
    except KeyboardInterrupt:
        leaving()
        return time.monotonic() - began
    raise AssertionError("backward() returned without its peer")


def test_ctrl_c_while_waiting() -> None:
    waiting, _ = run_on_ranks(interrupted, fresh=True, timeout_s=40, grace_s=20)
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert waiting.value < 20  # of a deadline of 60


@ranks(2)
def test_different_settings_are_refused_on_every_rank(rank: int) -> None:
    model, state = hooked(chunk_mb=float(1 + rank))
    before = [p.detach().clone() for p in model.parameters()]
    for number in range(2):  # the second time too, and not with an error of the reducer's
        with pytest.raises(commsched.SettingsError) as caught:
            step(model, rank, number)
        text = str(caught.value)
        assert "chunk_mb is 1.0 on rank 0 and 2.0 on rank 1" in text
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert state.report().wire_bytes_per_step == 0  # before any gradient was sent
    state.close()


def unregistered(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01)
    if rank == 1:
        outlive(0)  # has no hook; its own all-reduce would hang
        return ""
    commsched.attach(model, timeout_s=1.5)
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank)
    leaving()
    return str(caught.value)


def test_a_rank_without_the_hook_is_named() -> None:
    waiting, _ = run_on_ranks(
        unregistered, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    )
    assert waiting.status == "ok", str(waiting) + waiting.traceback
    assert "ranks [1] have not reached their first gradient bucket" in waiting.value
    assert "is the hook registered on every rank" in waiting.value


def off_on_one_rank(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01)
    commsched.attach(model, enabled=rank == 0, timeout_s=30.0)
    if rank == 1:
        with pytest.raises(RuntimeError):  # torch's own all-reduce: its peer has gone
            step(model, rank)
        return ""
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank)
    return str(caught.value)


def test_a_rank_that_is_switched_off_is_named() -> None:
    waiting, _ = run_on_ranks(
        off_on_one_rank, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    )
    assert waiting.status == "ok", str(waiting) + waiting.traceback
    assert "enabled is False on rank 1 and True on rank 0" in waiting.value
    assert waiting.seconds < 20  # of a deadline of 30


def other_buckets(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    # Buckets of this mode are not rank 0's but each rank's own: other caps, other buckets.
    model = DDP(mlp(), bucket_cap_mb=0.01 * (1 + rank), find_unused_parameters=True)
    commsched.attach(model, timeout_s=10.0)
    with pytest.raises(commsched.CommSchedError) as caught:
        step(model, rank)
    return str(caught.value)


def test_other_buckets_are_an_error_before_anything_is_summed() -> None:
    for verdict in run_on_ranks(
        other_buckets, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    ):
        assert verdict.status == "ok", str(verdict) + verdict.traceback
        assert "different gradients" in verdict.value
        assert "rank 1: bucket 0 holds" in verdict.value


@ranks(2)
def test_errors_are_not_lost_where_a_wrapper_drops_the_hooks_result(rank: int) -> None:
    model = DDP(mlp(), bucket_cap_mb=0.01)
    state = commsched.State(timeout_s=5.0)

    def wrapper(state: commsched.State, bucket):  # type: ignore[no-untyped-def]
        return commsched.hook(state, bucket).then(lambda _: bucket.buffer())

    model.register_comm_hook(state, wrapper)
    step(model, rank)
    state.close()
    with pytest.raises(commsched.CommSchedError, match="closed"):
        step(model, rank, 1)
    with pytest.raises(commsched.CommSchedError, match="closed"):
        state.synchronize()


class Broken(Fp16):
    """Fails on rank 1 when it meets the marker."""

    name = "broken"

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        if dist.get_rank() == 1 and (grad > 1e6).any():
            raise ValueError("cannot encode this")
        super().encode(grad, out, seed)


def one_rank_fails(rank: int, world_size: int) -> str:
    codecs.register(Broken)
    model, _ = hooked(codec="broken", timeout_s=30.0)
    for number in range(3):
        step(model, rank, number)
    model.zero_grad()
    with pytest.raises(commsched.CommSchedError) as caught:
        (mlp_loss(model, 3, rank) * (1e12 if rank == 1 else 1.0)).backward()
    dist.monitored_barrier()  # both got their error while the other still lived
    return str(caught.value)


def test_a_failure_on_one_rank_is_told_to_the_others() -> None:
    other, failed = run_on_ranks(
        one_rank_fails, fresh=True, timeout_s=40, grace_s=20, check_threads=False
    )
    assert failed.status == "ok", str(failed) + failed.traceback
    assert "ValueError: cannot encode this" in failed.value
    assert "weight" in failed.value or "bias" in failed.value
    assert "restarted" in failed.value
    assert other.status == "ok", str(other) + other.traceback
    assert "rank 1 failed" in other.value
    assert "cannot encode this" in other.value
    assert other.seconds < 15  # of a deadline of 30


@ranks(2)
def test_a_broken_backward_is_followed_by_a_good_one(rank: int) -> None:
    # The user's own error in backward, on all ranks alike: torch's reducer needs a reset after it.
    model, state = hooked()
    for number in range(3):
        step(model, rank, number)
    handle = model.module[4].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, rank, 3)
    handle.remove()
    model.reducer._reset_state()
    dist.barrier()
    for number in range(3):
        step(model, rank, number)
    grads = [p.grad.clone() for p in model.parameters()]
    for grad in grads:
        rows = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(rows, grad)
        assert torch.equal(*rows)
    state.close()


@ranks(2)
def test_closed_state_says_so(rank: int) -> None:
    model, state = hooked()
    step(model, rank)
    state.close()
    state.close()
    for _ in range(2):
        with pytest.raises(commsched.CommSchedError, match="closed"):
            step(model, rank)


@ranks(2)
def test_one_state_for_two_models_is_refused(rank: int) -> None:
    state = commsched.State()
    models = [DDP(mlp()), DDP(mlp())]
    for model in models:
        model.register_comm_hook(state, commsched.hook)
    with pytest.raises(commsched.CommSchedError, match="registered on 2 DDP models"):
        step(models[0], rank)


@ranks(2)
def test_a_second_model_that_comes_later_is_refused(rank: int) -> None:
    model, state = hooked()
    step(model, rank)
    late = DDP(mlp())
    late.register_comm_hook(state, commsched.hook)
    with pytest.raises(commsched.CommSchedError, match="one State serves one DDP model"):
        step(late, rank)
    state.close()


@ranks(2)
def test_models_that_begin_in_another_order_do_not_meet(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    models = [DDP(nn.Linear(4, 1, bias=False), process_group=group) for group in groups]
    states = [commsched.attach(model, timeout_s=20.0) for model in models]

    def backward(index: int) -> None:
        models[index](torch.full((1, 4), 10.0**index * (1 + rank))).sum().backward()

    order = [0, 1] if rank == 0 else [1, 0]
    workers = [threading.Thread(target=backward, args=(index,)) for index in order]
    for worker in workers:
        worker.start()
        time.sleep(0.2)  # so that the order is really another one
    for worker in workers:
        worker.join()
    for index, model in enumerate(models):
        assert torch.equal(model.module.weight.grad, torch.full((1, 4), 10.0**index * 1.5))
    for state in states:
        state.close()


@ranks(2)
def test_second_hook_is_refused_before_ddp_records_it(rank: int) -> None:
    model, state = hooked()
    with pytest.raises(commsched.CommSchedError, match="already"):
        commsched.attach(model)
    assert len(model._comm_hooks) == 1
    state.close()


def test_python_reducer_gets_a_clear_error() -> None:
    with pytest.raises(commsched.CommSchedError, match="python_reducer"):
        commsched.hook(commsched.State(), (torch.zeros(1), torch.zeros(1)))


def test_optimizer_is_refused_in_this_version() -> None:
    with pytest.raises(commsched.CommSchedError, match="optimizer"):
        commsched.State(optimizer=object())  # type: ignore[arg-type]


def test_attach_without_ddp_says_when_to_call_it() -> None:
    with pytest.raises(commsched.CommSchedError, match="on_train_start"):
        commsched.attach(nn.Linear(2, 2))
