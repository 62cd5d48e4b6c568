"""The packer: what the ranks send adds up to the mean, and comes back to the right places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched import codecs, exchange
from commsched.codecs.feedback import ErrorFeedback
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.packer import Packer
from commsched.policies import get as get_policy
from commsched.profile import Profile
from commsched.settings import MB, Settings

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Simulated:
    """One rank: its packer, and its buckets with the runs of one iteration over them."""

    packer: Packer
    jobs: list[Job]
    runs: list[Run]


def plan_for(layout: Layout, codec: str, chunk: int, fusion: int) -> object:
    chosen = Settings(codec=codec, chunk_mb=chunk / MB, fusion_mb=fusion / MB)
    return get_policy("fifo")(Profile.unmeasured(layout, 2), chosen)


def rank_of(packer: Packer, plan: object, buffers: Sequence[torch.Tensor]) -> Simulated:
    layout = plan.layout
    jobs = [
        Job(key, spec, buffer, Progress())
        for key, (spec, buffer) in enumerate(zip(layout.buckets, buffers, strict=True))
    ]
    runs = []
    for task in plan.tasks:
        members = {piece.bucket: jobs[piece.bucket] for piece in task.chunk.pieces}
        runs.append(Run(task, plan, set(), members))
    return Simulated(packer, jobs, runs)


def all_reduce(world: list[Simulated]) -> None:
    """Send every run of every rank, all at once; the sum arrives in the wire, as with a ring."""
    for rank in world:
        for run in rank.runs:
            assert rank.packer.pack(run) is run.wire
    for runs in zip(*(rank.runs for rank in world), strict=True):
        total = runs[0].wire.clone()
        for run in runs[1:]:
            total = total + run.wire
        for rank, run in zip(world, runs, strict=True):
            rank.packer.unpack(run, total if total.is_sparse else run.wire.copy_(total))


def layout_of(numels: Sequence[Sequence[int]], dtype: str = "float32") -> Layout:
    return Layout(
        tuple(
            BucketSpec(tuple(ParamSpec(f"b{i}.{j}", n) for j, n in enumerate(row)), dtype)
            for i, row in enumerate(numels)
        )
    )


def buffers_of(layout: Layout, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    buffers = []
    for spec in layout.buckets:
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            buffers.append(torch.randn(spec.numel, dtype=dtype, generator=generator))
        else:
            buffers.append(torch.randint(-50, 50, (spec.numel,), dtype=dtype, generator=generator))
    return buffers


def begin(
    layout: Layout, world_size: int, codec: str, chunk: int, fusion: int
) -> tuple[list[Simulated], list[list[torch.Tensor]]]:
    plan = plan_for(layout, codec, chunk, fusion)
    before = [buffers_of(layout, rank) for rank in range(world_size)]
    world = [
        rank_of(Packer(world_size, None), plan, [buffer.clone() for buffer in row])
        for row in before
    ]
    return world, before


def mean(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)


NUMELS = st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=1, max_size=5)


@given(NUMELS, st.sampled_from([1, 2, 4]), st.integers(4, 200), st.integers(0, 200))
@settings(deadline=None)
def test_the_mean_is_exact_on_powers_of_two(
    numels: list[list[int]], world_size: int, chunk: int, fusion: int
) -> None:
    world, before = begin(layout_of(numels), world_size, "none", chunk, fusion)
    all_reduce(world)
    for rank in world:
        for key, job in enumerate(rank.jobs):
            assert torch.equal(job.buffer, mean([row[key] for row in before]))
            assert job.result.data_ptr() == job.buffer.data_ptr()


@given(NUMELS, st.integers(4, 200), st.integers(0, 200))
@settings(deadline=None)
def test_the_mean_of_three(numels: list[list[int]], chunk: int, fusion: int) -> None:
    world, before = begin(layout_of(numels), 3, "none", chunk, fusion)
    all_reduce(world)
    for rank in world:
        for key, job in enumerate(rank.jobs):
            torch.testing.assert_close(job.buffer, mean([row[key] for row in before]))
            assert torch.equal(job.buffer, world[0].jobs[key].buffer)


@pytest.mark.parametrize("codec", CASTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("fusion", [0, 400])
def test_lossy_means_are_near_and_equal_on_all_ranks(
    codec: str, world_size: int, fusion: int
) -> None:
    layout = layout_of([[30, 7], [50], [3, 0, 2], [400]])
    world, before = begin(layout, world_size, codec, 512, fusion)
    assert {len(run.task.chunk.pieces) for run in world[0].runs} == ({1} if not fusion else {1, 3})
    all_reduce(world)
    ulp = torch.finfo(CASTS[codec]).eps
    for rank in world:
        for key, job in enumerate(rank.jobs):
            rows = [row[key] for row in before]
            bound = world_size * ulp * sum(row.abs() for row in rows) / world_size
            assert bool(((job.buffer - mean(rows)).abs() <= bound).all())
            assert torch.equal(job.buffer, world[0].jobs[key].buffer)


@pytest.mark.parametrize("codec", codecs.names())
def test_fused_buckets_get_their_own_gradients_back(codec: str) -> None:
    layout = layout_of([[4], [5, 1], [6]])
    plan = plan_for(layout, codec, 1024, 1024)
    assert [len(task.chunk.pieces) for task in plan.tasks] == [3]
    world = []
    for rank in range(2):
        buffers = [
            torch.full((s.numel,), 8.0 * (i + 1) + rank) for i, s in enumerate(layout.buckets)
        ]
        world.append(rank_of(Packer(2, None), plan, buffers))
    all_reduce(world)
    for rank in world:
        assert [job.buffer.unique().tolist() for job in rank.jobs] == [[8.5], [16.5], [24.5]]


@pytest.mark.parametrize("codec", codecs.names())
def test_a_fused_chunk_without_one_of_its_buckets(codec: str) -> None:
    layout = layout_of([[4], [5], [6]])
    plan = plan_for(layout, codec, 1024, 1024)
    for absent in ([1], [0, 2]):
        world = []
        for rank in range(2):
            buffers = [
                torch.full((s.numel,), 8.0 * (i + 1) + rank) for i, s in enumerate(layout.buckets)
            ]
            simulated = rank_of(Packer(2, None), plan, buffers)
            for bucket in absent:
                del simulated.runs[0].jobs[bucket]
            world.append(simulated)
        all_reduce(world)
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
            Packer(8, None),
            plan,
            [torch.full((s.numel,), 4e4, dtype=getattr(torch, dtype)) for s in layout.buckets],
        )
        for _ in range(8)
    ]
    all_reduce(world)
    for rank in world:
        for job in rank.jobs:
            assert bool(job.buffer.isfinite().all())
            expected = torch.full_like(job.buffer, 4e4)
            torch.testing.assert_close(job.buffer, expected, rtol=8 * 2**-11, atol=0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "complex64", "int64", "int32"])
@pytest.mark.parametrize("codec", codecs.names())
@pytest.mark.parametrize("fusion", [0, 4096])
def test_other_dtypes(dtype: str, codec: str, fusion: int) -> None:
    layout = layout_of([[20], [31]], dtype)
    world, before = begin(layout, 4, codec, 8192, fusion)
    all_reduce(world)
    for rank in world:
        for key, job in enumerate(rank.jobs):
            rows = [row[key] for row in before]
            assert job.buffer.dtype == getattr(torch, dtype)
            if dtype.startswith("int"):  # towards zero, and only once
                assert torch.equal(job.buffer, torch.div(sum(rows), 4, rounding_mode="trunc"))
            elif dtype == "float64" and codec != "none":
                torch.testing.assert_close(job.buffer, mean(rows), rtol=0.02, atol=0.02)
            else:
                torch.testing.assert_close(job.buffer, mean(rows))


def test_sparse_gradients() -> None:
    layout = Layout((BucketSpec((ParamSpec("table", 40),), "float32", sparse=True),))
    plan = plan_for(layout, "bf16", 64, 64)
    world, dense = [], []
    for rank in range(2):
        indices = torch.tensor([[rank, 5, 5]])  # one row of its own, one shared and twice
        sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 4), (10, 4), check_invariants=True)
        dense.append(sparse.to_dense())
        world.append(rank_of(Packer(2, None), plan, [sparse]))
    all_reduce(world)
    for rank in world:
        (job,) = rank.jobs
        assert job.result.is_sparse
        torch.testing.assert_close(job.result.to_dense(), mean(dense))
        assert rank.packer.exchange_of(rank.runs[0]) is exchange.get("sparse_all_reduce")


def test_a_dense_chunk_with_codec_none_is_reduced_where_it_lies() -> None:
    world, _ = begin(layout_of([[100]]), 1, "none", 128, 0)
    (rank,) = world
    for run in rank.runs:
        wire = rank.packer.pack(run)
        assert wire.untyped_storage().data_ptr() == rank.jobs[0].buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("codec", codecs.names())
def test_used_buffers_do_not_leak_into_later_steps(codec: str) -> None:
    layout = layout_of([[6], [7], [200]])
    plan = plan_for(layout, codec, 256, 256)
    packers = [Packer(2, None) for _ in range(2)]
    for step in range(4):
        before = [buffers_of(layout, 10 * step + rank) for rank in range(2)]
        world = [
            rank_of(packer, plan, [buffer.clone() for buffer in row])
            for packer, row in zip(packers, before, strict=True)
        ]
        all_reduce(world)
        for rank in world:
            for key, job in enumerate(rank.jobs):
                expected = mean([row[key] for row in before])
                near = {"none": 0.0, "fp16": 4e-3, "bf16": 3e-2}.get(codec, 1.0)
                torch.testing.assert_close(job.buffer, expected, rtol=near, atol=near)


@pytest.mark.parametrize("codec", CASTS)
@pytest.mark.parametrize("fusion", [0, 4096])
def test_with_error_feedback_no_gradient_is_lost(codec: str, fusion: int) -> None:
    """What arrived over all steps, and what is still kept, is the sum of the gradients."""
    layout = layout_of([[30, 20], [40]])
    feedback = ErrorFeedback()
    packer = Packer(1, feedback)
    given_, arrived = torch.zeros(90).double(), torch.zeros(90).double()
    for step, chunk in enumerate([64, 80, 128, 4096, 64, 256]):  # another cut each step
        buffers = buffers_of(layout, step)
        given_ += torch.cat(buffers).double()
        all_reduce([rank_of(packer, plan_for(layout, codec, chunk, fusion), buffers)])
        arrived += torch.cat(buffers).double()
    names = [param.name for spec in layout.buckets for param in spec.params]
    errors = torch.cat([feedback.errors[name] for name in names]).double()
    assert errors.any()
    torch.testing.assert_close(arrived + errors, given_, rtol=0, atol=1e-5)
    assert not torch.allclose(arrived, given_, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", CASTS)
def test_errors_of_a_fused_chunk_without_one_of_its_buckets(codec: str) -> None:
    """They are stored under the names of the parameters that came, and of no other."""
    layout = layout_of([[4], [5], [6]])
    feedback = ErrorFeedback()
    buffers = buffers_of(layout, 0)
    before = [buffer.clone() for buffer in buffers]
    rank = rank_of(Packer(1, feedback), plan_for(layout, codec, 1024, 1024), buffers)
    del rank.runs[0].jobs[1]
    all_reduce([rank])
    assert set(feedback.errors) == {"b0.0", "b2.0"}
    for key in (0, 2):
        assert torch.equal(buffers[key] + feedback.errors[f"b{key}.0"], before[key])
    assert torch.equal(buffers[1], before[1])


def test_error_feedback_is_not_asked_where_nothing_is_lost() -> None:
    feedback = ErrorFeedback()
    layout = layout_of([[30], [20]])
    plan = plan_for(layout, "none", 4096, 4096)
    all_reduce([rank_of(Packer(1, feedback), plan, buffers_of(layout, 0))])
    assert feedback.errors == {}


@pytest.mark.parametrize("codec", CASTS)
def test_errors_are_in_the_units_of_what_is_encoded(codec: str) -> None:
    """A share of the mean: two ranks lose the same bits as one rank with half the gradient."""
    layout = layout_of([[50]])
    grad = buffers_of(layout, 0)[0]
    errors = []
    for world_size, factor in ((2, 1.0), (1, 0.5)):
        feedback = ErrorFeedback()
        plan = plan_for(layout, codec, 4096, 0)
        rank = rank_of(Packer(world_size, feedback), plan, [grad * factor])
        rank.packer.pack(rank.runs[0])
        errors.append(feedback.errors["b0.0"])
    assert errors[0].any()
    assert torch.equal(*errors)


def test_each_run_is_summed_as_its_codec_says() -> None:
    for name in codecs.names():
        world, _ = begin(layout_of([[100]]), 1, name, 4096, 0)
        run = world[0].runs[0]
        assert world[0].packer.exchange_of(run) is exchange.get(codecs.get(name).exchange)
