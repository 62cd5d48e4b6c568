"""Failures while steps are deferred: errors with names in time, and the process ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import commsched
from tests.deferring import Training, differ, slow_wire
from tests.distributed import Verdict, leaving, outlive, ranks, run_on_ranks


def ends(*args: object, **kwargs: object) -> list[Verdict]:
    return run_on_ranks(*args, fresh=True, timeout_s=40, grace_s=20, check_threads=False, **kwargs)  # type: ignore[arg-type]


def use(training: Training, rank: int, what: str) -> None:
    if what == "forward":
        training.step(rank)
    elif what == "state_dict":
        training.model.state_dict()
    elif what == "optimizer.state_dict":
        training.optimizer.state_dict()
    elif what == "eval":
        with torch.inference_mode():
            training.model.module(torch.zeros(1, 24))
    else:
        training.synchronize()


def gone_while_pending(rank: int, world_size: int, what: str, hang: bool) -> str:
    training = Training(timeout_s=3.0 if hang else 30.0).run(rank)
    training.synchronize()
    if rank == 1:
        with slow_wire(6.0 if hang else 1.0):  # it goes before its first chunk does
            training.step(rank)
            if not hang:
                os._exit(7)
            outlive(0)
            return ""
    training.step(rank)
    assert training.pending() > 0
    begin_s = time.monotonic()
    with pytest.raises(commsched.CommSchedError) as caught:
        use(training, rank, what)
    assert time.monotonic() - begin_s < 10
    for again in (
        "forward",
        "state_dict",
        "optimizer.state_dict",
        "eval",
        "synchronize",
    ):  # and no other error, nor silence
        with pytest.raises(commsched.CommSchedError):
            use(training, rank, again)
    leaving()
    return str(caught.value)


@pytest.mark.parametrize("what", ["forward", "optimizer.state_dict"])
def test_a_peer_dies_while_steps_are_pending(what: str) -> None:
    survivor, victim = ends(gone_while_pending, what, False)
    assert victim.exit_code == 7
    assert survivor.status == "ok", str(survivor) + survivor.traceback + survivor.stderr
    assert "[1]" in survivor.value
    assert "weight" in survivor.value
    assert survivor.seconds < 25  # of a deadline of 30


def test_a_peer_hangs_while_steps_are_pending() -> None:
    survivor, _ = ends(gone_while_pending, "forward", True)
    assert survivor.status == "ok", str(survivor) + survivor.traceback + survivor.stderr
    assert "[1]" in survivor.value
    assert "weight" in survivor.value


def raise_in_user_code(rank: int, world_size: int, where: str) -> str:
    training = Training(timeout_s=30.0).run(rank)
    if rank == 1:
        if where == "between":
            training.backward(rank)
        elif where == "backward":
            training.model.module[4].weight.register_hook(lambda _: 1 / 0)
            training.step(rank)
        raise ZeroDivisionError
    begin_s = time.monotonic()
    with pytest.raises(commsched.CommSchedError) as caught:
        training.run(rank, 3)
    assert time.monotonic() - begin_s < 15  # of a deadline of 30
    return str(caught.value)


@pytest.mark.parametrize("where", ["between", "backward"])
def test_an_exception_on_one_rank(where: str) -> None:
    waiting, failed = ends(raise_in_user_code, where)
    assert failed.error_type == "ZeroDivisionError"
    assert failed.exit_code == 1
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert "1" in waiting.value


def interrupted(rank: int, world_size: int) -> float:
    training = Training(timeout_s=60.0).run(rank)
    training.synchronize()
    if rank == 1:
        with slow_wire(3.0):
            training.step(rank)
            outlive(0)
        return 0.0
    training.step(rank)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin_s = time.monotonic()
    try:
        training.backward(rank)
    except KeyboardInterrupt:
        leaving()
        return time.monotonic() - begin_s
    raise AssertionError("forward returned without its peer")


def test_ctrl_c_while_forward_waits() -> None:
    waiting, _ = ends(interrupted)
    assert waiting.status == "ok", str(waiting) + waiting.traceback + waiting.stderr
    assert waiting.value < 4


@ranks(2)
def test_an_error_in_the_users_forward_loses_no_step(rank: int) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        with slow_wire():
            for at in (0, 6):  # nothing settled yet; half of it
                training.step(rank)
                layer = training.model.module[at]
                handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    training.backward(rank)
                handle.remove()
                training.step(rank)
        results.append(training.values())
        training.close()
    assert not differ(*results)


@ranks(2)
def test_an_optimizer_that_raises_is_not_forgotten(rank: int) -> None:
    # A program that catches it, as some do with whatever training raises, must not go on with
    # parameters that have missed a step.
    training = Training().run(rank)
    training.step(rank)
    kind = torch.optim.SGD  # not type(): while steps are due the optimizer has a subclass of it
    original = kind.step

    def failing(self: torch.optim.Optimizer, closure: object = None) -> None:
        raise MemoryError("in step")

    kind.step = failing  # type: ignore[assignment]
    try:
        with pytest.raises(MemoryError):
            training.backward(rank)
    finally:
        kind.step = original  # type: ignore[method-assign]
    with pytest.raises(commsched.CommSchedError):
        training.values()
    training.close()


def leave_pending(rank: int, world_size: int, how: str) -> list[torch.Tensor]:
    training = Training().run(rank)
    globals()["kept"] = training  # alive until the interpreter goes
    with slow_wire(0.1):
        training.step(rank)
        assert training.pending() > 0
        if how == "other reads" and rank == 0:
            time.sleep(1.0)
            return [value.clone() for value in training.model.state_dict().values()]
    return []


@pytest.mark.parametrize("how", ["both leave", "other reads"])
def test_leaving_with_pending_steps(how: str) -> None:
    # Rank 1 is gone, or going, while rank 0 reads: the sums it owed have been sent or it says so.
    verdicts = ends(leave_pending, how)
    for verdict in verdicts:
        assert verdict.status == "ok", str(verdict) + verdict.traceback + verdict.stderr
        assert verdict.exit_code == 0
        assert "Error" not in verdict.stderr, verdict.stderr
        assert "lost" not in verdict.stderr, verdict.stderr
