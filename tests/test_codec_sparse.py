"""The sparse codecs: kernels, torch and NumPy agree bit for bit; ranks agree; nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched.codecs import kernels
from commsched.codecs.base import ByteCodec, Codec, Summed
from commsched.codecs.dgc import Dgc
from commsched.codecs.randomk import RandomK
from commsched.codecs.topk import TopK, kept, select
from commsched.codecs.vote import Vote
from commsched.errors import CommSchedError
from commsched.exchange import Pool
from commsched.layout import Chunk, Piece, Span
from commsched.memory import Memory
from commsched.parcel import Parcel, resumed
from tests.coding import normal, same
from tests.simulated_group import exchanged

# With the kernels, and with the torch code that stands in for them.
pytestmark = pytest.mark.usefixtures("implementation")

NAN, INF = float("nan"), float("inf")
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.0, -1.0, LARGEST, -LARGEST]
SIZES = st.integers(1, 9) | st.integers(1, 300)
RATIOS = st.sampled_from([0.001, 0.01, 0.05, 0.3, 0.5])
SEEDS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(-(2.0**126), 2.0**126, width=32) | st.sampled_from(SPECIAL)
FINITE = hnp.arrays(np.float32, SIZES, elements=FLOATS)
ANY = hnp.arrays(
    np.float32, SIZES, elements=st.floats(width=32) | st.sampled_from([*SPECIAL, NAN, INF, -INF])
)
EXAMPLES = settings(deadline=None, max_examples=30)


def largest(x: np.ndarray, count: int) -> np.ndarray:
    """Sorting all of them, equal ones by index."""
    order = np.lexsort((np.arange(x.size), -(x.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)))
    return np.sort(order[:count]).astype(np.int32)


def chunk_of(numel: int) -> Chunk:
    return Chunk((Piece(0, 0, numel),), "float32")


def empty_wire(codec: Codec, numel: int) -> torch.Tensor:
    spec = codec.wire(chunk_of(numel))
    return torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8).view(spec.dtype)


def encoded(codec: ByteCodec | Summed, grad: torch.Tensor, seed: int = 0) -> torch.Tensor:
    wire = empty_wire(codec, grad.numel())
    codec.encode(grad, wire, seed)
    return wire


def decoded(
    codec: ByteCodec | Summed, wire: torch.Tensor, numel: int, seed: int = 0
) -> torch.Tensor:
    out = torch.full((numel,), 7.0)
    if isinstance(codec, Summed):
        codec.decode(wire, out, seed)
    else:
        codec.decode(wire, out)
    return out


# ---------------------------------------------------------------- ranks in one process


class Counting(Pool):
    """Knows what has not been given back."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        self.out += 1
        return super().take(dtype, numel).fill_(77)

    def give(self, tensor: torch.Tensor) -> None:
        self.out -= 1
        super().give(tensor.fill_(99))  # nobody may look at it any more


class Cluster:
    """Ranks that average one chunk, in lock step."""

    def __init__(self, codec: Codec, size: int, numel: int, feedback: bool = True) -> None:
        self.codec, self.size, self.numel, self.feedback = codec, size, numel, feedback
        self.memories = [Memory() for _ in range(size)]
        self.pools = [Counting() for _ in range(size)]
        self.wires: list[list[torch.Tensor]] = []  # of the last step: by round, by rank

    def parcel(self, rank: int, view: torch.Tensor, step: int) -> Parcel:
        return Parcel(
            chunk=chunk_of(self.numel),
            spans=(Span("w", self.numel, 0, 0, self.numel),),
            views=[view],
            rank=rank,
            size=self.size,
            step=step,
            memory=self.memories[rank],
            feedback=self.feedback,
            pool=self.pools[rank],
        )

    def slot(self, name: str, rank: int) -> torch.Tensor:
        found = self.parcel(rank, torch.empty(0), 0).slot(name)
        assert found is not None
        return found

    def kept(self) -> torch.Tensor:
        """All ranks' errors, summed in float64."""
        return sum(self.slot("error", rank).double() for rank in range(self.size))

    def step(self, grads: Sequence[torch.Tensor], step: int = 0) -> torch.Tensor:
        """The average of one step; the ranks have the same bits."""
        views = [grad.clone() for grad in grads]
        parcels = [self.parcel(rank, view, step) for rank, view in enumerate(views)]
        works = [self.codec.rounds(parcel) for parcel in parcels]
        transfers = [next(work) for work in works]
        self.wires = []
        for number in range(len(self.codec.ops)):
            spec = self.codec.wire(chunk_of(self.numel), number, step)
            for transfer in transfers:
                assert (transfer.wire.dtype, transfer.wire.numel()) == (spec.dtype, spec.numel)
            self.wires.append([transfer.wire.clone() for transfer in transfers])
            results = exchanged(transfers)
            transfers = [
                answer
                for work, result in zip(works, results, strict=True)
                if (answer := resumed(work, result)) is not None
            ]
        assert not transfers
        assert all(same(view, views[0]) for view in views)
        assert all(pool.out == 0 for pool in self.pools)
        return views[0]


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("numel", "ratio", "count"),
    [(1, 0.001, 1), (100, 0.07, 7), (100, 0.01, 1), (101, 0.01, 2), (300, 0.01, 3), (3, 0.5, 2)],
)
def test_the_share_is_rounded_up_and_no_further(numel: int, ratio: float, count: int) -> None:
    assert kept(numel, ratio) == count
    assert TopK(ratio=ratio).nbytes(numel) == 8 * count
    assert kept(0, ratio) == 0


@given(x=ANY, data=st.data())
@EXAMPLES
def test_selection_is_sorting(x: np.ndarray, data: st.DataObject) -> None:
    indices = torch.empty(data.draw(st.integers(1, x.size)), dtype=torch.int32)
    finite = select(torch.from_numpy(x), indices)
    assert indices.tolist() == largest(x, indices.numel()).tolist()
    assert finite == np.isfinite(x).all()


def shapes(numel: int) -> dict[str, torch.Tensor]:
    """What gradients look like, and what makes thresholds hard."""
    gen = torch.Generator().manual_seed(1)
    scale = 10.0 ** torch.randint(-9, 1, (numel // 1000 + 1,), generator=gen)
    crowded = torch.zeros(numel)
    crowded[numel // 3 : numel // 3 + numel // 8] = normal(numel // 8)
    return {
        "normal": normal(numel),
        "layers": normal(numel) * scale.repeat_interleave(1000)[:numel],
        "equal": torch.full((numel,), -2.5),
        "zero": torch.zeros(numel),
        "few values": torch.randint(-2, 3, (numel,), generator=gen).float(),
        "crowded": crowded,
        "one": torch.zeros(numel).index_fill_(0, torch.tensor([numel - 1]), 1e-45),
        "denormal": normal(numel) * 1e-41,
        "large": normal(numel) * 1e37,
        "rising": torch.arange(numel).float(),
    }


@pytest.mark.parametrize("name", shapes(1))
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5])
def test_selection_from_many(name: str, ratio: float) -> None:
    for numel in (4096, 30_011):
        x = shapes(numel)[name]
        indices = torch.empty(kept(numel, ratio), dtype=torch.int32)
        assert select(x, indices)
        assert torch.equal(indices, torch.from_numpy(largest(x.numpy(), indices.numel())))


# ---------------------------------------------------------------- topk and randomk bit for bit


@pytest.mark.parametrize("kind", [TopK, RandomK, Dgc])
@given(x=ANY, ratio=RATIOS, seed=SEEDS)
@example(x=np.array([NAN], np.float32), ratio=0.01, seed=0)
@EXAMPLES
def test_codecs_are_their_oracles(kind: Any, x: np.ndarray, ratio: float, seed: int) -> None:
    codec = kind(ratio=ratio)
    grad = torch.from_numpy(x.copy())
    wire = encoded(codec, grad, seed)
    assert same(grad, x)
    assert same(wire, codec.oracle.encode(codec, x, seed))
    bits = wire.view(torch.uint8).numpy()
    out = decoded(codec, wire, x.size, seed)
    assert same(out, codec.oracle.decode(codec, bits, x.size, seed))
    assert out.isfinite().all() == np.isfinite(x).all()


@pytest.mark.parametrize("codec", [TopK(), RandomK(), TopK(ratio=0.3)], ids=str)
def test_many_are_as_few(codec: Any) -> None:
    grad, error = normal(20_011), normal(20_011, 1)
    assert same(encoded(codec, grad, 9), codec.oracle.encode(codec, grad.numpy(), 9))
    total = grad + error
    wire = empty_wire(codec, grad.numel())
    codec.encode_feedback(grad, error, wire, 9)
    assert same(wire, codec.oracle.encode(codec, total.numpy(), 9))
    assert same(error, total - decoded(codec, wire, grad.numel(), 9))


@pytest.mark.parametrize("kind", [TopK, RandomK])
@given(data=st.data(), ratio=RATIOS, seed=SEEDS)
@EXAMPLES
def test_feedback_keeps_what_is_not_sent(
    kind: Any, data: st.DataObject, ratio: float, seed: int
) -> None:
    codec = kind(ratio=ratio)
    grad = torch.from_numpy(data.draw(ANY))
    error = torch.from_numpy(data.draw(hnp.arrays(np.float32, grad.numel(), elements=FLOATS)))
    before, total = grad.clone(), error + grad
    wire = empty_wire(codec, grad.numel())
    codec.encode_feedback(grad, error, wire, seed)
    assert same(grad, before)
    assert same(wire, encoded(codec, total, seed))
    left = (total - decoded(codec, wire, grad.numel(), seed)).nan_to_num(0.0, 0.0, 0.0)
    assert torch.equal(error, left)
    assert error.isfinite().all()


@given(x=FINITE, ratio=RATIOS)
@EXAMPLES
def test_topk_adds_where_it_sent(x: np.ndarray, ratio: float) -> None:
    codec = TopK(ratio=ratio)
    wire = encoded(codec, torch.from_numpy(x))
    base = normal(x.size, 5)
    out = base.clone()
    codec.decode_add(wire, out)
    assert same(out, base + decoded(codec, wire, x.size))


@pytest.mark.parametrize("numel", [1, 7, 100, 1003])
def test_randomk_draws_one_of_each_stratum(numel: int) -> None:
    codec = RandomK(ratio=0.05)
    count = kept(numel, 0.05)
    hits = torch.zeros(numel)
    for seed in range(400):
        drawn = decoded(codec, encoded(codec, torch.ones(numel), seed), numel, seed)
        assert drawn.sum() == count
        for j in range(count):
            assert drawn[j * numel // count : (j + 1) * numel // count].sum() == 1
        hits += drawn
    assert hits.mean() == 400 * count / numel
    assert hits.max() <= 400 * count / numel + 5 * (400 * count / numel) ** 0.5
    assert hits.min() >= 400 * count / numel - 5 * (400 * count / numel) ** 0.5


def test_a_nan_that_is_not_drawn_is_seen() -> None:
    codec = RandomK(ratio=0.01)
    for place in range(100):
        grad, error = torch.ones(100), torch.ones(100)
        grad[place] = NAN
        wire = empty_wire(codec, 100)
        codec.encode_feedback(grad, error, wire, 3)
        total = wire + encoded(codec, torch.ones(100), 3)
        assert decoded(codec, total, 100, 3).isnan().all()
        assert torch.equal(error, torch.zeros(100))


# ---------------------------------------------------------------- over ranks

CODECS = [
    TopK(),
    TopK(ratio=0.2),
    RandomK(),
    RandomK(ratio=0.2),
    Vote(),
    Vote(ratio=0.2),
    Dgc(ratio=0.01),
    Dgc(ratio=0.2, momentum=0.0),
    Dgc(momentum=0.5, warmup_steps=4),
]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(("size", "numel"), [(1, 257), (2, 1000), (3, 1), (4, 5003)])
def test_ranks_agree_and_nothing_is_lost(codec: Codec, size: int, numel: int) -> None:
    cluster = Cluster(codec, size, numel)
    velocity = [torch.zeros(numel) for _ in range(size)]
    for step in range(5):
        grads = [normal(numel, 100 * step + rank) for rank in range(size)]
        before = cluster.kept()
        if isinstance(codec, Dgc):
            slots = [cluster.slot("velocity", rank) for rank in range(size)]
            velocity = [slot * codec.momentum for slot in slots]
        fresh = sum((grads[rank] / size + velocity[rank]).double() for rank in range(size))
        average = cluster.step(grads, step)
        after = average.double() + cluster.kept()
        torch.testing.assert_close(after, before + fresh, rtol=0, atol=1e-5)
        sent = int((average != 0).sum())
        assert 0 < sent <= max(1, numel * size * 0.26)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("all_bad", [False, True])
def test_one_ranks_nan_is_everyones(codec: Codec, bad: float, all_bad: bool) -> None:
    cluster = Cluster(codec, 3, 500)
    cluster.step([normal(500, rank) for rank in range(3)], 0)
    grads = [normal(500, rank + 10) for rank in range(3)]
    grads[1][slice(None) if all_bad else 123] = bad
    assert not cluster.step(grads, 1).isfinite().all()
    assert cluster.kept().isfinite().all()
    assert cluster.step([normal(500, rank + 20) for rank in range(3)], 2).isfinite().all()


def test_without_feedback_all_but_dgc_work() -> None:
    grads = [normal(1000, rank) for rank in range(3)]
    mean = sum(grads) / 3
    for codec in (RandomK(ratio=0.1), Vote(ratio=0.1)):
        average = Cluster(codec, 3, 1000, feedback=False).step(grads)
        assert int((average != 0).sum()) == 100
        torch.testing.assert_close(average, torch.where(average != 0, mean, 0.0))
    grads[1][5] = NAN
    for codec in (TopK(), RandomK(), Vote()):
        assert not Cluster(codec, 3, 1000, feedback=False).step(grads).isfinite().all()
    with pytest.raises(CommSchedError, match="error feedback is off"):
        Cluster(Dgc(), 3, 1000, feedback=False).step(grads)


# ---------------------------------------------------------------- vote


@given(x=ANY, ratio=RATIOS, step=st.integers(0, 1000))
@EXAMPLES
def test_votes_of_one_rank_are_the_oracles(x: np.ndarray, ratio: float, step: int) -> None:
    x = x * np.float32(1)  # quiets NaN
    codec = Vote(ratio=ratio)
    cluster = Cluster(codec, 1, x.size, feedback=False)
    average = cluster.step([torch.from_numpy(x)], step)
    seed = cluster.parcel(0, torch.empty(0), step).seed("vote")
    wires = torch.cat([of_ranks[0].view(torch.uint8) for of_ranks in cluster.wires])
    assert same(wires, codec.oracle.encode(codec, x, seed))
    assert same(average, codec.oracle.decode(codec, wires.numpy(), x.size, seed))


@pytest.mark.parametrize(("size", "numel"), [(2, 400), (3, 17), (5, 3000)])
def test_most_votes_win_and_equals_win_in_turn(size: int, numel: int) -> None:
    codec = Vote(ratio=0.1)
    count = kept(numel, 0.1)
    common = normal(numel)
    for step in range(8):
        cluster = Cluster(codec, size, numel, feedback=False)
        grads = [common + normal(numel, 1 + rank) for rank in range(size)]
        average = cluster.step(grads, step)
        shares = [(grad * (1.0 / size)).numpy() for grad in grads]
        ballots = [largest(share, count) for share in shares]
        for ballot, wire in zip(ballots, cluster.wires[0], strict=True):
            assert wire.tolist() == [*ballot.tolist(), 0]
        votes = np.bincount(np.concatenate(ballots), minlength=numel)
        start = cluster.parcel(0, torch.empty(0), step).seed("vote") * numel >> 32
        turn = (np.arange(numel) - start) % numel
        elected = np.lexsort((turn, -votes))[:count]
        elected = elected[np.argsort(turn[elected])]
        for share, wire in zip(shares, cluster.wires[1], strict=True):
            assert same(wire, share[elected])
        assert set(average.nonzero().flatten().tolist()) == set(elected.tolist())


def test_no_index_is_favoured() -> None:
    elected = torch.zeros(64)
    for step in range(200):  # two ranks that never agree: everything has one vote
        grads = [torch.ones(64), torch.ones(64)]
        grads[0][32:], grads[1][:32] = 0.0, 0.0
        elected += Cluster(Vote(ratio=0.5), 2, 64, feedback=False).step(grads, step) != 0
    assert elected.sum() == 200 * 32
    assert 60 < elected.min() <= elected.max() < 140


# ---------------------------------------------------------------- dgc


def test_dgc_is_the_papers_algorithm() -> None:
    size, numel, momentum = 2, 700, np.float32(0.9)
    codec = Dgc(ratio=0.02)
    cluster = Cluster(codec, size, numel)
    velocity = np.zeros((size, numel), np.float32)
    waiting = np.zeros((size, numel), np.float32)
    for step in range(6):
        grads = [normal(numel, 10 * step + rank) for rank in range(size)]
        average = cluster.step(grads, step)
        expected = np.zeros(numel, np.float32)
        for rank in range(size):
            velocity[rank] = momentum * velocity[rank] + grads[rank].numpy() * np.float32(0.5)
            waiting[rank] += velocity[rank]
            sent = largest(waiting[rank], 14)
            expected[sent] += waiting[rank][sent]
            waiting[rank][sent] = velocity[rank][sent] = 0
            assert same(cluster.slot("velocity", rank), velocity[rank])
            assert same(cluster.slot("error", rank), waiting[rank])
        assert same(average, expected)


def test_warm_up_falls_in_equal_stages_from_a_quarter() -> None:
    codec = Dgc(ratio=0.001, warmup_steps=8)
    ratios = [codec.ratio_at(step) for step in range(10)]
    assert ratios[0] == ratios[1] == 0.25
    assert ratios[8] == ratios[9] == codec.ratio_at(None) == 0.001
    factors = [ratios[step + 2] / ratios[step] for step in range(0, 8, 2)]
    assert factors == pytest.approx([0.004**0.25] * 4)
    assert codec.nbytes(1000, 0) == codec.wire(chunk_of(1000), 0, 0).nbytes == 2000
    assert codec.nbytes(1000) == codec.wire(chunk_of(1000)).nbytes == 8
    assert Dgc(ratio=0.5, warmup_steps=8).ratio_at(0) == 0.5


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("kind", [TopK, RandomK, Vote, Dgc])
@pytest.mark.parametrize("ratio", [0.0, -0.1, 0.51, NAN, INF])
def test_a_ratio_is_a_share_up_to_a_half(kind: Any, ratio: float) -> None:
    with pytest.raises(ValueError, match=r"at most 0\.5"):
        kind(ratio=ratio)


def test_other_options_are_checked() -> None:
    for momentum in (-0.1, 1.0, NAN):
        with pytest.raises(ValueError, match="less than 1"):
            Dgc(momentum=momentum)
    with pytest.raises(ValueError, match="0 or more"):
        Dgc(warmup_steps=-1)


@pytest.mark.parametrize("kind", [TopK, RandomK, Vote, Dgc])
def test_preparing_compiles_everything(kind: Any, implementation: str) -> None:
    codec = kind()
    codec.prepare()
    if implementation == "torch":
        assert kernels.load("select") is None
        return
    before = compiled()
    Cluster(codec, 2, 100).step([normal(100), normal(100, 1)])
    if not isinstance(codec, Dgc):
        Cluster(codec, 2, 100, feedback=False).step([normal(100), normal(100, 1)])
    assert compiled() == before


def compiled() -> dict[str, int]:
    module = kernels.load("select")
    return {name: len(getattr(module, name).signatures) for name in module.__all__}
