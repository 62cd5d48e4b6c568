"""Profiles as they would be measured: of known architectures, and any at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from pathlib import Path

from hypothesis import strategies as st

from commsched import codecs
from commsched.advice import rebucketed
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.profile import Link, ParamTimes, Profile
from commsched.settings import MB, Settings

# bench is not installed. At the end: the repository's `cuda` must not shadow an installed one.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.workloads.shapes import ARCHITECTURES, Layer

__all__ = ["GIGABIT", "profile_of", "profiles", "small_settings"]

GIGABIT = Link(alpha_s=1e-3, beta_s=8e-9)
OPTIMIZER_S = 3e-10  # per byte: SGD on a CPU
DTYPES = ("float32", "float64", "float16", "int64", "complex64")


def profile_of(
    architecture: str,
    cap_mb: float = 25,
    link: Link = GIGABIT,
    world_size: int = 2,
    forward_s: float = 0.25,
    backward_s: float = 0.5,
) -> Profile:
    """Each layer computes for its share of the operations; its gradients come all at once."""
    known = ARCHITECTURES[architecture]
    layers = known.layers()
    scale = (known.default_mb or known.true_mb()) / known.true_mb()  # as the bench emulates it
    total = sum(layer.flops for layer in layers)
    ends = list(accumulate(layer.flops / total for layer in layers))
    specs, times = [], []
    for layer, end in reversed(list(zip(layers, ends, strict=True))):
        begin = end - layer.flops / total
        for name, numel in _params(layer, scale):
            specs.append(ParamSpec(name, numel))
            ready_s, use_s = (1 - begin) * backward_s, begin * forward_s
            times.append(ParamTimes(name, ready_s, use_s, 4 * numel * OPTIMIZER_S))
    layout = Layout((BucketSpec(tuple(specs), "float32"),))
    whole = Profile(
        layout, world_size, (backward_s,), tuple(times), forward_s, backward_s, 5e-3, link
    )
    return rebucketed(whole, int(cap_mb * MB))


def _params(layer: Layer, scale: float) -> Iterator[tuple[str, int]]:
    """In the order in which autograd makes gradients ready: the last ones first."""
    for name, shape in reversed(layer.shapes.items()):
        yield f"{layer.name}.{name}", max(1, round(shape[0] * scale)) * prod(shape[1:])


@st.composite
def profiles(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Profile:
    """Small buckets on a link so slow that they matter; times of the order of a second."""
    kind = st.tuples(st.sampled_from(dtypes), st.booleans())
    sizes = st.lists(st.integers(0, 600), max_size=4)
    rows = draw(st.lists(st.tuples(kind, sizes, st.floats(0, 1)), max_size=6))
    ready_s = sorted(share for _, _, share in rows)
    specs, times = [], []
    for at, ((dtype, sparse), numels, _) in enumerate(rows):
        params = tuple(ParamSpec(f"b{at}.p{i}", numel) for i, numel in enumerate(numels))
        specs.append(BucketSpec(params, dtype, sparse and dtype == "float32"))
        for param in params:
            own_s = ready_s[at] * draw(st.floats(0, 1))
            times.append(
                ParamTimes(param.name, own_s, draw(st.floats(0, 0.6)), draw(st.floats(0, 0.05)))
            )
    return Profile(
        Layout(tuple(specs)),
        draw(st.integers(1, 4)),
        tuple(ready_s),
        tuple(times),
        forward_s=0.5,  # some parameters are read later: by what comes after the model
        backward_s=1.0,
        other_s=draw(st.floats(0, 0.2)),
        link=draw(st.builds(Link, st.floats(0, 0.1), st.floats(0, 5e-4))),
    )


@st.composite
def small_settings(draw: st.DrawFn) -> Settings:
    """Chunks and credit for buckets as small as those of `profiles`, or what the policy chooses."""
    sizes = st.floats(64 / MB, 4096 / MB)
    return Settings(
        codec=draw(st.sampled_from(codecs.names())),
        chunk_mb=draw(sizes | st.just(0.0)),
        fusion_mb=draw(sizes | st.just(0.0)),
        credit_mb=draw(sizes | st.just(0.0)),
    )
