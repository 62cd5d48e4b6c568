"""Training with every codec on real ranks: equal parameters, fewer bytes, DDP's other features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from bench import links
from commsched import codecs
from commsched.exchange import Pool
from commsched.group import Board, Group, Membership
from commsched.layout import Chunk, Piece, Span
from commsched.memory import Memory
from commsched.parcel import Parcel
from commsched.plan import Task
from tests.distributed import ranks

LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
# Many chunks in flight, from the first step on, whatever it costs.
NOW = {
    "chunk_mb": 0.004,
    "fusion_mb": 0.001,
    "credit_mb": 0.02,
    "codec_min_numel": 64,
    "codec_start_step": 0,
    "codec_force": True,
    "timeout_s": 30.0,
}


class Odd(nn.Module):
    """A number, a vector, a layer that some ranks never use, and matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 64)
        self.norm = nn.LayerNorm(64)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.seldom = nn.Linear(64, 64)
        self.conv = nn.Conv1d(1, 8, 5)
        self.last = nn.Linear(8 * 60, 12)

    def forward(self, x: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x))) * self.scale
        if seldom:
            x = self.seldom(x)
        return self.last(self.conv(x[:, None]).flatten(1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 24, generator=generator)
    return x, x[:, :12]


def prepared(codec: str, ddp: dict[str, Any] | None = None, **settings: Any) -> Any:
    torch.manual_seed(5)
    model = DDP(Odd(), bucket_cap_mb=0.01, gradient_as_bucket_view=True, **(ddp or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if settings.pop("defer", False):
        settings["optimizer"] = optimizer
    state = commsched.State(codec=codec, **{**NOW, **settings})
    model.register_comm_hook(state, commsched.hook)
    return model, optimizer, state


def step_of(model: nn.Module, optimizer: Any, step: int, rank: int, seldom: bool = True) -> float:
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = (model(x, seldom) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def assert_equal_on_all_ranks(values: torch.Tensor) -> None:
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    for row in rows[1:]:
        assert torch.equal(row, rows[0])


def bit_by_bit(codec: str) -> str:
    """Sparse ones with more entries, for few steps on a small model."""
    return f"{codec}:ratio=0.2" if codec in ("topk", "randomk", "vote", "dgc") else codec


@pytest.mark.parametrize("codec", LOSSY)
@ranks(4)
def test_parameters_are_equal_on_four_ranks_and_the_loss_falls(rank: int, codec: str) -> None:
    model, optimizer, state = prepared(bit_by_bit(codec))
    losses = [step_of(model, optimizer, step, rank) for step in range(15)]
    assert_equal_on_all_ranks(flat(model))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert len(state._session.engine.planner.made.plan.tasks) > 5
    assert state.report().codec == bit_by_bit(codec)
    state.close()


@pytest.mark.parametrize("codec", LOSSY)
@ranks(2)
def test_deferred_steps_give_what_synchronous_ones_give(rank: int, codec: str) -> None:
    results = []
    for options in ({}, {"defer": True, "policy": "fifo"}):
        model, optimizer, state = prepared(bit_by_bit(codec), **options)
        for step in range(12):
            step_of(model, optimizer, step, rank)
        state.synchronize()
        results.append(flat(model))
        state.close()
    assert torch.equal(*results)
    assert_equal_on_all_ranks(results[0])


@pytest.mark.parametrize("policy", ["priority", "rs_ag"])
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.2", "powersgd"])
@ranks(2)
def test_ordered_for_the_next_forward(rank: int, codec: str, policy: str) -> None:
    model, optimizer, state = prepared(codec, defer=True, policy=policy)
    losses = [step_of(model, optimizer, step, rank) for step in range(30)]
    state.synchronize()
    assert_equal_on_all_ranks(flat(model))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    report = state.report()
    assert report.deferred_steps > 10
    assert (report.policy, report.codec) == (policy, codec)
    state.close()


@pytest.mark.parametrize("codec", LOSSY)
@ranks(2)
def test_layers_that_are_not_always_used(rank: int, codec: str) -> None:
    model, optimizer, state = prepared(bit_by_bit(codec), ddp={"find_unused_parameters": True})
    for step in range(10):
        step_of(model, optimizer, step, rank, seldom=step % 3 == rank)
    assert_equal_on_all_ranks(flat(model))
    state.close()


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.2", "vote:ratio=0.2", "powersgd"])
@ranks(2)
def test_uneven_inputs_accumulation_and_half_precision(rank: int, codec: str) -> None:
    model, optimizer, state = prepared(codec)
    with Join([model]):
        for step in range(3 + 2 * rank):
            step_of(model, optimizer, step, rank)
    with model.no_sync():
        model(batch(9, rank)[0], True).sum().backward()
    step_of(model, optimizer, 10, rank)
    assert_equal_on_all_ranks(flat(model))
    state.close()
    torch.manual_seed(1)
    half = DDP(nn.Sequential(nn.Linear(24, 64), nn.Linear(64, 12)).bfloat16(), bucket_cap_mb=0.01)
    other = commsched.attach(half, codec=codec, **NOW)
    for step in range(4):
        half.zero_grad()
        half(batch(step, rank)[0].bfloat16()).float().square().mean().backward()
        grads = torch.cat([param.grad.flatten() for param in half.parameters()])
        assert grads.dtype == torch.bfloat16
        assert grads.any()
        assert_equal_on_all_ranks(grads)
    other.close()


@pytest.mark.parametrize("codec", LOSSY)
@ranks(2)
def test_a_scaler_skips_the_step_that_overflows_and_goes_on(rank: int, codec: str) -> None:
    model, optimizer, state = prepared(bit_by_bit(codec))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
    for step in range(8):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        loss = (model(x, True) - y).square().mean()
        if step == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) == (step == 3)
    assert scaler.get_scale() == 2.0
    assert bool(flat(model).isfinite().all())
    assert_equal_on_all_ranks(flat(model))
    state.close()


@ranks(2)
def test_powersgd_takes_zero_gradients_and_single_numbers(rank: int) -> None:
    """Torch's own hook gives NaN, IndexError, or hangs with several buckets in flight."""
    model, optimizer, state = prepared("powersgd")
    for _ in range(3):
        optimizer.zero_grad()
        (model(torch.zeros(4, 24), True) * 0.0).sum().backward()
        for param in model.parameters():
            assert param.grad is not None
            assert not param.grad.any()
    step_of(model, optimizer, 0, rank)
    assert bool(flat(model).isfinite().all())
    assert model.module.scale.grad.abs() > 0
    state.close()


@ranks(2)
def test_biases_norms_and_small_parameters_stay_exact(rank: int) -> None:
    torch.manual_seed(5)
    plain = DDP(Odd(), bucket_cap_mb=0.01)
    model, _, state = prepared("sign", codec_rules="last.*=none;first.bias=sign")
    for one in (plain, model):
        (one(batch(0, rank)[0], True) - batch(0, rank)[1]).square().mean().backward()
    lossy = set()
    for (name, ours), theirs in zip(
        model.module.named_parameters(), plain.module.parameters(), strict=True
    ):
        if not torch.equal(ours.grad, theirs.grad):
            lossy.add(name)
    assert lossy == {"first.weight", "first.bias", "seldom.weight"}  # conv has 40 numbers
    state.close()


@pytest.mark.parametrize("start", [0, 3])
@ranks(2)
def test_steps_before_the_start_are_exact(rank: int, start: int) -> None:
    plain = DDP(Odd(), bucket_cap_mb=0.01)
    model, optimizer, state = prepared("int8", codec_start_step=start)
    plain.load_state_dict(model.state_dict())
    other = torch.optim.SGD(plain.parameters(), lr=0.2)
    equal = []
    for step in range(5):
        plain.load_state_dict(model.state_dict())
        step_of(plain, other, step, rank)
        step_of(model, optimizer, step, rank)
        equal.append(torch.equal(flat(plain), flat(model)))
    assert equal == [step < start for step in range(5)]
    state.close()


def one_average(group: Group, codec: codecs.Codec, grad: torch.Tensor, rows: int, step: int) -> int:
    """The bytes that this rank's transfers say they send."""
    numel = grad.numel()
    chunk, spans = Chunk((Piece(0, 0, numel, rows),), "float32"), (Span("w", numel, 0, 0, numel),)
    memory = Memory()
    parcel = Parcel(
        chunk, spans, [grad.clone()], group.rank, group.size, step, memory, codec.biased, Pool()
    )
    rounds = codec.rounds(parcel)
    transfer, sent = next(rounds), 0
    for _ in codec.ops:
        sent += transfer.sent_bytes
        stages = transfer.start(group)
        work = next(stages)
        work.wait()
        try:
            stages.send(work.get_future().value())
        except StopIteration as stop:
            result = stop.value
        try:
            transfer = rounds.send(result)
        except StopIteration:
            break
    return sent


def counted(rank: int, world_size: int, name: str) -> None:
    member = Membership(dist.group.WORLD)
    codec = codecs.get(name)
    rows, numel = 1000, 1_600_000
    chunk = Chunk((Piece(0, 0, numel, rows),), "float32")
    tasks = [Task(0, op, chunk, name, number) for number, op in enumerate(codec.ops)]
    theory = sum(task.sent_bytes(world_size) for task in tasks)
    with torch.no_grad():
        group = Group(member, Board(member), 4, 30.0)
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        one_average(group, codec, grad, rows, 0)  # connects
        # Besides: barriers, acknowledgements, and headers of some messages.
        most = 1.05 * theory + 20_000
        for _ in range(10):  # others on this machine may use the loopback too
            dist.barrier()
            before = links.wire_bytes()
            dist.barrier()
            own = torch.tensor([float(one_average(group, codec, grad, rows, 1))])
            dist.barrier()
            # Of all ranks: loopback. Equal on all, or some would go on.
            sent = torch.tensor([(links.wire_bytes() - before) / world_size])
            dist.all_reduce(sent, dist.ReduceOp.MIN)
            dist.all_reduce(own)
            if sent <= most:
                break
    assert abs(float(own) / world_size - theory) <= 0.05 * theory
    assert 0.95 * theory <= float(sent) <= most, (sent, theory)


@pytest.mark.parametrize("name", LOSSY)
@ranks(2)
def test_bytes_on_the_interface_of_two_ranks(rank: int, name: str) -> None:
    counted(rank, 2, name)


@pytest.mark.parametrize("name", LOSSY)
@ranks(4)
def test_bytes_on_the_interface_of_four_ranks(rank: int, name: str) -> None:
    counted(rank, 4, name)


def test_dgc_without_its_memory_is_refused() -> None:
    with pytest.raises(commsched.SettingsError, match="error_feedback='0'"):
        commsched.State(codec_rules="w*=dgc", error_feedback=False)
