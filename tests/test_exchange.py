"""Exchanges on real groups: the sum in rank order, equal bytes everywhere, nothing else touched."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bench import links
from commsched import codecs, exchange
from commsched.group import Board, Group, Membership
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.memory import Memory
from commsched.packer import Packer
from commsched.plan import Plan, Task
from tests._rank_verdict import report
from tests.distributed import run_on_ranks
from tests.mixed import registered

WORLD_SIZES = [2, 3, 4]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 2, 3, 7, 12, 1001, 300_007]
GUARD = 5


def everywhere(body: Callable[..., None], world_size: int, *args: object) -> None:
    verdicts = run_on_ranks(body, *args, world_size=world_size)
    assert all(verdict.status == "ok" for verdict in verdicts), report(body.__name__, verdicts)


@contextmanager
def connected() -> Iterator[Group]:
    member = Membership(dist.group.WORLD)
    with torch.no_grad():
        yield Group(member, Board(member), 4, 30.0)
        dist.barrier()  # nobody leaves while another one still sends


def run(stages: exchange.Stages) -> torch.Tensor:
    """As the engine drives it, one at a time."""
    work = next(stages)
    while True:
        work.wait()
        try:
            work = stages.send(work.get_future().value())
        except StopIteration as stop:
            return stop.value


def gradients(numel: int, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = torch.randn(numel, dtype=wide, generator=generator)
    return (values * 10.0 ** (rank - 5)).to(dtype)  # in fp16 some are subnormal


def in_rank_order(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def on_all_ranks(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    rows: list[torch.Tensor] = [torch.empty(0)] * world_size
    dist.all_gather_object(rows, tensor)
    return rows


def shard(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return tensor.split(exchange.shard_sizes(tensor.numel(), world_size))[rank]


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shards_cover_the_chunk_evenly(numel: int, size: int) -> None:
    sizes = exchange.shard_sizes(numel, size)
    assert len(sizes) == size
    assert sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 1


def halves(rank: int, world_size: int) -> None:
    with connected() as group:
        pool = exchange.Pool()
        for numel in SIZES:
            for dtype in [*FLOATS, torch.int32, torch.int64]:
                rows = [gradients(numel, dtype, peer) for peer in range(world_size)]
                around = torch.full((numel + 2 * GUARD,), 77).to(dtype)
                wire = around[GUARD:-GUARD].copy_(rows[rank])
                expected = rows[rank].clone()
                shard(expected, rank, world_size).copy_(
                    shard(in_rank_order(rows), rank, world_size)
                )
                assert run(exchange.reduce_scatter(group, wire, pool)) is wire
                assert torch.equal(raw(wire), raw(expected)), (numel, dtype)
                assert run(exchange.all_gather(group, wire, pool)) is wire
                assert torch.equal(raw(wire), raw(in_rank_order(rows))), (numel, dtype)
                assert bool((around[:GUARD] == 77).all())
                assert bool((around[-GUARD:] == 77).all())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_sum_is_in_rank_order_and_nothing_else_is_touched(world_size: int) -> None:
    everywhere(halves, world_size)


def non_finite(rank: int, world_size: int) -> None:
    with connected() as group:
        pool = exchange.Pool()
        wire = torch.ones(10)
        if rank == 1:
            wire[::3] = torch.tensor([float("nan"), float("inf"), -float("inf"), float("nan")])
        if rank == 0:
            wire[3] = -float("inf")
        run(exchange.reduce_scatter(group, wire, pool))
        run(exchange.all_gather(group, wire, pool))
        assert wire[[0, 3, 9]].isnan().all()
        assert wire[6] == -float("inf")
        assert wire.isfinite().sum() == 6


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_nan_and_inf_reach_every_rank(world_size: int) -> None:
    everywhere(non_finite, world_size)


def interleaved(rank: int, world_size: int) -> None:
    """Started in one order on all ranks, resumed in an order of each rank's own."""
    count, rng = 12, random.Random(rank)
    with connected() as group:
        pool = exchange.Pool()
        for round_ in range(3):
            numels = [
                random.Random(100 * round_ + i).choice([5, 800, 90_001]) for i in range(count)
            ]
            wires = [
                gradients(numel, torch.float32, rank, 50 + i) for i, numel in enumerate(numels)
            ]
            for half in (exchange.reduce_scatter, exchange.all_gather):
                under_way = [
                    (stages, next(stages)) for stages in (half(group, w, pool) for w in wires)
                ]
                rng.shuffle(under_way)
                for stages, work in under_way:
                    work.wait()
                    with pytest.raises(StopIteration):
                        stages.send(work.get_future().value())
            for i, wire in enumerate(wires):
                rows = [
                    gradients(wire.numel(), torch.float32, peer, 50 + i)
                    for peer in range(world_size)
                ]
                assert torch.equal(wire, in_rank_order(rows))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_many_at_once_end_in_any_order(world_size: int) -> None:
    everywhere(interleaved, world_size)


def parts(rank: int, world_size: int) -> None:
    """All-gathers of unequal parts, also of none; all-to-alls of parts for one rank each."""
    with connected() as group:
        for dtype in (torch.uint8, torch.float32, torch.int32):
            for sizes in ([5, 8, 2, 7], [4, 0, 9, 1], [0, 3, 0, 6], [6, 6, 6, 6]):
                sizes = sizes[:world_size]
                everybodys = [torch.arange(n).to(dtype) + 20 * r for r, n in enumerate(sizes)]
                around = torch.full((sum(sizes) + 2 * GUARD,), 77).to(dtype)
                own = everybodys[rank].clone()
                transfer = exchange.spread(own, around[GUARD:-GUARD], sizes, rank)
                assert transfer.sent_bytes == (world_size - 1) * own.nbytes
                filled = run(transfer.start(group))
                assert torch.equal(filled, torch.cat(everybodys))
                assert torch.equal(own, everybodys[rank])
                assert bool((torch.cat([around[:GUARD], around[-GUARD:]]) == 77).all())

                # What rank r has for rank p: sizes[p] numbers, of which r and p can be read.
                def part(sender: int, receiver: int) -> torch.Tensor:
                    count = sizes[receiver] if receiver != sender else 0  # noqa: B023
                    return torch.full((count,), 16 * sender + receiver).to(dtype)  # noqa: B023

                mine = [part(rank, peer) for peer in range(world_size)]
                theirs = [part(peer, rank) for peer in range(world_size)]
                received = torch.empty(sum(map(len, theirs)), dtype=dtype)
                transfer = exchange.swapped(
                    torch.cat(mine), received, list(map(len, mine)), list(map(len, theirs))
                )
                assert transfer.sent_bytes == sum(one.nbytes for one in mine)
                assert run(transfer.start(group)) is received
                assert torch.equal(received, torch.cat(theirs))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_parts_of_any_sizes_come_to_their_places(world_size: int) -> None:
    everywhere(parts, world_size)


OPS = {"ring": ["all_reduce"], "halves": ["reduce_scatter", "all_gather"]}


def plan_of(numels: list[int], dtype: str, ops: tuple[str, ...] | list[str], codec: str) -> Plan:
    """Two chunks: the first bucket without its ends, and the other buckets fused."""
    specs = [BucketSpec((ParamSpec(f"p{i}", n),), dtype) for i, n in enumerate(numels)]
    chunks = [
        Chunk((Piece(0, GUARD, numels[0] - 2 * GUARD),), dtype),
        Chunk(tuple(Piece(i, 0, n) for i, n in enumerate(numels) if i), dtype),
    ]
    steps = [(op, chunk, number) for number, op in enumerate(ops) for chunk in chunks]
    tasks = tuple(Task(i, op, chunk, codec, number) for i, (op, chunk, number) in enumerate(steps))
    return Plan("test", Layout(tuple(specs)), tasks, 2**20)


def average(
    group: Group, packer: Packer, plan: Plan, buffers: list[torch.Tensor], step: int = 0
) -> None:
    pairs = zip(plan.layout.buckets, buffers, strict=True)
    jobs = [Job(i, spec, buffer, Progress()) for i, (spec, buffer) in enumerate(pairs)]
    before: dict[Chunk, Run] = {}
    for task in plan.tasks:
        members = {piece.bucket: jobs[piece.bucket] for piece in task.chunk.pieces}
        one = Run(task, plan, set(), members, step=step, after=before.get(task.chunk))
        before[task.chunk] = one
        packer.unpack(one, run(packer.pack(one).start(group)))
        one.done = True
    assert all(one.following is None for one in before.values())


def mean(rows: list[torch.Tensor]) -> torch.Tensor:
    if rows[0].is_floating_point() or rows[0].is_complex():
        return in_rank_order([row * (1.0 / len(rows)) for row in rows])
    return torch.div(in_rank_order(rows), len(rows), rounding_mode="trunc")


def packed(rank: int, world_size: int, dtype: str) -> None:
    numels, kind = [1003, 6, 3, 40], getattr(torch, dtype)
    with connected() as group:
        packers = {way: Packer(rank, world_size, Memory()) for way in OPS}
        for step in range(3):  # the later ones with the first one's memory
            rows = [
                [gradients(n, kind, peer, 10 * step + i) for i, n in enumerate(numels)]
                for peer in range(world_size)
            ]
            for way, ops in OPS.items():
                buffers = [row.clone() for row in rows[rank]]
                versions = [buffer._version for buffer in buffers]
                average(group, packers[way], plan_of(numels, dtype, ops, "none"), buffers)
                assert [buffer._version for buffer in buffers] == versions
                expected = [mean(list(row)) for row in zip(*rows, strict=True)]
                for end in (slice(GUARD), slice(-GUARD, None)):
                    expected[0][end] = rows[rank][0][end]
                for got, want in zip(buffers, expected, strict=True):
                    if way == "halves" or world_size == 2:
                        assert torch.equal(got, want)
                    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "int32", "int64"]
)
def test_both_halves_give_the_mean(world_size: int, dtype: str) -> None:
    everywhere(packed, world_size, dtype)


EPS = {"fp16": 2.0**-11, "bf16": 2.0**-8}
CODECS = ["fp16", "bf16", "coarse", "evens", "twice"]
REAL = [name for name in codecs.names() if codecs.get(name).lossy and name not in CODECS]
KEEPING = {"coarse", "evens", "fp16", "bf16"} | {"int8", "int4", "sign", "topk", "randomk", "vote"}


def encoded(rank: int, world_size: int, dtype: str, codec: str) -> None:
    numels, steps = [1003, 6, 3, 40], 4
    with registered(), connected() as group:
        memory = Memory()
        packer = Packer(rank, world_size, memory, "1")
        plan = plan_of(numels, dtype, codecs.get(codec).ops, codec)
        given_ = [torch.zeros(n).double() for n in numels]
        arrived = [torch.zeros(n).double() for n in numels]
        for step in range(steps):
            rows = [
                [
                    gradients(n, getattr(torch, dtype), peer + 4, 10 * step + i)
                    for i, n in enumerate(numels)
                ]
                for peer in range(world_size)
            ]
            got = [grad.clone() for grad in rows[rank]]
            average(group, packer, plan, got, step)
            for end in (slice(GUARD), slice(-GUARD, None)):
                assert torch.equal(got[0][end], rows[rank][0][end])
            for total, sent, own, row in zip(
                given_, arrived, got, zip(*rows, strict=True), strict=True
            ):
                total += sum(one.double() for one in row) / world_size
                sent += own.double()
                own[:GUARD] = own[-GUARD:] = 0  # in the first bucket these are each rank's own
                assert all(torch.equal(peer, own) for peer in on_all_ranks(own, world_size))
        if codec not in KEEPING:
            return
        kept = memory.slots()["error"]
        assert set(kept) == {f"p{i}" for i in range(len(numels))}
        for i, (total, sent) in enumerate(zip(given_, arrived, strict=True)):
            errors = sum(error.double() for error in on_all_ranks(kept[f"p{i}"], world_size))
            inner = slice(GUARD, -GUARD) if i == 0 else slice(None)
            near = 2e-5
            if codec in EPS:  # the sum is rounded once more at each hop
                near = EPS[codec] * (world_size - 1) * float(total[inner].abs().max())
            difference = (sent + errors - total)[inner].abs()
            assert float(difference.max()) <= steps * near, (i, difference.max())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("codec", CODECS + REAL)
def test_encoded_chunks_are_equal_on_all_ranks_and_errors_are_fed_back_once(
    world_size: int, codec: str
) -> None:
    everywhere(encoded, world_size, "float32", codec)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "evens"])
def test_encoded_chunks_of_another_dtype(codec: str) -> None:
    everywhere(encoded, 3, "float64", codec)


def near_the_mean(rank: int, world_size: int, codec: str) -> None:
    numels = [1003, 6, 3, 40]
    with registered(), connected() as group:
        packer = Packer(rank, world_size, Memory(), "0")
        rows = [
            [gradients(n, torch.float32, peer + 4, i) for i, n in enumerate(numels)]
            for peer in range(world_size)
        ]
        got = [grad.clone() for grad in rows[rank]]
        average(group, packer, plan_of(numels, "float32", codecs.get(codec).ops, codec), got)
        for i, (own, row) in enumerate(zip(got, zip(*rows, strict=True), strict=True)):
            inner = slice(GUARD, -GUARD) if i == 0 else slice(None)
            wanted = mean(list(row))[inner]
            bound = 0.08 if codec == "coarse" else 0.03
            torch.testing.assert_close(own[inner], wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("codec", ["fp16", "bf16", "coarse", "twice"])
def test_encoded_chunks_come_near_the_mean(world_size: int, codec: str) -> None:
    everywhere(near_the_mean, world_size, codec)


def counted(rank: int, world_size: int) -> None:
    with connected() as group:
        wire = torch.ones(1_000_001)
        ways: dict[str, Callable[[], exchange.Stages]] = {
            "all_reduce": lambda: exchange.ring_all_reduce(group, wire),
            "reduce_scatter": lambda: exchange.reduce_scatter(group, wire, exchange.Pool()),
            "all_gather": lambda: exchange.all_gather(group, wire, exchange.Pool()),
            "gather": lambda: exchange.spread(wire, everybodys, sizes, rank).start(group),
        }
        sizes, everybodys = [wire.numel()] * world_size, torch.empty(world_size * wire.numel())
        for op, start in ways.items():
            dist.barrier()
            before = links.wire_bytes()
            dist.barrier()
            run(start())
            dist.barrier()
            sent = (links.wire_bytes() - before) / world_size  # of all ranks: loopback
            said = exchange.wire_bytes(wire, world_size, op)
            assert said <= sent < 1.15 * said, (op, sent, said)  # headers, acknowledgements
            assert said == pytest.approx(exchange.sent_share(op, world_size) * wire.nbytes, abs=1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bytes_are_those_on_the_wire(world_size: int) -> None:
    everywhere(counted, world_size)


def test_memory_is_used_again_where_it_fits() -> None:
    pool = exchange.Pool()
    first = pool.take(torch.float32, 100)
    assert pool.take(torch.float32, 100).data_ptr() != first.data_ptr()
    pool.give(first)
    assert pool.take(torch.float64, 10).data_ptr() != first.data_ptr()
    again = pool.take(torch.float32, 60)
    assert (again.data_ptr(), again.numel()) == (first.data_ptr(), 60)
    pool.give(again)
    assert pool.take(torch.float32, 100).data_ptr() == first.data_ptr()
    assert pool.take(torch.float32, 0).numel() == 0


def late(rank: int, world_size: int) -> None:
    with connected() as group:
        if rank == 1:
            time.sleep(0.5)
        out, inp = torch.empty(4), torch.arange(4.0) + 10 * rank
        work = group.all_to_all(out, inp, [2, 2], [2, 2])
        if rank == 0:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=0.05))
            assert not work.is_completed()
        work.wait(timedelta(seconds=10))
        assert work.is_completed()
        (value,) = work.get_future().value()
        assert value.tolist() == [2 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]


def test_a_wait_that_ends_too_early_does_no_harm() -> None:
    """The lane's waiter waits tick by tick."""
    everywhere(late, 2)


def bereft(rank: int, world_size: int) -> None:
    with connected() as group:
        dist.barrier()
        if rank == 1:
            os._exit(3)
        work = next(exchange.reduce_scatter(group, torch.ones(1000), exchange.Pool()))
        with pytest.raises(RuntimeError):
            work.wait()
        assert work.is_completed()
        with pytest.raises(RuntimeError):
            work.get_future().value()
        os._exit(0)


def test_a_peer_that_dies_is_an_error_in_the_future() -> None:
    verdicts = run_on_ranks(bereft, fresh=True)
    assert [verdict.exit_code for verdict in verdicts] == [0, 3], report("bereft", verdicts)
