"""Codecs against NumPy bit for bit; error feedback loses nothing; the packer gives the mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched import codecs, exchange
from commsched.codecs import Codec, WireSpec
from commsched.codecs.feedback import ErrorFeedback
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Layout, ParamSpec, cut
from commsched.packer import Packer
from commsched.policies import get as get_policy
from commsched.settings import MB, Settings

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = {name: torch.finfo(dtype).max for name, dtype in CASTS.items()}
FLOATS32 = st.floats(width=32) | st.sampled_from(
    [
        0.0,
        -0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        65504.0,
        65519.0,
        65520.0,
        1e-45,
        -1e-40,
        2.0**-24,
        2.0**-25,
        2.0**-14,
        1.00390625,  # halfway between two bf16, to even: down
        1.01171875,  # and up
        float(np.finfo(np.float32).max),
    ]
)
SHAPES = st.integers(1, 3) | st.integers(1, 130)  # with and without a vectorised part
arrays32 = hnp.arrays(np.float32, SHAPES, elements=FLOATS32)


def finite32(limit: float) -> st.SearchStrategy[np.ndarray]:
    largest = float(np.float32(limit))
    return hnp.arrays(np.float32, SHAPES, elements=st.floats(-largest, largest, width=32))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons that tell -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(torch.uint8)


def encoded(codec: Codec, grad: torch.Tensor) -> torch.Tensor:
    wire = codec.wire(grad.numel(), grad.dtype).empty()
    codec.encode(grad, wire)
    return wire


def decoded(codec: Codec, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(wire.numel(), dtype=dtype)
    codec.decode(wire, out)
    return out


def bf16_oracle(x: np.ndarray) -> np.ndarray:
    """The upper 16 bits of each float32, rounded to nearest even; only NaN needs care."""
    word = x.view(np.uint32).astype(np.uint64)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


# ---------------------------------------------------------------- the registry


def test_the_registry_knows_its_codecs() -> None:
    assert codecs.names()[0] == "none"
    assert {"none", "fp16", "bf16"} <= set(codecs.names())
    assert len(set(codecs.names())) == len(codecs.names())
    for name in codecs.names():
        assert codecs.get(name).name == name
        assert callable(exchange.get(codecs.get(name).exchange))


def test_a_name_is_given_once() -> None:
    class Another(type(codecs.get("none"))):
        name = "fp16"

    before = {name: codecs.get(name) for name in codecs.names()}
    with pytest.raises(ValueError, match="fp16"):
        codecs.register(Another())
    assert {name: codecs.get(name) for name in codecs.names()} == before


def test_casts_are_lossy_and_none_is_not() -> None:
    assert not codecs.get("none").lossy
    assert all(codecs.get(name).lossy for name in CASTS)


@pytest.mark.parametrize("name", [name for name in codecs.names() if not codecs.get(name).lossy])
@given(x=arrays32)
@settings(deadline=None)
def test_codecs_called_lossless_are(name: str, x: np.ndarray) -> None:
    grad = torch.from_numpy(x)
    wire = encoded(codecs.get(name), grad)
    assert torch.equal(bits(decoded(codecs.get(name), wire, torch.float32)), bits(grad))


# ---------------------------------------------------------------- any codec


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 7, 64, 1000])
def test_the_wire_is_as_declared_and_the_input_stays(
    name: str, dtype: torch.dtype, numel: int
) -> None:
    codec = codecs.get(name)
    assert codec.supports(dtype)
    grad = torch.randn(numel, dtype=dtype)
    before = grad.clone()
    spec = codec.wire(numel, dtype)
    wire = spec.empty()
    assert (wire.dtype, wire.shape, wire.nbytes) == (spec.dtype, (spec.numel,), spec.nbytes)
    assert wire.is_contiguous()
    codec.encode(grad, wire)
    assert torch.equal(bits(grad), bits(before))
    assert (wire.dtype, wire.nbytes) == (spec.dtype, spec.nbytes)
    sent = wire.clone()
    out = decoded(codec, wire, dtype)
    assert torch.equal(bits(wire), bits(sent))
    assert out.dtype == dtype
    assert torch.equal(decoded(codec, encoded(codec, grad), dtype), out)  # no hidden state


@pytest.mark.parametrize("name", CASTS)
def test_casts_travel_as_two_bytes(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        assert codecs.get(name).wire(100, dtype) == WireSpec(CASTS[name], 100)
        assert codecs.get(name).wire(100, dtype).nbytes == 200


@given(arrays32)
@settings(deadline=None)
def test_fp16_is_numpys(x: np.ndarray) -> None:
    wire = encoded(codecs.get("fp16"), torch.from_numpy(x)).numpy()
    with np.errstate(over="ignore", under="ignore"):
        oracle = x.astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(np.isnan(wire), nan)
    assert np.array_equal(wire.view(np.uint16)[~nan], oracle.view(np.uint16)[~nan])
    assert np.array_equal(np.isinf(wire), np.abs(x) >= 65520)  # and so Inf stays Inf


@given(arrays32)
@settings(deadline=None)
def test_bf16_is_the_upper_half_rounded_to_even(x: np.ndarray) -> None:
    wire = encoded(codecs.get("bf16"), torch.from_numpy(x))
    nan = np.isnan(x)
    assert np.array_equal(wire.isnan().numpy(), nan)
    assert np.array_equal(wire.view(torch.uint16).numpy()[~nan], bf16_oracle(x)[~nan])
    assert bool(wire[torch.from_numpy(np.isinf(x))].isinf().all())


@pytest.mark.parametrize("name", CASTS)
@given(x=arrays32)
@settings(deadline=None)
def test_decoding_a_cast_is_exact(name: str, x: np.ndarray) -> None:
    codec = codecs.get(name)
    wire = encoded(codec, torch.from_numpy(x))
    out = decoded(codec, wire, torch.float32)
    if name == "fp16":
        oracle = wire.numpy().astype(np.float32)
    else:
        oracle = (wire.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    nan = np.isnan(x)
    assert np.array_equal(out.isnan().numpy(), nan)
    assert np.array_equal(out.numpy().view(np.uint32)[~nan], oracle.view(np.uint32)[~nan])
    again = encoded(codec, out)
    assert torch.equal(bits(again[torch.from_numpy(~nan)]), bits(wire[torch.from_numpy(~nan)]))


@pytest.mark.parametrize("name", CASTS)
def test_casting_a_view_that_begins_anywhere(name: str) -> None:
    """Chunks are views into buckets: vectorised loops must not assume an aligned beginning."""
    buffer = torch.randn(200)
    for start in range(9):
        view = buffer[start : start + 131]
        assert torch.equal(
            bits(encoded(codecs.get(name), view)), bits(encoded(codecs.get(name), view.clone()))
        )


# ---------------------------------------------------------------- which dtypes


def chunk_of(dtype: str, *, sparse: bool = False) -> codecs.base.Chunk:
    layout = Layout((BucketSpec((ParamSpec("p", 9),), dtype, sparse),))
    return cut(layout, 10**6, 0)[0]


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", ["int64", "int8", "float16", "bfloat16", "complex64"])
def test_what_gains_nothing_travels_as_it_is(name: str, dtype: str) -> None:
    assert not codecs.get(name).supports(getattr(torch, dtype))
    assert codecs.for_dtype(name, chunk_of(dtype)) == "none"


@pytest.mark.parametrize("name", codecs.names())
def test_wide_floats_are_encoded_but_not_when_sparse(name: str) -> None:
    for dtype in ("float32", "float64"):
        assert codecs.for_dtype(name, chunk_of(dtype)) == name
        assert codecs.for_dtype(name, chunk_of(dtype, sparse=True)) == "none"


@pytest.mark.parametrize("dtype", ["int64", "float16", "complex64", "float32"])
def test_none_takes_everything(dtype: str) -> None:
    assert codecs.get("none").supports(getattr(torch, dtype))
    assert codecs.for_dtype("none", chunk_of(dtype)) == "none"


# ---------------------------------------------------------------- error feedback


def whole(numel: int, name: str = "w") -> tuple[Layout, list]:
    layout = Layout((BucketSpec((ParamSpec(name, numel),), "float32"),))
    (chunk,) = cut(layout, 4 * numel, 0)
    return layout, list(layout.spans(chunk))


def kept(name: str, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded, error) of one encoding of the whole parameter ``w``."""
    codec, feedback = codecs.get(name), ErrorFeedback()
    _, spans = whole(grad.numel())
    wire = encoded(codec, grad)
    feedback.keep(spans, grad, codec, wire)
    assert list(feedback.errors) == ["w"]
    return decoded(codec, wire, grad.dtype), feedback.errors["w"]


@pytest.mark.parametrize("name", CASTS)
@given(data=st.data())
@settings(deadline=None)
def test_what_was_sent_and_what_was_kept_are_the_gradient(name: str, data: st.DataObject) -> None:
    """Bit for bit: the difference of a float32 and its rounding is a float32."""
    x = data.draw(finite32(LARGEST[name]))
    grad = torch.from_numpy(x.copy())
    sent, error = kept(name, grad)
    assert np.array_equal(grad.numpy(), x)  # left as it was
    assert torch.equal(sent + error, grad)
    assert torch.equal(sent.double() + error.double(), grad.double())


@pytest.mark.parametrize("name", CASTS)
@given(x=arrays32)
@example(x=np.array([np.nan, np.inf, -np.inf, 1.001], np.float32))
@settings(deadline=None)
def test_errors_are_finite_whatever_the_gradient(name: str, x: np.ndarray) -> None:
    grad = torch.from_numpy(x)
    sent, error = kept(name, grad)
    assert bool(error.isfinite().all())
    assert not error[~grad.isfinite()].any()
    assert not error[~sent.isfinite()].any()


@pytest.mark.parametrize("name", CASTS)
def test_errors_are_added_to_the_next_gradient(name: str) -> None:
    codec, feedback = codecs.get(name), ErrorFeedback()
    _, spans = whole(100)
    grad = torch.randn(100)
    feedback.add(spans, grad)  # nothing stored yet
    first = grad.clone()
    feedback.keep(spans, grad, codec, encoded(codec, grad))
    lost = first - decoded(codec, encoded(codec, first), torch.float32)
    assert lost.any()
    following = torch.zeros(100)
    feedback.add(spans, following)
    assert torch.equal(following, lost)


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=5),
    st.integers(4, 600),
    st.integers(4, 600),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_errors_survive_another_cut(
    numels: list[int], first_bytes: int, second_bytes: int, random: object
) -> None:
    """Stored under one chunk size, added under another, with the parameters in other buckets."""
    codec, feedback = codecs.get("bf16"), ErrorFeedback()
    params = tuple(ParamSpec(f"p{at}", numel) for at, numel in enumerate(numels))
    generator = torch.Generator().manual_seed(0)
    gradients = {p.name: torch.randn(p.numel, generator=generator) for p in params}

    def chunks(layout: Layout, nbytes: int, fusion: int) -> Iterator[tuple[list, torch.Tensor]]:
        for chunk in cut(layout, nbytes, fusion):
            flat = [torch.cat([gradients[p.name] for p in b.params]) for b in layout.buckets]
            pieces = [flat[p.bucket][p.start : p.start + p.numel] for p in chunk.pieces]
            yield list(layout.spans(chunk)), torch.cat(pieces)

    one_bucket = Layout((BucketSpec(params, "float32"),))
    for spans, grad in chunks(one_bucket, first_bytes, 0):
        feedback.keep(spans, grad, codec, encoded(codec, grad))
    errors = {name: error.clone() for name, error in feedback.errors.items()}

    shuffled = list(params)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    many_buckets = Layout(tuple(BucketSpec((param,), "float32") for param in shuffled))
    gradients = {name: torch.zeros_like(grad) for name, grad in gradients.items()}
    added: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in gradients}
    for spans, grad in chunks(many_buckets, second_bytes, 200):
        feedback.add(spans, grad)
        for span in spans:
            row = (span.param_start, grad[span.start : span.start + span.numel])
            added[span.param].append(row)
    for name, rows in added.items():
        parts = [part for _, part in sorted(rows, key=lambda row: row[0])]
        assert torch.equal(torch.cat([torch.zeros(0), *parts]), errors.get(name, torch.zeros(0)))


@pytest.mark.parametrize("other", [torch.zeros(12), torch.zeros(10, dtype=torch.float64)])
def test_errors_of_a_parameter_that_changed_are_forgotten(other: torch.Tensor) -> None:
    codec, feedback = codecs.get("bf16"), ErrorFeedback()
    _, spans = whole(10)
    grad = torch.randn(10)
    feedback.keep(spans, grad, codec, encoded(codec, grad))
    assert feedback.errors["w"].any()
    following = torch.zeros_like(other)
    feedback.add(whole(other.numel())[1], following)
    assert not following.any()


# ---------------------------------------------------------------- packer


@dataclass
class Simulated:
    """One rank: its packer, and its buckets with the runs of one iteration over them."""

    packer: Packer
    jobs: list[Job]
    runs: list[Run]


def plan_for(layout: Layout, codec: str, chunk: int, fusion: int) -> object:
    chosen = Settings(codec=codec, chunk_mb=chunk / MB, fusion_mb=fusion / MB)
    return get_policy("fifo")(layout, chosen)


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
            assert job.result is job.buffer


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
