"""Codecs against NumPy bit for bit; error feedback loses nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched import codecs, exchange
from commsched.codecs import Codec, WireSpec
from commsched.codecs.feedback import ErrorFeedback
from commsched.layout import BucketSpec, Layout, ParamSpec, cut

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
