"""Where several codecs meet: codecs made up for tests, and layouts and settings that mix them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from hypothesis import strategies as st

from commsched import codecs, exchange
from commsched.codecs import Codec, Gathered, Oracle, Sharded, WireSpec
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec
from commsched.parcel import Parcel, Rounds
from commsched.profile import ParamTimes, Profile
from commsched.settings import MB, Settings

__all__ = [
    "FAKES",
    "Coarse",
    "Evens",
    "Twice",
    "mixed_settings",
    "registered",
    "shaped",
    "with_shapes",
]

_UNUSED = Oracle(lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]


@dataclass(frozen=True)
class Coarse(Sharded):
    """To multiples of 1/16 in two bytes: exact in float32 for numbers of 1/1024 up to 2000."""

    name = "coarse"
    oracle = _UNUSED
    start_step = 2

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def nbytes(self, numel: int, step: int | None = None) -> int:
        return (numel + numel % 2) * 2

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        wire = out.view(torch.int16)
        wire[: grad.numel()].copy_((grad * 16).round())
        wire[grad.numel() :].zero_()

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wire.view(torch.int16)[: out.numel()]).div_(16)


@dataclass(frozen=True)
class Evens(Gathered):
    """Every other gradient, as it is; the others are kept. Also for vectors and small ones."""

    name = "evens"
    oracle = _UNUSED
    for_all = True
    start_step = 4

    def nbytes(self, numel: int, step: int | None = None) -> int:
        return -(-numel // 2) * 4

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        out.view(torch.float32).copy_(grad[::2])

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()[::2].copy_(wire.view(torch.float32))


@dataclass(frozen=True)
class Twice(Codec):
    """Whole numbers in one sum, fractions in another one; whole parameters only. Loses nothing."""

    name = "twice"
    ops = ("all_reduce", "all_reduce")
    oracle = _UNUSED
    whole_params = True
    start_step = 3
    scale: int = 1

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        return WireSpec(torch.float32, chunk.numel)

    def rounds(self, parcel: Parcel) -> Rounds:
        grad = parcel.take()
        whole = grad.floor()
        total = (yield exchange.summed(whole, parcel.size)).clone()
        rest = grad - grad.floor()
        total += yield exchange.summed(rest, parcel.size)
        grad.copy_(total)
        parcel.put(grad)


FAKES = (Coarse, Evens, Twice)


@contextmanager
def registered() -> Iterator[None]:
    """With those codecs in the registry."""
    before = dict(codecs._CODECS)
    for kind in FAKES:
        codecs._CODECS.pop(kind.name, None)
        codecs.register(kind)
    try:
        yield
    finally:
        codecs._CODECS.clear()
        codecs._CODECS.update(before)
        codecs.get.cache_clear()


# ---------------------------------------------------------------- layouts and settings

_SIDES = st.integers(1, 7)
_SHAPES = (
    st.just(())
    | st.tuples(st.integers(0, 20))
    | st.tuples(st.integers(0, 300))
    | st.tuples(_SIDES, st.integers(0, 9))
    | st.tuples(_SIDES, st.integers(0, 60))
    | st.tuples(_SIDES, _SIDES, _SIDES)
)
_DTYPES = st.sampled_from(("float32",) * 6 + ("float64", "float16", "int64"))
CODECS = ("none", "fp16", "coarse", "evens", "twice", "twice:scale=2")
PATTERNS = ("b0.*", "b[12].*", "*.p1", "*.p[03]", "b1.p0", "*", "nobody", "B0.*")


@st.composite
def shaped(draw: st.DrawFn) -> Layout:
    """Buckets of parameters with shapes; some are sparse, some complex, seen as real numbers."""
    buckets = []
    for at in range(draw(st.integers(0, 6))):
        dtype = draw(_DTYPES)
        sparse = dtype == "float32" and draw(st.integers(0, 9)) == 0
        shapes = draw(st.lists(_SHAPES, min_size=sparse, max_size=1 if sparse else 5))
        parts = draw(st.lists(st.sampled_from([1, 1, 2]), min_size=5, max_size=5))
        params = tuple(
            ParamSpec(f"b{at}.p{i}", prod(shape) * (parts[i] if dtype == "float32" else 1), shape)
            for i, shape in enumerate(shapes)
        )
        buckets.append(BucketSpec(params, dtype, sparse))
    return Layout(tuple(buckets))


@st.composite
def mixed_settings(draw: st.DrawFn) -> Settings:
    """A codec, rules, and sizes for small buckets."""
    sizes = st.floats(64 / MB, 4096 / MB)
    rules = draw(
        st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(CODECS)), max_size=3)
    )
    return Settings(
        codec=draw(st.sampled_from(CODECS)),
        codec_rules=";".join(f"{pattern}={codec}" for pattern, codec in rules),
        codec_min_numel=draw(st.sampled_from([0, 20, 1024])),
        chunk_mb=draw(sizes | st.just(0.0)),
        fusion_mb=draw(sizes | st.sampled_from([0.0, 1.0, 1.0])),
        credit_mb=draw(sizes | st.just(0.0)),
    )


@st.composite
def with_shapes(draw: st.DrawFn, layouts: st.SearchStrategy[Layout]) -> Profile:
    """A measured profile of one of these layouts."""
    layout = draw(layouts)
    times, seconds = [], st.floats(0, 1)
    ready_s = sorted(draw(seconds) for _ in layout.buckets)
    for at, bucket in enumerate(layout.buckets):
        for param in bucket.params:
            use_s = draw(st.floats(0, 0.6))
            times.append(ParamTimes(param.name, ready_s[at] * draw(seconds), use_s, 0.01))
    blank = Profile.unmeasured(layout, draw(st.integers(1, 4)))
    return replace(
        blank,
        measured=True,
        ready_s=tuple(ready_s),
        params=tuple(times),
        forward_s=0.5,
        backward_s=1.0,
        other_s=0.1,
        link=replace(blank.link, alpha_s=draw(st.floats(0, 0.1)), beta_s=draw(st.floats(0, 5e-4))),
    )
