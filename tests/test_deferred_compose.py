"""Deferred steps with join and torch.compile, and at the end of a program."""

from __future__ import annotations

import io
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from tests.compare import Run, assert_parity
from tests.distributed import ranks, run_on_ranks
from tests.parity import SMALL, mlp, mlp_loss

STEPS = 15
LATE = 7  # of them at least must be deferred: all but the first few

optim = torch.optim
adamw = partial(optim.AdamW, lr=1e-2)


def join(run: Run, steps: tuple[int, int]) -> None:
    """Ranks have different numbers of batches."""
    model, opt = run.start(mlp(), "sgd")
    with Join([model]):
        run.train(model, range(steps[run.rank]), opt)
    run.synchronize()
    run.keep(model.parameters())


@pytest.mark.parametrize(
    ("steps", "deferred"), [((12, 18), 5), ((14, 9), 2), ((3, 9), 0), ((0, 9), 0), ((16, 16), 9)]
)
@ranks(2)
def test_join(rank: int, steps: tuple[int, int], deferred: int) -> None:
    assert_parity(partial(join, steps=steps), rank, deferred)


class Messages(logging.Handler):
    """Keeps commsched's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def compiled(run: Run, where: str, backend: str) -> None:
    """torch.compile around DDP, inside of it, or of it in place."""
    torch._dynamo.reset()
    module: nn.Module = mlp()
    if where == "inside":
        module = torch.compile(module, backend=backend)
    model = run.ddp(module, bucket_cap_mb=1)
    opt = adamw(model.parameters())
    run.hand_over(model, opt)
    if where == "in-place":
        model.compile(backend=backend)
    call = torch.compile(model, backend=backend) if where == "around" else model
    counters = torch._dynamo.utils.counters
    counters.clear()
    run.train(call, range(STEPS), opt)
    run.keep(model.parameters())
    # Nothing of ours is compiled, or breaks a graph: it would be compiled anew again and again.
    limit = {"around": 30, "inside": 1, "in-place": 12}[where]
    assert counters["frames"]["total"] <= limit
    assert where != "inside" or not counters["graph_break"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", ["around", "inside", "in-place"])
@ranks(2, timeout_s=120)
def test_compiled(rank: int, where: str, backend: str) -> None:
    messages = Messages()
    logging.getLogger("commsched").addHandler(messages)
    deferred = None if where == "in-place" else LATE
    try:
        assert_parity(partial(compiled, where=where, backend=backend), rank, deferred)
    finally:
        logging.getLogger("commsched").removeHandler(messages)
    if deferred is not None:
        assert sum("compiled" in text for text in messages.texts) == 1, messages.texts


def just_leave(rank: int, world_size: int, readers: tuple[int, ...], destroy: bool) -> None:
    model = DDP(mlp(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    opt = optim.SGD(model.parameters(), lr=0.05)
    state = commsched.State(optimizer=opt, policy="priority", **SMALL)
    model.register_comm_hook(state, commsched.hook)
    for step in range(10):
        opt.zero_grad()
        mlp_loss(model, step, rank).backward()
        opt.step()
    assert state._session is not None
    assert state._session.overlap is not None
    assert state._session.overlap.deferred.due
    if rank in readers:
        torch.save(model.state_dict(), io.BytesIO())
    globals()["kept"] = model, opt, state  # alive until the interpreter goes
    if destroy:
        dist.destroy_process_group()


@pytest.mark.parametrize(("readers", "destroy"), [((), False), ((0,), True), ((1,), False)])
def test_exit_with_steps_recorded(readers: tuple[int, ...], destroy: bool) -> None:
    for verdict in run_on_ranks(
        just_leave, readers, destroy, fresh=True, timeout_s=30, check_threads=False
    ):
        assert verdict.status == "ok", str(verdict) + verdict.stderr
        assert "rror" not in verdict.stderr, verdict.stderr
