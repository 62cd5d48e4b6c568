"""Collectives and their buffers: in place or not, as they say, with the right results."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bench.collective_checks import count_unequal, count_wrong, expected, pattern
from commsched.linkprobe.collectives import (
    IN_SHARDS,
    NAMES,
    ROOT,
    Call,
    Wires,
    drive,
    sent_factor,
    timed,
)
from tests.distributed import ranks


@given(st.integers(2, 4096))
def test_factors_are_those_of_nccl_tests(size: int) -> None:
    assert sent_factor("all_reduce", size) == pytest.approx(2 * (size - 1) / size)
    for name in IN_SHARDS:
        assert sent_factor(name, size) == pytest.approx((size - 1) / size)
    assert sent_factor("broadcast", size) == 1


# ---------------------------------------------------------------- buffers


def span(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = span(one), span(other)
    return a.start < b.stop and b.start < a.stop


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(5, 99), st.data())
def test_in_place_is_in_place_and_out_of_place_is_not(
    name: str, size: int, numel: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    wires: Any = SimpleNamespace(rank=rank, size=size, device="cpu")
    away = Call(wires, name, numel, in_place=False)
    assert not overlap(away.send, away.recv)
    call = Call(wires, name, numel, in_place=True)
    whole, part = call.numel, call.numel // size
    assert whole == (numel // size * size if name in IN_SHARDS else numel)
    assert call.nbytes == 4 * whole
    assert (away.send.shape, away.recv.shape) == (call.send.shape, call.recv.shape)
    if name == "reduce_scatter":
        assert span(call.recv) == span(call.send[rank * part : (rank + 1) * part])
    elif name == "all_gather":
        assert span(call.send) == span(call.recv[rank * part : (rank + 1) * part])
    else:
        assert span(call.send) == span(call.recv)


# ---------------------------------------------------------------- results

OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
CASES = [
    (name, in_place, op)
    for name in NAMES
    for in_place in (False, True)
    for op in (OPS if name in ("all_reduce", "reduce_scatter") else ["sum"])
    if (name, in_place) != ("all_to_all", True)
]


def wrong_after(wires: Wires, name: str, in_place: bool, op: str, dtype: torch.dtype) -> int:
    call = Call(wires, name, 1003, dtype, in_place, OPS[op])
    call.recv.fill_(77)
    if name != "broadcast" or wires.rank == ROOT:
        call.send.copy_(pattern(name, wires.rank, call.send.numel(), dtype, op))
    kept = call.send.clone()
    drive([call.start], 1)
    if not in_place:
        assert torch.equal(call.send, kept)
    return count_wrong(call.recv, expected(call, wires, dtype, op))


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_gives_what_it_must(world_size: int) -> None:
    ranks(world_size)(results)()


def results(rank: int, world_size: int) -> None:
    wires = Wires.of_world("cpu")
    for case in CASES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64):
            assert wrong_after(wires, *case, dtype) == 0, (case, dtype)


class Spoiled:
    """A work whose result is changed once it is there. gloo copies some results in `wait`."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self.work, self.tensor = work, tensor

    def wait(self) -> None:
        self.work.wait()
        self.tensor[-1] += 1


class Sabotaged(Wires):
    """Changes one element of each result on the last rank."""

    def _spoil(self, work: dist.Work, tensor: torch.Tensor) -> Any:
        return work if self.rank < self.size - 1 else Spoiled(work, tensor)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
        return self._spoil(super().all_reduce(tensor, op), tensor)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Any = None) -> Any:
        return self._spoil(super().reduce_scatter(out, inp, op), out)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> Any:
        return self._spoil(super().all_gather(out, inp), out)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *sizes: Any) -> Any:
        return self._spoil(super().all_to_all(out, inp, *sizes), out)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        return self._spoil(super().broadcast(tensor), tensor)


@ranks(2)
def test_one_wrong_element_is_found(rank: int, world_size: int) -> None:
    wires = Sabotaged.of_world("cpu")
    for case in CASES:
        assert wrong_after(wires, *case, torch.float32) == (rank == 1), case


def test_what_is_wrong() -> None:
    right = torch.tensor([1.0, 2.0, 3.0])
    assert count_wrong(torch.tensor([1.0, 2.0, float("nan")]), right) == 1
    near = right * (1 + 2 * torch.finfo(torch.float32).eps)
    assert count_wrong(near, right) == 3
    assert count_wrong(near, right, ulps=3) == 0
    assert count_wrong(torch.tensor([1.0, float("nan"), 3.1]), right, ulps=3) == 2
    assert count_unequal(right, right) == 0
    assert count_unequal(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])) == 1
    bad = torch.tensor([float("inf"), float("nan"), 1.0])
    assert count_unequal(bad, bad) == 2


@given(st.integers(2, 8), st.integers(100, 500))
def test_ranks_give_other_numbers(size: int, numel: int) -> None:
    for name in NAMES:
        rows = {
            tuple(pattern(name, rank, numel, torch.float32, "sum").tolist())
            for rank in range(min(size, 4))
        }
        assert len(rows) == min(size, 4)


# ---------------------------------------------------------------- driving and timing


class Done:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


@given(st.integers(0, 12), st.integers(1, 5))
def test_at_most_so_many_are_under_way_and_all_end_in_order(count: int, most: int) -> None:
    log: list[str] = []

    def stages(name: str) -> Iterator[Any]:
        log.append(f"start {name}")
        yield Done(log, name)
        log.append(f"end {name}")

    drive([lambda at=at: stages(str(at)) for at in range(count)], most)  # type: ignore[misc]
    for kind in ("start", "wait", "end"):
        assert [line.split()[1] for line in log if line.startswith(kind)] == [
            str(at) for at in range(count)
        ]
    under_way, largest = 0, 0
    for line in log:
        under_way += line.startswith("start") - line.startswith("end")
        largest = max(largest, under_way)
    assert largest == min(count, most)


@ranks(2)
def test_all_ranks_see_all_times(rank: int, world_size: int) -> None:
    wires = Wires.of_world("cpu")
    ticks = iter([1.0, 1.5 + rank])
    own_s = timed(wires, lambda: None, lambda: next(ticks))
    assert own_s == 0.5 + rank
    assert wires.gathered([own_s, 7.0]) == [[0.5, 7.0], [1.5, 7.0]]
