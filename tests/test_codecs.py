"""Every codec: NumPy's bits, the declared size, nothing lost or hidden, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched import codecs
from commsched.codecs import ByteCodec, Codec, Oracle, Sharded, Summed, WireSpec
from commsched.exchange import sent_share
from commsched.layout import Chunk, Piece
from commsched.plan import Task
from tests.averaging import World

LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
LOCAL = [name for name in LOSSY if isinstance(codecs.get(name), (ByteCodec, Summed))]
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
MAX = float(np.finfo(np.float32).max)
SPECIAL = [
    0.0,
    -0.0,
    2.0**-149,
    -(2.0**-140),
    2.0**-126,
    65504.0,
    65520.0,
    2.0**-24,
    1.01171875,
    MAX,
    -MAX,
]
FINITE = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(SPECIAL)
ANY = FINITE | st.sampled_from([float("nan"), float("inf"), -float("inf")])
SHAPES = st.integers(1, 3) | st.integers(1, 1300)  # with and without whole blocks
finite_arrays = hnp.arrays(np.float32, SHAPES, elements=FINITE)
any_arrays = hnp.arrays(np.float32, SHAPES, elements=ANY)
SEEDS = st.integers(0, 2**32 - 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparisons that tell -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(torch.uint8)


def chunk_of(numel: int, dtype: str = "float32") -> Chunk:
    return Chunk((Piece(0, 0, numel),), dtype)


def encoded(codec: Codec, grad: torch.Tensor, seed: int = 0) -> torch.Tensor:
    assert isinstance(codec, (ByteCodec, Summed))
    wire = codec.wire(chunk_of(grad.numel())).empty()
    codec.encode(grad, wire, seed)
    return wire


def decoded(codec: Codec, wire: torch.Tensor, numel: int, seed: int = 0) -> torch.Tensor:
    out = torch.full((numel,), 7.0)
    if isinstance(codec, ByteCodec):
        codec.decode(wire, out)
    else:
        assert isinstance(codec, Summed)
        codec.decode(wire, out, seed)
    return out


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- the registry


def test_the_registry_knows_its_codecs() -> None:
    assert codecs.names()[0] == "none"
    assert {"none", "fp16", "bf16", "int8", "int4", "fp8", "dynamic8", "sign"} <= set(
        codecs.names()
    )
    assert {"ternary", "qsgd", "topk", "randomk", "vote"} <= set(codecs.names())
    assert {"powersgd", "acpsgd", "dgc"} <= set(codecs.names())
    for name in codecs.names():
        assert codecs.get(name).name == name
        assert str(codecs.get(name)) == name
        assert (type(codecs.get(name)).__doc__ or "").strip()


def test_options_are_read_and_said() -> None:
    codec = codecs.get("topk:ratio=0.02")
    assert (codec.name, codec.ratio, str(codec)) == ("topk", 0.02, "topk:ratio=0.02")
    assert codecs.get("topk:ratio=0.01") == codecs.get("topk")
    assert str(codecs.get("topk:ratio=0.01")) == "topk"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "did you mean 'int8'"),
        ("topk:ration=0.1", "no option 'ration': it has ratio"),
        ("topk:ratio=much", "it takes float"),
        ("topk:ratio=7", "ratio"),
        ("none:ratio=7", "it has none"),
        ("int8:block=33", "block"),
        ("powersgd:rank=0", "rank"),
        ("fp8:format=e3m4", "e4m3"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        codecs.get(text)


@dataclass(frozen=True)
class _Halves(ByteCodec):
    """Complete, to begin with."""

    name = "halves"
    ops = ("gather",)
    oracle = Oracle(lambda c, x, s: x.view(np.uint8), lambda c, w, n, s: w.view(np.float32))

    def nbytes(self, numel: int, step: int | None = None) -> int:
        return 4 * numel

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        return WireSpec(torch.uint8, 4 * chunk.numel)

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        out.view(torch.float32).copy_(grad)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire.view(torch.float32))

    def rounds(self, parcel: object) -> None:  # type: ignore[override]
        raise NotImplementedError


def lacking(**attributes: object) -> type[Codec]:
    return dataclass(frozen=True)(type("Lacking", (_Halves,), {"__doc__": "x", **attributes}))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"oracle": None}, "oracle"),
        ({"ops": ()}, "ops"),
        ({"name": "fp16"}, "registered already"),
        ({"name": None}, "name"),
        ({"decode": ByteCodec.decode}, "lacks decode"),
        ({"nbytes": ByteCodec.nbytes}, "lacks nbytes"),
        ({"wire": Codec.wire}, "lacks wire"),
        ({"encode": ByteCodec.encode}, "lacks encode"),
    ],
)
def test_half_a_codec_is_not_registered(what: dict[str, object], said: str) -> None:
    before = codecs.names()
    with pytest.raises(ValueError, match=said):
        codecs.register(lacking(**what))
    assert codecs.names() == before


def test_a_whole_one_is_and_may_be_a_decorated_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    assert codecs.register(_Halves) is _Halves
    assert codecs.get("halves") == _Halves()


def test_all_but_none_are_lossy_and_begin_after_warm_up() -> None:
    assert [name for name in codecs.names() if name not in LOSSY] == ["none"]
    early = {name for name in codecs.names() if codecs.get(name).start_step == 0}
    assert early == {"none", *CASTS}


# ---------------------------------------------------------------- encode, decode


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("numel", [1, 7, 64, 129, 5000])
def test_the_wire_is_as_declared_and_the_input_stays(name: str, numel: int) -> None:
    codec = codecs.get(name)
    grad = normal(numel)
    before = grad.clone()
    wire = torch.full((codec.wire(chunk_of(numel)).nbytes + 8,), 77, dtype=torch.uint8)
    spec = codec.wire(chunk_of(numel))
    out = wire[4:-4].view(spec.dtype)
    codec.encode(grad, out, 5)
    assert wire[:4].eq(77).all()
    assert wire[-4:].eq(77).all()
    assert torch.equal(bits(grad), bits(before))
    assert torch.equal(bits(out), bits(encoded(codec, grad, 5)))  # every byte written
    sent = out.clone()
    got = decoded(codec, out, numel, 5)
    assert torch.equal(bits(out), bits(sent))
    assert torch.equal(decoded(codec, encoded(codec, grad, 5), numel, 5), got)  # no hidden state


@pytest.mark.parametrize("name", LOCAL)
@given(x=any_arrays, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_encoding_is_numpys(name: str, x: np.ndarray, seed: int) -> None:
    codec = codecs.get(name)
    assert codec.oracle is not None
    wire = encoded(codec, torch.from_numpy(x), seed)
    ours = bits(wire).numpy()
    theirs = codec.oracle.encode(codec, x, seed)
    if name in CASTS:  # which NaN is the hardware's choice
        nan = np.isnan(x)
        ours, theirs = (side.view(np.uint16)[~nan] for side in (ours, theirs))
        assert wire.isnan().numpy().tolist() == nan.tolist()
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("name", LOCAL)
@given(x=any_arrays, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_decoding_is_numpys(name: str, x: np.ndarray, seed: int) -> None:
    codec = codecs.get(name)
    assert codec.oracle is not None
    wire = encoded(codec, torch.from_numpy(x), seed)
    ours = decoded(codec, wire, len(x), seed).numpy()
    theirs = codec.oracle.decode(codec, bits(wire).numpy(), len(x), seed)
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.uint32), theirs[~nan].view(np.uint32))


@pytest.mark.parametrize("name", [n for n in LOCAL if isinstance(codecs.get(n), ByteCodec)])
@given(x=finite_arrays, y=finite_arrays, seed=SEEDS)
@settings(deadline=None, max_examples=20)
def test_decode_add_adds_what_decode_gives(
    name: str, x: np.ndarray, y: np.ndarray, seed: int
) -> None:
    codec = codecs.get(name)
    numel = min(len(x), len(y))
    wire = encoded(codec, torch.from_numpy(x[:numel].copy()), seed)
    out = torch.from_numpy(y[:numel].copy())
    expected = out + decoded(codec, wire, numel)
    codec.decode_add(wire, out)
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], expected[~nan])


@pytest.mark.parametrize("name", LOCAL)
@given(x=any_arrays, e=finite_arrays, seed=SEEDS)
@example(x=np.float32([np.nan, np.inf, -np.inf, 1.001]), e=np.zeros(4, np.float32), seed=0)
@settings(deadline=None, max_examples=25)
def test_what_was_sent_and_what_is_kept_are_what_was_given(
    name: str, x: np.ndarray, e: np.ndarray, seed: int
) -> None:
    """Bit for bit: the error is the float32 difference; finite whatever the gradient is."""
    codec = codecs.get(name)
    numel = min(len(x), len(e))
    grad = torch.from_numpy(x[:numel].copy())
    error = torch.from_numpy(e[:numel].copy())
    given_ = grad + error
    wire = codec.wire(chunk_of(numel)).empty()
    codec.encode_feedback(grad, error, wire, seed)
    assert np.array_equal(grad.numpy(), x[:numel], equal_nan=True)
    if name not in CASTS or bool(given_.isfinite().all()):
        assert torch.equal(bits(wire), bits(encoded(codec, given_, seed)))
    lost = given_ - decoded(codec, wire, numel, seed)
    assert bool(error.isfinite().all())
    finite = lost.isfinite()
    assert torch.equal(error[finite], lost[finite])
    assert not error[~finite].any()


@pytest.mark.parametrize("name", LOCAL)
@given(x=any_arrays, seed=SEEDS)
@settings(deadline=None, max_examples=25)
def test_what_is_not_finite_does_not_come_out_finite(name: str, x: np.ndarray, seed: int) -> None:
    codec = codecs.get(name)
    grad = torch.from_numpy(x)
    got = decoded(codec, encoded(codec, grad, seed), len(x), seed)
    if not bool(grad.isfinite().all()):
        assert not bool(got.isfinite().all())
        if isinstance(codec, Sharded):
            assert not bool(got[~grad.isfinite()].isfinite().any())


@pytest.mark.parametrize("name", [n for n in LOSSY if n not in CASTS])
@given(x=hnp.arrays(np.float32, SHAPES, elements=st.floats(-(2.0**120), 2.0**120, width=32)))
@settings(deadline=None, max_examples=20)
def test_what_is_finite_stays_finite(name: str, x: np.ndarray) -> None:
    """Also where a block holds numbers of all sizes: its scale must not overflow."""
    for got in World(codecs.get(name), 2).average([torch.from_numpy(x)] * 2):
        assert bool(got.isfinite().all())


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("numel", [1, 64, 1000])
def test_zeros_stay_zeros(name: str, numel: int) -> None:
    codec = codecs.get(name)
    assert not decoded(codec, encoded(codec, torch.zeros(numel)), numel).any()


@pytest.mark.parametrize("name", LOCAL)
def test_a_view_that_begins_anywhere(name: str) -> None:
    """Chunks are views into buckets: vectorised loops must not assume an aligned beginning."""
    codec, buffer = codecs.get(name), normal(900)
    for start in range(9):
        view = buffer[start : start + 731]
        assert torch.equal(bits(encoded(codec, view)), bits(encoded(codec, view.clone())))


UNBIASED = [name for name in LOCAL if not codecs.get(name).biased and name not in CASTS]


@pytest.mark.parametrize("name", UNBIASED)
def test_the_stochastic_ones_are_right_on_average(name: str) -> None:
    """Within five standard errors, each gradient of a block.

    One that takes two neighbouring levels, at most the block's largest number apart, deviates by no
    more than sqrt(size x largest).
    """
    codec, grad, times = codecs.get(name), normal(300, 1), 2000
    draws = [decoded(codec, encoded(codec, grad, seed), 300).double() for seed in range(times)]
    rows = torch.stack(draws)
    assert (rows.std(0) > 0).sum() > 250
    largest = grad.abs().max()
    bound = 5 * ((grad.abs() * largest / times).sqrt() + largest / times)
    assert bool(((rows.mean(0) - grad).abs() <= bound).all())


# ---------------------------------------------------------------- over ranks


def gradients(size: int, numel: int, seed: int) -> list[torch.Tensor]:
    return [normal(numel, 100 * seed + rank) * 10.0 ** (rank % 3 - 1) for rank in range(size)]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("numel", "rows"), [(1, 0), (5, 0), (640, 16), (3001, 0), (6400, 80)])
def test_over_all_ranks_nothing_is_lost(name: str, size: int, numel: int, rows: int) -> None:
    """Average + errors = true average + errors before; and every rank holds the same bytes."""
    world = World(codecs.get(name), size, feedback="1")
    momentum = codecs.get(name).momentum if name == "dgc" else 0.0
    owed = torch.zeros(numel).double()
    for step in range(4):
        grads = gradients(size, numel, step)
        before, velocity = world.errors(), world.errors("velocity")
        got = world.average(grads, rows)
        for other in got[1:]:
            assert torch.equal(bits(other), bits(got[0]))
        true = torch.stack(grads).double().mean(0) + momentum * velocity
        # The sums of casts are rounded once more on the wire, where nobody keeps what is lost.
        near = {"fp16": 2e-3, "bf16": 2e-2}.get(name, 2e-5)
        torch.testing.assert_close(
            got[0].double() + world.errors(), true + before, rtol=near, atol=near
        )
        owed = owed + true
    assert owed.any()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_gradient_on_one_rank_is_seen_by_all(name: str, size: int, bad: float) -> None:
    for at in (0, 1200, 2399):
        world = World(codecs.get(name), size)
        grads = gradients(size, 2400, 0)
        grads[size - 1][at] = bad
        got = world.average(grads, 40)
        for one in got:
            assert not bool(one.isfinite().all())
            assert torch.equal(one.isfinite(), got[0].isfinite())
        for memory in world.memories:
            for rows in memory.slots().values():
                assert all(bool(kept.isfinite().all()) for kept in rows.values())
        after = world.average(gradients(size, 2400, 1), 40)  # a GradScaler skips, and goes on
        assert all(bool(one.isfinite().all()) for one in after)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_those_of_the_plan(name: str, size: int) -> None:
    codec = codecs.get(name)
    numel, rows = 64000, 200
    chunk = Chunk((Piece(0, 0, numel, rows),), "float32")
    world = World(codec, size)
    sent = []
    for step in range(2):  # acpsgd sends one factor, then the other
        world.average(gradients(size, numel, step), rows)
        sent.append(sum(world.sent_bytes) / size)
    assert name == "acpsgd" or sent[0] == sent[1]
    tasks = [Task(0, op, chunk, name, number) for number, op in enumerate(codec.ops)]
    said = sum(task.sent_bytes(size) for task in tasks)
    assert abs(max(sent) - said) <= 0.03 * said
    exact = 4 * numel * sent_share("all_reduce", size)
    assert said <= exact / 2


@pytest.mark.parametrize("name", LOSSY)
def test_a_single_number_on_many_ranks(name: str) -> None:
    """Fewer gradients than ranks: some shards are empty."""
    world = World(codecs.get(name), 4)
    got = world.average([torch.tensor([float(rank + 1)]) for rank in range(4)])
    assert all(torch.equal(one, got[0]) for one in got)
    assert bool(got[0].isfinite().all())


@pytest.mark.parametrize("name", LOSSY)
def test_in_the_long_run_the_average_is_the_true_one(name: str) -> None:
    """A constant gradient: what has arrived after some steps is what was owed, nearly."""
    codec = codecs.get(name)
    if name == "dgc":
        codec = codecs.get("dgc:momentum=0.0,ratio=0.05")
    elif name in ("topk", "randomk", "vote"):
        codec = codecs.get(f"{name}:ratio=0.05")
    world = World(codec, 2)
    grads = [normal(1600, 1), normal(1600, 2)]
    true = (grads[0] + grads[1]) / 2
    steps = 400
    arrived = sum(world.average(grads, 40)[0].double() for _ in range(steps)) / steps
    near = 0.08 if codec.biased else 0.15  # of the stochastic ones it is the noise that is left
    assert float((arrived - true).norm() / true.norm()) < near


# ---------------------------------------------------------------- which dtypes


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("dtype", ["int64", "int8", "float16", "bfloat16", "complex64"])
def test_what_gains_nothing_from_a_cast_travels_as_it_is(name: str, dtype: str) -> None:
    assert not codecs.get(name).supports(getattr(torch, dtype))


@pytest.mark.parametrize("name", [name for name in LOSSY if name not in CASTS])
def test_floats_of_any_width_gain_from_the_others(name: str) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert codecs.get(name).supports(getattr(torch, dtype))
    for dtype in ("int64", "complex64", "bool"):
        assert not codecs.get(name).supports(getattr(torch, dtype))
