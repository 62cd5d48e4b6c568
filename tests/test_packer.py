"""The packer: what the ranks send adds up to the mean, and comes back to the right places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched import codecs
from commsched.exchange import Pool
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.memory import Memory
from commsched.parcel import Parcel
from tests.mixed import registered
from tests.packing import (
    begin,
    buffers_of,
    collective,
    constant_world,
    layout_of,
    mean,
    plan_for,
    rank_of,
    send,
)

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
TWO_TASKS = ("coarse", "twice")
EXACT_HERE = ("none", *CASTS, *TWO_TASKS)  # for a few small multiples of 1/2
KEPT = (*CASTS, "coarse", "evens", *(n for n in ("int8", "sign", "topk") if n in codecs.names()))


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


NUMELS = st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=1, max_size=5)


@given(NUMELS, st.sampled_from([1, 2, 4]), st.integers(4, 200), st.integers(0, 200), st.booleans())
@settings(deadline=None)
def test_the_mean_is_exact_on_powers_of_two(
    numels: list[list[int]], world_size: int, chunk: int, fusion: int, halves: bool
) -> None:
    halves = halves and world_size > 1  # a single rank has nothing to share
    world, before = begin(layout_of(numels), world_size, "none", chunk, fusion, halves)
    send(world)
    for rank in world:
        for key, job in enumerate(rank.jobs):
            assert torch.equal(job.buffer, mean([row[key] for row in before]))
            assert job.result.data_ptr() == job.buffer.data_ptr()


@given(NUMELS, st.integers(4, 200), st.integers(0, 200), st.booleans())
@settings(deadline=None)
def test_the_mean_of_three(numels: list[list[int]], chunk: int, fusion: int, halves: bool) -> None:
    world, before = begin(layout_of(numels), 3, "none", chunk, fusion, halves)
    send(world)
    for rank in world:
        for key, job in enumerate(rank.jobs):
            torch.testing.assert_close(job.buffer, mean([row[key] for row in before]))
            assert torch.equal(job.buffer, world[0].jobs[key].buffer)


@given(
    NUMELS,
    st.sampled_from([2, 4]),
    st.integers(4, 200),
    st.integers(0, 200),
    st.sampled_from(TWO_TASKS),
)
@settings(deadline=None)
def test_codecs_of_two_tasks_bring_every_gradient_back_to_its_place(
    numels: list[list[int]], world_size: int, chunk: int, fusion: int, codec: str
) -> None:
    """Whole numbers whose mean these codecs can hold: exact, whichever way they are cut."""
    plan = plan_for(layout_of(numels), codec, chunk, fusion)
    generator = torch.Generator().manual_seed(1)
    before = [
        [
            torch.randint(-99, 99, (s.numel,), generator=generator).float()
            for s in plan.layout.buckets
        ]
        for _ in range(world_size)
    ]
    world = [
        rank_of(plan, [buffer.clone() for buffer in row], rank, world_size)
        for rank, row in enumerate(before)
    ]
    send(world)
    for simulated in world:
        for key, job in enumerate(simulated.jobs):
            assert torch.equal(job.buffer, mean([row[key] for row in before]))


@pytest.mark.parametrize("codec", CASTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("fusion", [0, 400])
def test_lossy_means_are_near_and_equal_on_all_ranks(
    codec: str, world_size: int, fusion: int
) -> None:
    layout = layout_of([[30, 7], [50], [3, 0, 2], [400]])
    world, before = begin(layout, world_size, codec, 512, fusion)
    assert {len(run.task.chunk.pieces) for run in world[0].runs} == ({1} if not fusion else {1, 3})
    send(world)
    ulp = torch.finfo(CASTS[codec]).eps
    for rank in world:
        for key, job in enumerate(rank.jobs):
            rows = [row[key] for row in before]
            bound = world_size * ulp * sum(row.abs() for row in rows) / world_size
            assert bool(((job.buffer - mean(rows)).abs() <= bound).all())
            assert torch.equal(job.buffer, world[0].jobs[key].buffer)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("codec", EXACT_HERE)
def test_fused_buckets_get_their_own_gradients_back(codec: str, halves: bool) -> None:
    layout = layout_of([[4], [5, 1], [6]])
    plan = plan_for(layout, codec, 1024, 1024, halves)
    whole = codecs.get(codec).whole_params  # then each parameter is a piece
    assert {len(task.chunk.pieces) for task in plan.tasks} == {4 if whole else 3}
    assert len({task.chunk for task in plan.tasks}) == 1
    assert {task.codec for task in plan.tasks} == {codec}
    world = constant_world(plan)
    send(world)
    for rank in world:
        assert [job.buffer.unique().tolist() for job in rank.jobs] == [[8.5], [16.5], [24.5]]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("codec", EXACT_HERE)
def test_a_fused_chunk_without_one_of_its_buckets(codec: str, halves: bool) -> None:
    layout = layout_of([[4], [5], [6]])
    plan = plan_for(layout, codec, 1024, 1024, halves)
    for absent in ([1], [0, 2]):
        world = constant_world(plan)
        for simulated in world:
            for run in simulated.runs:
                for bucket in absent:
                    del run.jobs[bucket]
        send(world)
        for rank, simulated in enumerate(world):
            for key, job in enumerate(simulated.jobs):
                value = 8.0 * (key + 1) + (rank if key in absent else 0.5)
                assert job.buffer.unique().tolist() == [value]


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("fusion", [0, 4096])
def test_large_gradients_on_eight_ranks_stay_finite(codec: str, dtype: str, fusion: int) -> None:
    """Their sum, 3.2e5, is more than fp16 holds; their mean is not."""
    layout = layout_of([[20], [30]], dtype)
    plan = plan_for(layout, codec, 8192, fusion)
    world = [
        rank_of(
            plan,
            [torch.full((s.numel,), 4e4, dtype=getattr(torch, dtype)) for s in layout.buckets],
            rank,
            8,
        )
        for rank in range(8)
    ]
    send(world)
    for rank in world:
        for job in rank.jobs:
            assert bool(job.buffer.isfinite().all())
            expected = torch.full_like(job.buffer, 4e4)
            torch.testing.assert_close(job.buffer, expected, rtol=8 * 2**-11, atol=0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "int64", "int32"])
@pytest.mark.parametrize("codec", [*EXACT_HERE, "evens"])
@pytest.mark.parametrize("fusion", [0, 4096])
def test_other_dtypes(dtype: str, codec: str, fusion: int) -> None:
    layout = layout_of([[20], [31]], dtype)
    world, before = begin(layout, 4, codec, 8192, fusion)
    send(world)
    supported = codecs.get(codec).supports(getattr(torch, dtype))
    codecs_used = {run.task.codec for run in world[0].runs}
    assert codecs_used == {codec if supported else "none"}
    if codec == "evens" and supported:
        return  # half of the gradients do not come
    for rank in world:
        for key, job in enumerate(rank.jobs):
            rows = [row[key] for row in before]
            assert job.buffer.dtype == getattr(torch, dtype)
            if dtype.startswith("int"):  # towards zero, and only once
                assert torch.equal(job.buffer, torch.div(sum(rows), 4, rounding_mode="trunc"))
            elif supported and codec != "none":
                torch.testing.assert_close(job.buffer, mean(rows), rtol=0.02, atol=0.02)
            else:
                torch.testing.assert_close(job.buffer, mean(rows))


def test_sparse_gradients() -> None:
    layout = Layout((BucketSpec((ParamSpec("table", 40),), "float32", sparse=True),))
    plan = plan_for(layout, "bf16", 64, 64)
    assert {(task.codec, task.op) for task in plan.tasks} == {("none", "all_reduce")}
    world, dense = [], []
    for rank in range(2):
        indices = torch.tensor([[rank, 5, 5]])  # one row of its own, one shared and twice
        sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 4), (10, 4), check_invariants=True)
        dense.append(sparse.to_dense())
        world.append(rank_of(plan, [sparse], rank, 2))
    send(world)
    for rank in world:
        (job,) = rank.jobs
        assert job.result.is_sparse
        torch.testing.assert_close(job.result.to_dense(), mean(dense))


def test_sparse_bytes_are_those_of_the_entries() -> None:
    """Three rows of four floats, and a number for each row, to every other rank."""
    layout = Layout((BucketSpec((ParamSpec("table", 40),), "float32", sparse=True),))
    indices = torch.tensor([[1, 5, 5]])
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 4), (10, 4), check_invariants=True)
    rank = rank_of(plan_for(layout, "none", 64, 64), [sparse], 0, 4)
    assert rank.packer.pack(rank.runs[0]).sent_bytes == 3 * (3 * 4 * 4 + 3 * 8)


@pytest.mark.parametrize("halves", [False, True])
def test_a_dense_chunk_with_codec_none_is_reduced_where_it_lies(halves: bool) -> None:
    world, _ = begin(layout_of([[100]]), 1, "none", 128, 0, halves)
    (rank,) = world
    buffer = rank.jobs[0].buffer
    for run in rank.runs:
        if run.after is None:
            wire = rank.packer.pack(run).wire
            assert wire.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("codec", [*EXACT_HERE, "evens"])
@pytest.mark.parametrize("halves", [False, True])
def test_used_buffers_do_not_leak_into_later_steps(codec: str, halves: bool) -> None:
    layout = layout_of([[6], [7], [200]])
    plan = plan_for(layout, codec, 256, 256, halves)
    packers: list[Any] = [None, None]
    for step in range(4):
        before = [buffers_of(layout, 10 * step + rank) for rank in range(2)]
        world = [
            rank_of(plan, [buffer.clone() for buffer in row], rank, 2, "0", packers[rank])
            for rank, row in enumerate(before)
        ]
        send(world)
        packers = [*world]
        for rank in world:
            for key, job in enumerate(rank.jobs):
                expected = mean([row[key] for row in before])
                if codec == "evens":
                    assert bool(((job.buffer == expected) | (job.buffer == 0)).all())
                    assert 0.3 < float((job.buffer == 0).float().mean()) < 0.7
                    continue
                near = {"none": 0.0, "fp16": 4e-3, "bf16": 3e-2, "coarse": 0.1, "twice": 1e-6}[
                    codec
                ]
                torch.testing.assert_close(job.buffer, expected, rtol=near, atol=near)


# ---------------------------------------------------------------- error feedback

NAMES = ("b0.0", "b0.1", "b1.0")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("codec", KEPT)
@pytest.mark.parametrize("fusion", [0, 4096])
def test_with_error_feedback_no_gradient_is_lost(codec: str, fusion: int, size: int) -> None:
    """What arrived over all steps, and what all ranks still keep, is the mean of the gradients."""
    layout = layout_of([[30, 20], [40]])
    given_, arrived = torch.zeros(90).double(), torch.zeros(90).double()
    world: list[Any] = [None] * size
    for step, chunk in enumerate([64, 80, 128, 4096, 64, 256]):  # another cut each step
        before = [buffers_of(layout, 10 * step + rank) for rank in range(size)]
        given_ += sum(torch.cat(row).double() for row in before) / size
        plan = plan_for(layout, codec, chunk, fusion)
        world = [
            rank_of(plan, row, rank, size, "1", world[rank]) for rank, row in enumerate(before)
        ]
        send(world)
        arrived += torch.cat([job.buffer for job in world[0].jobs]).double()
        assert all(
            torch.equal(job.buffer, other.buffer)
            for rank in world[1:]
            for job, other in zip(rank.jobs, world[0].jobs, strict=True)
        )
    errors = torch.zeros(90).double()
    for rank in world:
        kept = rank.memory.slots()["error"]
        assert set(kept) == set(NAMES)
        errors += torch.cat([kept[name] for name in NAMES]).double()
    assert errors.any()
    # The casts' sums on the wire are rounded once more for each rank behind the first two.
    near = 1e-5 if codec not in CASTS or size == 1 else 0.05
    torch.testing.assert_close(arrived + errors, given_, rtol=0, atol=near)
    assert not torch.allclose(arrived, given_, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", [*CASTS, "coarse", "evens"])
def test_errors_of_a_fused_chunk_without_one_of_its_buckets(codec: str) -> None:
    """They are kept under the names of the parameters that came, and of no other."""
    layout = layout_of([[4], [5], [6]])
    buffers = buffers_of(layout, 0)
    before = [buffer.clone() for buffer in buffers]
    rank = rank_of(plan_for(layout, codec, 1024, 1024), buffers, feedback="1")
    for run in rank.runs:
        del run.jobs[1]
    send([rank])
    errors = rank.memory.slots()["error"]
    assert set(errors) == {"b0.0", "b2.0"}
    for key in (0, 2):
        assert torch.equal(buffers[key] + errors[f"b{key}.0"], before[key])
    assert torch.equal(buffers[1], before[1])


@pytest.mark.parametrize("feedback", ["auto", "1"])
def test_error_feedback_is_not_asked_where_nothing_is_lost(feedback: str) -> None:
    layout = layout_of([[30], [20]])
    for halves in (False, True):
        plan = plan_for(layout, "none", 4096, 4096, halves)
        world = [rank_of(plan, buffers_of(layout, rank), rank, 2, feedback) for rank in range(2)]
        send(world)
        assert all(rank.memory.slots() == {} for rank in world)


@pytest.mark.parametrize(
    ("codec", "feedback", "kept"),
    [
        ("fp16", "auto", False),  # unbiased enough
        ("fp16", "1", True),
        ("fp16", "0", False),
        ("coarse", "auto", True),
        ("coarse", "1", True),
        ("coarse", "0", False),
        ("none", "auto", False),
    ],
)
def test_errors_are_kept_where_the_setting_or_the_codec_says(
    codec: str, feedback: str, kept: bool
) -> None:
    layout = layout_of([[30], [20]])
    rank = rank_of(plan_for(layout, codec, 4096, 0), buffers_of(layout, 0), feedback=feedback)
    send([rank])
    assert ("error" in rank.memory.slots()) == kept
    assert codecs.get(codec).keeps_errors(feedback) == kept


@pytest.mark.parametrize("codec", [*CASTS, "coarse"])
def test_errors_are_in_the_units_of_what_is_encoded(codec: str) -> None:
    """A share of the mean: two ranks lose the same bits as one rank with half the gradient."""
    layout = layout_of([[50]])
    grad = buffers_of(layout, 0)[0]
    errors = []
    for size, factor in ((2, 1.0), (1, 0.5)):
        plan = plan_for(layout, codec, 4096, 0)
        world = [rank_of(plan, [grad * factor], rank, size, "1") for rank in range(size)]
        send(world)
        # What the second rank owns, the first one has encoded for it as it was.
        errors.append(world[0].memory.slots()["error"]["b0.0"][25:])
    assert errors[0].any()
    assert torch.equal(*errors)


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("codec", [*codecs.names(), "coarse", "evens", "twice"])
def test_each_run_is_summed_as_its_codec_says(codec: str) -> None:
    """`collective` compares each task's with what the ranks ask for."""
    world, _ = begin(layout_of([[100]]), 3, codec, 4096, 0)
    send(world)
    assert tuple(run.task.op for run in world[0].runs) == codecs.get(codec).ops
    for rank in world[1:]:
        assert torch.equal(rank.jobs[0].buffer, world[0].jobs[0].buffer)


@pytest.mark.parametrize("codec", TWO_TASKS)
def test_gradients_are_written_when_the_last_task_is_done(codec: str) -> None:
    """Not sooner: the first task's result is no mean yet."""
    (rank,), (before,) = begin(layout_of([[50], [4]]), 1, codec, 4096, 4096)
    first, second = rank.runs
    transfer = rank.packer.pack(first)
    assert (first.rounds is not None, first.following) == (True, None)
    (result,) = collective(first.task, [transfer])
    rank.packer.unpack(first, result)
    assert first.following is not None
    assert all(torch.equal(job.buffer, b) for job, b in zip(rank.jobs, before, strict=True))
    first.done = True
    assert rank.packer.pack(second) is first.following
    (result,) = collective(second.task, [first.following])
    rank.packer.unpack(second, result)
    assert second.following is None
    for job, row in zip(rank.jobs, before, strict=True):
        torch.testing.assert_close(job.buffer, row, rtol=0, atol=0.04)


def test_the_seed_is_of_the_step_and_the_chunk_and_equal_on_all_ranks() -> None:
    """Whatever the buckets' numbers are; ranks differ only where the codec says so."""

    def seeds(step: int, rank: int, bucket: int, start: int = 0) -> tuple[int, int]:
        numels = [[3]] * bucket + [[50]]
        layout = layout_of(numels)
        layout = Layout((*layout.buckets[:-1], BucketSpec((ParamSpec("w", 50),), "float32")))
        chunk = plan_for(layout, "none", 80, 0).tasks[bucket + start].chunk
        spans = tuple(layout.spans(chunk))
        parcel = Parcel(
            chunk, spans, [torch.zeros(chunk.numel)], rank, 2, step, Memory(), True, Pool()
        )
        return parcel.seed(), parcel.seed(rank)

    assert seeds(3, 0, 1)[0] == seeds(3, 1, 4)[0]
    assert seeds(3, 0, 1)[1] != seeds(3, 1, 1)[1]
    assert len({seeds(3, 0, 1)[0], seeds(4, 0, 1)[0], seeds(3, 0, 1, start=1)[0]}) == 3
    assert all(0 <= seed < 2**32 for seed in seeds(3, 0, 1))
