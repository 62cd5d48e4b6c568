"""powersgd and acpsgd: ranks in lock step, in this process, against plain NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.codecs.factors import drawn, orthonormal, subtract
from commsched.codecs.lowrank import AcpSgd, PowerSgd
from commsched.cutting import Kind, cut
from commsched.exchange import Pool, sent_share
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.memory import Memory
from commsched.parcel import Parcel
from tests.simulated_group import exchanged

CODECS = (PowerSgd, AcpSgd)
SHAPES = ((24, 30), (7,), (), (16, 3, 5, 5), (40, 20), (64, 2))  # the last gains too little
RANKS = 3

Shapes = Sequence[tuple[int, ...]]
LowRank = PowerSgd | AcpSgd


class World:
    """Ranks that average the gradients of one bucket, cut into chunks, step by step."""

    def __init__(
        self,
        codec: LowRank,
        shapes: Shapes = SHAPES,
        chunk_bytes: int = 5000,
        feedback: bool = True,
        size: int = RANKS,
        step: int = 0,
        dtype: str = "float32",
    ) -> None:
        self.codec, self.shapes, self.feedback, self.step = codec, shapes, feedback, step
        names = [f"layer{index}" for index in range(len(shapes))]
        specs = [ParamSpec(n, torch.Size(s).numel(), s) for n, s in zip(names, shapes, strict=True)]
        self.names = names
        self.layout = Layout((BucketSpec(tuple(specs), dtype),))
        kind = Kind(str(codec), whole_params=True)
        self.chunks = cut(self.layout, chunk_bytes, 0, lambda *_: kind)
        self.memories = [Memory() for _ in range(size)]
        self.pools = [Pool() for _ in range(size)]
        self.wires: list[list[int]] = []  # of the last step: for each chunk, numbers in each round

    def average(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's bucket after one step. All chunks are under way at once."""
        buckets = [grad.clone() for grad in grads]
        rounds = [[self._rounds(rank, b, c) for rank, b in enumerate(buckets)] for c in self.chunks]
        transfers = [[next(one) for one in ranks] for ranks in rounds]
        self.wires = [[] for _ in self.chunks]
        for number in range(len(self.codec.ops)):
            for index in reversed(range(len(self.chunks))):
                self.wires[index].append(transfers[index][0].wire.numel())
                results = exchanged(transfers[index], "all_reduce")
                pairs = zip(rounds[index], results, strict=True)
                transfers[index] = [self._resumed(*pair, number) for pair in pairs]
        self.step += 1
        return buckets

    def _rounds(self, rank: int, bucket: torch.Tensor, chunk: Chunk) -> Any:
        views = [bucket[piece.start : piece.start + piece.numel] for piece in chunk.pieces]
        spans = tuple(self.layout.spans(chunk))
        memory, pool, size = self.memories[rank], self.pools[rank], len(self.memories)
        return self.codec.rounds(
            Parcel(chunk, spans, views, rank, size, self.step, memory, self.feedback, pool)
        )

    def _resumed(self, rounds: Any, result: torch.Tensor, number: int) -> Any:
        if number + 1 < len(self.codec.ops):
            return rounds.send(result)
        with pytest.raises(StopIteration):
            rounds.send(result)
        return None

    def errors(self, rank: int) -> torch.Tensor:
        """As one bucket."""
        slots = self.memories[rank].slots()["error"]
        return torch.cat([slots[name] for name in self.names])

    def matrix(self, bucket: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's part, with its columns flattened."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        part = bucket.split(sizes)[index]
        return part.view(self.shapes[index][0], -1) if len(self.shapes[index]) > 1 else part


def noise(world: World, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numel = world.layout.buckets[0].numel
    return [torch.randn(numel, generator=generator) for _ in world.memories]


def mean(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).double().mean(0)


def same_bytes(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.numpy().tobytes() for tensor in tensors}) == 1


# ---------------------------------------------------------------- what every rank ends up with


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rank", [1, 4, 9])
@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 20])
def test_nothing_is_lost_and_ranks_agree(codec: Any, rank: int, chunk_bytes: int) -> None:
    world = World(codec(rank=rank, min_rate=0.5), chunk_bytes=chunk_bytes)
    sent = got = torch.zeros(world.layout.buckets[0].numel, dtype=torch.float64)
    for step in range(5):
        grads = noise(world, step)
        results = world.average(grads)
        assert same_bytes(results)
        sent, got = sent + mean(grads), got + results[0]
        errors = sum(world.errors(rank).double() for rank in range(RANKS))
        torch.testing.assert_close(got + errors, sent, rtol=0, atol=2e-5)
    assert len(world.chunks) > 1 or chunk_bytes == 1 << 20
    assert any(errors != 0)


@pytest.mark.parametrize("codec", CODECS)
def test_factors_agree_between_ranks(codec: Any) -> None:
    world = World(codec())
    for step in range(3):
        world.average(noise(world, step))
    for name in (f"layer{index}" for index in (0, 3, 4)):
        for key in world.memories[0].factors[name]:
            assert same_bytes([memory.factors[name][key] for memory in world.memories])
    kept = {name for name, factors in world.memories[0].factors.items() if factors}
    assert kept == {"layer0", "layer3", "layer4"}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("feedback", [True, False])
def test_what_is_not_factored_is_exact(codec: Any, feedback: bool) -> None:
    world = World(codec(), feedback=feedback)
    for step in range(3):
        grads = noise(world, step)
        result = world.average(grads)[0]
        share = torch.tensor(1.0 / RANKS)
        exact = sum(grad * share for grad in grads)
        for index in (1, 2, 5):
            assert torch.equal(world.matrix(result, index), world.matrix(exact, index))
            if feedback:
                assert not world.matrix(world.errors(0), index).any()


@pytest.mark.parametrize("codec", CODECS)
def test_without_feedback_nothing_is_kept_of_gradients(codec: Any) -> None:
    world = World(codec(), feedback=False)
    world.average(noise(world))
    assert not world.memories[0].slots()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shapes", [((3,), ()), ((24, 30),), ((1, 1), (1, 50), (50, 1))])
def test_chunks_of_one_kind_only(codec: Any, shapes: Shapes) -> None:
    world = World(codec(), shapes, 1 << 20)
    grads = noise(world)
    results = world.average(grads)
    assert same_bytes(results)
    if shapes != ((24, 30),):
        torch.testing.assert_close(results[0].double(), mean(grads))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_floats_travel_as_float32(codec: Any, dtype: str) -> None:
    kind = getattr(torch, dtype)
    world, plain = World(codec(), dtype=dtype), World(codec())
    for step in range(2):
        grads = [grad.to(kind) for grad in noise(world, step)]
        results = world.average(grads)
        expected = plain.average([grad.float() for grad in grads])[0]
        assert same_bytes([result.view(torch.uint8) for result in results])
        torch.testing.assert_close(results[0], expected.to(kind), rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(world.errors(0), plain.errors(0), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- how good it is


def test_powersgd_recovers_low_rank_gradients_at_once() -> None:
    world = World(PowerSgd(rank=4), ((30, 50),))
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(30, 4, generator=generator)
    grads = [(left @ torch.randn(4, 50, generator=generator)).flatten() for _ in range(RANKS)]
    torch.testing.assert_close(world.average(grads)[0].double(), mean(grads), rtol=0, atol=2e-5)
    assert all(world.errors(rank).abs().max() < 2e-5 for rank in range(RANKS))


@pytest.mark.parametrize("first", [0, 1])
def test_acpsgd_recovers_low_rank_gradients_on_the_second_step(first: int) -> None:
    world = World(AcpSgd(rank=4), ((30, 50),), step=first, feedback=False)
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(4, n, generator=generator) for n in (30, 50))
    grads = [(left.t() @ (right * (rank + 1))).flatten() for rank in range(RANKS)]
    world.average(grads)
    torch.testing.assert_close(world.average(grads)[0].double(), mean(grads), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_warm_start_finds_the_main_directions(codec: Any) -> None:
    """The misfit comes down to what the best approximation of that rank leaves."""
    world = World(codec(rank=3), ((40, 60),), feedback=False)
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(n, 40, generator=generator))[0] for n in (40, 60))
    sizes = 0.8 ** torch.arange(40.0)
    grads = [((left * sizes) @ right.t()).flatten()] * RANKS
    misfits = [float((world.average(grads)[0] - grads[0]).norm()) for _ in range(30)]
    best = float(sizes[3:].norm())
    assert misfits[0] > 1.2 * best
    assert misfits[-1] < 1.01 * best


@pytest.mark.parametrize("codec", CODECS)
def test_feedback_brings_the_sum_of_averages_to_the_true_one(codec: Any) -> None:
    """Constant gradients: what is owed stays bounded, so it vanishes among the steps."""
    world = World(codec(rank=2), ((20, 30),))
    grads = noise(world)
    total = sum(world.average(grads)[0].double() for _ in range(120))
    assert (total / 120 - mean(grads)).norm() < 0.25 * mean(grads).norm()


def numpy_basis(factor: np.ndarray) -> np.ndarray:
    return np.linalg.qr(factor)[0]


@pytest.mark.parametrize("codec", CODECS)
def test_equals_plain_numpy(codec: Any) -> None:
    """The papers' formulas, in double precision, with feedback and warm start, on three ranks."""
    world = World(codec(rank=3), ((24, 30),))
    q = drawn("0:layer0:q", 3, 30).double().numpy().T
    p = np.zeros((24, 3))
    errors = [np.zeros((24, 30)) for _ in range(RANKS)]
    for step in range(6):
        grads = noise(world, step)
        given_ = [g.double().numpy().reshape(24, 30) / RANKS for g in grads]
        matrices = [grad + error for grad, error in zip(given_, errors, strict=True)]
        if codec is PowerSgd:
            p = numpy_basis(sum(m @ numpy_basis(q) for m in matrices))
            qs = [m.T @ p for m in matrices]
            q, own = sum(qs), [p @ one.T for one in qs]
            average = p @ q.T
        elif step % 2 == 0:
            basis = numpy_basis(q)
            ps = [m @ basis for m in matrices]
            p, own = sum(ps), [one @ basis.T for one in ps]
            average = p @ basis.T
        else:
            basis = numpy_basis(p)
            qs = [m.T @ basis for m in matrices]
            q, own = sum(qs), [basis @ one.T for one in qs]
            average = basis @ q.T
        errors = [m - a for m, a in zip(matrices, own, strict=True)]
        result = world.average(grads)[0].view(24, 30)
        np.testing.assert_allclose(result.numpy(), average, rtol=0, atol=5e-5)
        np.testing.assert_allclose(world.errors(1).numpy(), errors[1].ravel(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1, 7, 13 * 17, 30 * 40, 64 * 64])
def test_equals_its_oracle(codec: Any, numel: int) -> None:
    one = codec(rank=2, seed=5)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).numpy()
    rows = max(r for r in range(1, 65) if numel % r == 0 and r * r <= numel)
    world = World(one, ((rows, numel // rows),), size=1)
    world.names[:] = ["0"]
    world.layout = Layout((BucketSpec((ParamSpec("0", numel, ()),), "float32"),))
    result = world.average([torch.from_numpy(grad)])[0]
    wire = one.oracle.encode(one, grad, 0)
    decoded = one.oracle.decode(one, wire, numel, 0)
    np.testing.assert_allclose(result.numpy(), decoded, rtol=0, atol=2e-5)
    assert wire.nbytes == 4 * sum(world.wires[0])


# ---------------------------------------------------------------- sizes on the wire


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_wires_are_as_large_as_declared(codec: Any, rank: int) -> None:
    world = World(codec(rank=rank))
    for step in range(2):
        world.average(noise(world))
        for chunk, sent in zip(world.chunks, world.wires, strict=True):
            assert sent == [codec(rank=rank).wire(chunk, r, step).numel for r in range(len(sent))]


def test_sizes() -> None:
    chunk = Chunk((Piece(0, 0, 2000, 40), Piece(0, 2000, 9), Piece(0, 2009, 16, 4)), "float32")
    power, acp = PowerSgd(rank=2), AcpSgd(rank=2)
    assert [power.wire(chunk, r).numel for r in (0, 1)] == [2 * 40 + 9 + 16, 2 * 50]
    assert [acp.wire(chunk, 0, s).numel for s in (4, 5, None)] == [80 + 25, 100 + 25, 100 + 25]
    rest = Chunk((Piece(0, 0, 9),), "float32")
    assert [power.wire(rest, r).numel for r in (0, 1)] == [9, 0]
    assert sent_share("all_reduce", 2) * acp.wire(chunk).nbytes < chunk.nbytes


@settings(deadline=None)
@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 12), st.floats(0.1, 4.0))
def test_a_matrix_is_factored_where_that_saves_enough(
    rows: int, cols: int, rank: int, min_rate: float
) -> None:
    piece = Piece(0, 0, rows * cols, rows)
    used = min(rank, rows, cols)
    saves = rows * cols > min_rate * used * (rows + cols)
    for codec in CODECS:
        one = codec(rank=rank, min_rate=min_rate)
        assert one.rank_of(piece) == (used if saves else 0)
        assert one.rank_of(Piece(0, 0, rows * cols)) == 0


@pytest.mark.parametrize("codec", CODECS)
def test_rank_larger_than_the_matrix_is_exact(codec: Any) -> None:
    world = World(codec(rank=9, min_rate=0.01), ((3, 20), (20, 2)), feedback=False)
    grads = noise(world)
    for _ in range(2):  # acpsgd: with one of its sides whole on each
        results = [world.average(grads)[0] for _ in range(2)]
    misfits = [(result - mean(grads)).abs().max() for result in results]
    assert min(misfits) < 1e-5
    assert codec is AcpSgd or max(misfits) < 1e-5


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [{"rank": 0}, {"min_rate": 0.0}, {"min_rate": float("nan")}])
def test_options_are_checked(codec: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.* is not allowed"):
        codec(**options)


# ---------------------------------------------------------------- what lasts


@pytest.mark.parametrize("codec", CODECS)
def test_a_resumed_run_goes_on_with_the_same_bytes(codec: Any) -> None:
    one, other = World(codec()), World(codec(), step=3, chunk_bytes=1 << 20)
    for step in range(3):
        one.average(noise(one, step))
    for mine, theirs in zip(one.memories, other.memories, strict=True):
        theirs.set_slots(mine.slots())
        for param, factors in mine.factors.items():
            theirs.factors[param].update({key: f.clone() for key, f in factors.items()})
    for step in range(3, 6):
        grads = noise(one, step)
        torch.testing.assert_close(
            one.average(grads)[0], other.average(grads)[0], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("codec", CODECS)
def test_factors_of_another_rank_are_drawn_again(codec: Any) -> None:
    world = World(codec(rank=2))
    for step in range(2):
        world.average(noise(world, step))
    world.codec = codec(rank=4)
    assert same_bytes(world.average(noise(world, 2)))
    key = f"{codec.name}.{'q' if codec is PowerSgd else 'p'}"
    assert world.memories[0].factors["layer0"][key].shape[0] == 4


@pytest.mark.parametrize("codec", CODECS)
def test_kept_factors_are_not_written_to(codec: Any) -> None:
    """A checkpoint may hold them."""
    world = World(codec())
    for step in range(2):
        world.average(noise(world, step))
    held = dict(world.memories[0].factors["layer0"])
    before = {key: factor.clone() for key, factor in held.items()}
    for step in range(2, 4):
        world.average(noise(world, step))
    for key, factor in held.items():
        assert torch.equal(factor, before[key])
        assert not torch.equal(factor, world.memories[0].factors["layer0"][key])


def test_the_first_basis_depends_on_name_and_seed_only() -> None:
    assert torch.equal(drawn("0:a:q", 2, 9), drawn("0:a:q", 2, 9))
    assert not torch.equal(drawn("0:a:q", 2, 9), drawn("1:a:q", 2, 9))
    assert not torch.equal(drawn("0:a:q", 2, 9), drawn("0:b:q", 2, 9))


# ---------------------------------------------------------------- hard cases


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("first", [0, 1])
def test_zeros_stay_zeros_and_do_no_harm(codec: Any, first: int) -> None:
    zeros, fresh = World(codec(), step=first), World(codec(), step=first + 2)
    empty = [torch.zeros(zeros.layout.buckets[0].numel)] * RANKS
    for _ in range(2):
        results = zeros.average(empty)
        assert not any(result.any() for result in results)
        assert not zeros.errors(0).any()
    assert not any(zeros.memories[0].factors.values())
    grads = noise(zeros)
    assert torch.equal(zeros.average(grads)[0], fresh.average(grads)[0])


@pytest.mark.parametrize("codec", CODECS)
def test_factors_recover_their_rank(codec: Any) -> None:
    """After gradients of rank one, others are found again."""
    world = World(codec(rank=3), ((20, 30),), feedback=False)
    generator = torch.Generator().manual_seed(0)
    column, row = torch.randn(20, 1, generator=generator), torch.randn(1, 30, generator=generator)
    for _ in range(4):
        world.average([(column @ row).flatten()] * RANKS)
    left, right = torch.randn(20, 3, generator=generator), torch.randn(3, 30, generator=generator)
    grads = [(left @ right).flatten()] * RANKS
    for _ in range(4):
        result = world.average(grads)[0]
    torch.testing.assert_close(result, grads[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("first", [2, 3])
@pytest.mark.parametrize("index", [0, 1, 3, 5])
def test_not_finite(codec: Any, bad: float, first: int, index: int) -> None:
    """Seen by every rank in that parameter, by none in others, and forgotten on the next step."""
    world, clean = World(codec()), World(codec())
    for step in range(first):
        world.average(noise(world, step))
        clean.average(noise(world, step))
    grads = noise(world, first)
    world.matrix(grads[1], index).view(-1)[3] = bad
    results = world.average(grads)
    clean_result = clean.average(noise(world, first))[0]
    for result in results:
        assert not world.matrix(result, index).isfinite().all()
        for other in set(range(len(SHAPES))) - {index}:
            assert torch.equal(world.matrix(result, other), world.matrix(clean_result, other))
    assert all(world.errors(rank).isfinite().all() for rank in range(RANKS))
    for factors in world.memories[0].factors.values():
        assert all(factor.isfinite().all() for factor in factors.values())
    for step in range(first + 1, first + 3):
        results = world.average(noise(world, step))
        assert same_bytes(results)
        assert results[0].isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_where_the_basis_is_zero(codec: Any, bad: float) -> None:
    world = World(codec(rank=2), ((20, 30),))
    basis = torch.zeros(2, 30)
    basis[0, 0] = basis[1, 1] = 1.0
    for memory in world.memories:
        memory.factors["layer0"][f"{codec.name}.q"] = basis.clone()
    grads = noise(world)
    grads[0][5 * 30 + 7] = bad
    assert not any(result.isfinite().all() for result in world.average(grads))
    assert all(world.errors(rank).isfinite().all() for rank in range(RANKS))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1e-45, 1e-41, 1e-30, 1e-20, 1e20, 1e34])
def test_very_small_and_very_large(codec: Any, scale: float) -> None:
    """Much as with ordinary gradients: no squares are taken."""
    world, ordinary = World(codec()), World(codec())
    for step in range(3):
        grads = [grad.double() for grad in noise(world, step)]
        result = world.average([(scale * grad).float() for grad in grads])[0]
        expected = ordinary.average([grad.float() for grad in grads])[0]
        assert result.isfinite().all()
        if scale > 1e-40:
            torch.testing.assert_close(
                result.double() / scale, expected.double(), rtol=0, atol=0.02
            )


LIMIT = float(np.finfo(np.float32).max)
numbers = st.floats(width=32) | st.sampled_from([LIMIT, -LIMIT, 0.0, 1e-45, 1e30, -1e38])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CODECS),
    st.lists(st.lists(numbers, min_size=1, max_size=8), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_errors_are_finite_whatever_comes(codec: Any, steps: list[list[float]], seed: int) -> None:
    world = World(codec(rank=2, min_rate=0.5), ((6, 7), (3,)), 1 << 20)
    places = torch.Generator().manual_seed(seed)
    for values in steps:
        grads = noise(world, seed)
        for value in values:
            grad = grads[int(torch.randint(RANKS, (), generator=places))]
            grad[int(torch.randint(grad.numel(), (), generator=places))] = value
        results = world.average(grads)
        assert same_bytes([torch.nan_to_num(result) for result in results])
        if not all(grad.isfinite().all() for grad in grads):
            assert not results[0].isfinite().all()
        assert all(world.errors(rank).isfinite().all() for rank in range(RANKS))
        for factors in world.memories[0].factors.values():
            assert all(factor.isfinite().all() for factor in factors.values())
    for step in range(3):  # what was large and finite may be owed for a step
        world.average(noise(world, step))
    assert all(world.errors(rank).isfinite().all() for rank in range(RANKS))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(5, 40), st.integers(0, 5), st.floats(1e-30, 1e38))
def test_a_basis_is_orthonormal(rank: int, length: int, independent: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(rank * 41 + length)
    factor = torch.randn(rank, length, generator=generator).clamp_(-3, 3)
    factor[independent:] = factor[0] if independent else 0.0
    basis = orthonormal(factor * scale)
    torch.testing.assert_close(basis @ basis.t(), torch.eye(rank), rtol=0, atol=1e-5)
    rest = factor - factor @ basis.t() @ basis
    assert rest.abs().max() < 1e-4


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (2, 8), (1, 4)])
def test_no_basis_is_made_of_what_is_not_finite(bad: float, place: tuple[int, int]) -> None:
    factor = torch.ones(3, 9)
    factor[place] = bad
    assert orthonormal(factor).isnan().all()


def test_errors_that_overflow_are_forgotten() -> None:
    source = torch.tensor([[LIMIT, 1.0]])
    subtract(torch.ones(1, 1), torch.tensor([[-LIMIT, 1.0]]), source)
    assert source.tolist() == [[0.0, 0.0]]
    source = torch.tensor([[LIMIT, 1.0]])
    subtract(torch.ones(1, 1), torch.tensor([[-1e29, 0.0]]), source)
    assert source.tolist() == [[LIMIT, 1.0]]
