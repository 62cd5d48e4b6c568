"""Parity with plain DDP: the same parameters, for every way of using DDP that a hook sees."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched import codecs
from commsched.codecs.cast import Fp16
from tests.compare import assert_equal_on_all_ranks
from tests.distributed import ranks
from tests.parity import (
    CASES,
    OPTIMIZERS,
    SMALL,
    assert_same,
    mlp,
    mlp_loss,
    sgd_steps,
    train,
)

STEPS = 10


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("name", list(CASES))
@ranks(2)
def test_two_ranks_bitwise(rank: int, name: str, optimizer: str, bucket_view: bool) -> None:
    case, view = CASES[name], {"gradient_as_bucket_view": bucket_view}
    theirs, _ = train(case, optimizer, STEPS, rank, None, **view)
    ours, state = train(case, optimizer, STEPS, rank, {}, **view)
    assert state is not None
    assert state.report().active
    assert state.report().steps == STEPS
    # gloo sums a sparse gradient in rank order on both sides, dense ones are two-term sums.
    assert_same(ours, theirs)
    state.close()


@pytest.mark.parametrize("name", list(CASES))
@ranks(4)
def test_four_ranks(rank: int, name: str) -> None:
    # SGD: AdamW turns the last bit of a gradient near zero into a step of full size.
    theirs, _ = train(CASES[name], "sgd", STEPS, rank, None)
    ours, state = train(CASES[name], "sgd", STEPS, rank, {})
    # Sums of four terms depend on where chunks begin; bfloat16 layers magnify the last bit.
    rough = name.startswith(("odd", "static-graph-odd", "autocast"))
    assert_same(ours, theirs, rtol=1e-2 if rough else 2e-5)
    assert_equal_on_all_ranks(ours)
    assert state is not None
    state.close()


@pytest.mark.parametrize("error_feedback", [False, True, "auto"])
@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "name", ["mlp", "odd-many-buckets", "find-unused", "sparse", "accumulation"]
)
@ranks(2)
def test_lossy_codecs_stay_close_and_equal(
    rank: int, name: str, codec: str, error_feedback: bool | str
) -> None:
    theirs, _ = train(CASES[name], "sgd", STEPS, rank, None)
    ours, state = train(
        CASES[name], "sgd", STEPS, rank, {"codec": codec, "error_feedback": error_feedback}
    )
    assert state is not None
    assert_equal_on_all_ranks(ours)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0.05, atol=0.02)
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "nothing lossy?"
    state.close()


LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
AT_ONCE = {"codec_start_step": 0, "codec_min_numel": 64}


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", ["mlp", "odd-many-buckets", "find-unused", "static-graph"])
@ranks(2)
def test_every_codec_leaves_all_ranks_with_the_same(rank: int, name: str, codec: str) -> None:
    theirs, _ = train(CASES[name], "sgd", 6, rank, None)
    ours, state = train(CASES[name], "sgd", 6, rank, {"codec": codec, **AT_ONCE})
    assert state is not None
    assert state.report().codec == codec
    assert_equal_on_all_ranks(ours)
    assert all(bool(param.isfinite().all()) for param in ours)
    # The odd model's matrices are too small to be factored.
    if not (codec in ("powersgd", "acpsgd") and name.startswith("odd")):
        assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "not lossy?"
    state.close()


@ranks(2)
def test_fp16_keeps_large_gradients_finite(rank: int) -> None:
    model = DDP(nn.Linear(4, 1, bias=False))
    state = commsched.attach(model, codec="fp16")
    (model(torch.full((1, 4), 4e4)).sum()).backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 4), 4e4), rtol=1e-3, atol=0)
    state.close()


@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@ranks(2)
def test_nan_and_inf_reach_every_rank(rank: int, bad: float, codec: str) -> None:
    """And a step later, as if a scaler had skipped the bad one, all is well."""
    model = DDP(mlp(), bucket_cap_mb=0.01)
    state = commsched.attach(model, codec=codec, **AT_ONCE, **SMALL)
    for value in (1.0, 1.0, bad, 1.0):
        model.zero_grad()
        loss = mlp_loss(model, 0, rank) * (value if rank == 1 else 1.0)
        loss.backward()
        state.synchronize()
        # Sparse codecs need not send all; but others' exact biases are no proof of anything.
        weights = torch.cat([p.grad.flatten() for p in model.parameters() if p.numel() > 64])
        assert bool(weights.isfinite().all()) == (value == 1.0), value
    state.close()


@ranks(2)
def test_join_with_uneven_inputs(rank: int) -> None:
    def run(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = DDP(mlp(), bucket_cap_mb=0.01)
        state = commsched.attach(model, **SMALL) if hooked else None
        with Join([model]):
            params = sgd_steps(model, 4 + 3 * rank, rank)
        if state is not None:
            state.close()
        return params

    assert_same(run(True), run(False))


@ranks(2)
def test_a_rank_without_any_input_joins(rank: int) -> None:
    def run(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = DDP(mlp(), bucket_cap_mb=0.01)
        state = commsched.attach(model, **SMALL) if hooked else None
        with Join([model]):
            params = sgd_steps(model, 3 * rank, rank)
        if state is not None:
            state.close()
        return params

    assert_same(run(True), run(False))


@ranks(2)
def test_two_models_with_interleaved_backwards(rank: int) -> None:
    def run(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        models = [DDP(mlp(depth=4), bucket_cap_mb=0.01), DDP(mlp(depth=3), bucket_cap_mb=0.01)]
        states = [commsched.attach(m, **SMALL) for m in models] if hooked else []
        params = [p for m in models for p in m.parameters()]
        opt = torch.optim.SGD(params, lr=0.05)
        for step in range(STEPS):
            torch.manual_seed(10 * step + rank)
            opt.zero_grad()
            x = torch.randn(5, 24)
            # One graph through both: their hooks alternate within one backward.
            loss = models[0](x).square().mean() + models[1](x).square().mean()
            loss.backward()
            mlp_loss(models[1], step, rank).backward()
            opt.step()
        for state in states:
            state.close()
        return [p.detach() for p in params]

    assert_same(run(True), run(False))


@pytest.mark.parametrize("attached", [False, True])
@ranks(4)
def test_subset_process_group(rank: int, attached: bool) -> None:
    subset = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    torch.manual_seed(11)
    base = mlp()
    results = []
    for hooked in (True, False):
        model = DDP(copy.deepcopy(base), process_group=subset, bucket_cap_mb=0.01)
        state = None
        if hooked and attached:
            state = commsched.attach(model, **SMALL)
        elif hooked:
            state = commsched.State(**SMALL)  # finds the model's group by itself
            model.register_comm_hook(state, commsched.hook)
        results.append(sgd_steps(model, 4, rank))
        if state is not None:
            state.close()
    assert_same(*results)


@ranks(2)
def test_world_size_one_needs_no_thread(rank: int) -> None:
    import threading

    alone = [dist.new_group([r]) for r in range(2)][rank]
    model = DDP(mlp(), process_group=alone)
    state = commsched.attach(model, codec="bf16")
    torch.manual_seed(0)
    mlp_loss(model, 0, rank).backward()
    expected = copy.deepcopy(model.module)
    expected.zero_grad()
    torch.manual_seed(0)
    mlp_loss(expected, 0, rank).backward()
    for p, q in zip(model.module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert not any(t.name.startswith("commsched") for t in threading.enumerate())
    assert "world size 1" in str(state.report())


@ranks(2)
def test_switched_off_is_plain_all_reduce(rank: int) -> None:
    theirs, _ = train(CASES["mlp"], "adamw", STEPS, rank, None)
    ours, state = train(CASES["mlp"], "adamw", STEPS, rank, {"enabled": False})
    assert state is not None
    assert not state.report().active
    assert_same(ours, theirs)


@ranks(2, timeout_s=120)
def test_compiled_model(rank: int) -> None:
    def run(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = DDP(mlp())
        compiled = torch.compile(model, backend="aot_eager")
        state = commsched.attach(compiled, **SMALL) if hooked else None
        params = sgd_steps(compiled, 4, rank)
        if state is not None:
            assert state.report().active
            state.close()
        return params

    assert_same(run(True), run(False))


@dataclass(frozen=True)
class Spy(Fp16):
    """Notes what it runs under."""

    name = "spy"
    seen: ClassVar[set[tuple[bool, bool]]] = set()

    def note(self) -> None:
        self.seen.add((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        self.note()
        super().encode(grad, out, seed)

    def decode(self, wire: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        self.note()
        super().decode(wire, out, seed)


@ranks(2)
def test_grad_mode_and_autocast_do_not_reach_the_codec(rank: int) -> None:
    if "spy" not in codecs.names():
        codecs.register(Spy)
    Spy.seen.clear()
    model = DDP(mlp())
    state = commsched.attach(model, codec="spy", **SMALL)
    with torch.autocast("cpu", torch.bfloat16):  # around backward() too: DDP's hook sees it
        for step in range(3):
            mlp_loss(model, step, rank).backward()
    assert Spy.seen == {(False, False)}
    state.close()
