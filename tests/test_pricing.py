"""Pricing: what a codec costs in computing, and what it saves on a link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsched import codecs, pricing
from commsched.errors import CommSchedError
from commsched.layout import Chunk, Piece, Span
from commsched.pricing import Price, price
from commsched.profile import Link
from tests.mixed import registered

GIGABIT = Link(1e-3, 8e-9)
LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
MADE_UP = ["coarse", "evens", "twice"]


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("codec", "world_size", "sent", "exact"),
    [
        ("none", 2, 1.0, 1.0),
        ("fp16", 2, 0.5, 1.0),
        ("bf16", 4, 0.75, 1.5),
        ("coarse", 2, 0.5, 1.0),  # half the bytes, in two halves of an all-reduce
        ("coarse", 8, 0.875, 1.75),
        ("evens", 2, 0.5, 1.0),  # half the bytes, whole to every other rank
        ("evens", 4, 1.5, 1.5),
        ("evens", 8, 3.5, 1.75),
        ("twice", 4, 3.0, 1.5),  # all bytes, in two all-reduces
    ],
)
def test_the_link_is_busy_for_what_is_sent(
    codec: str, world_size: int, sent: float, exact: float
) -> None:
    got = price(codec, 3e-9, GIGABIT, world_size)
    assert got.codec == codec
    assert got.coding_s == 3e-9
    assert got.link_s == pytest.approx(sent * 8e-9)
    assert got.exact_link_s == pytest.approx(exact * 8e-9)


def test_a_codec_is_worth_it_where_it_saves_more_than_it_costs() -> None:
    assert price("fp16", 3.9e-9, GIGABIT, 2).worth_it  # saves 4 ns a byte
    assert not price("fp16", 4.1e-9, GIGABIT, 2).worth_it
    assert not price("fp16", 3.9e-9, Link(1e-3, 4e-9), 2).worth_it
    assert price("fp16", 3.9e-9, GIGABIT, 8).worth_it  # saves 7
    assert price("fp16", 6.9e-9, GIGABIT, 8).worth_it


@pytest.mark.parametrize("codec", ["evens", "twice"])
def test_what_sends_more_is_never_worth_it(codec: str) -> None:
    assert not price(codec, 0.0, GIGABIT, 8).worth_it
    assert not price("none", 0.0, GIGABIT, 2).worth_it


@given(st.floats(0, 1e-6), st.floats(0, 1e-6), st.floats(0, 1e-6))
def test_worth_it_is_a_comparison_of_times(coding: float, link: float, exact: float) -> None:
    one = Price("x", coding, link, exact)
    assert one.worth_it == (coding + link < exact)
    if one.worth_it:
        assert Price("x", coding / 2, link / 2, exact).worth_it


def test_it_says_what_it_found_in_milliseconds_a_megabyte() -> None:
    said = str(price("fp16", 3.25e-9, GIGABIT, 2))
    assert said.startswith("codec fp16 takes 3.25 ms to encode and decode 1 MB of gradients")
    assert "saves 4.00 ms of 8.00" in said


# ---------------------------------------------------------------- measuring


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 64 x 64: not the time counts here, but that every codec can be driven."""
    monkeypatch.setattr(pricing, "NUMEL", 4096)
    monkeypatch.setattr(pricing, "_CHUNK", Chunk((Piece(0, 0, 4096, 64),), "float32"))
    monkeypatch.setattr(pricing, "_SPANS", (Span("pricing", 4096, 0, 0, 4096),))


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", LOSSY + MADE_UP)
def test_every_codec_can_be_measured(codec: str, feedback: bool, small: None) -> None:
    if codec == "dgc" and not feedback:
        with pytest.raises(CommSchedError, match="turn it on"):
            pricing.coding_s.__wrapped__(codec, 2, feedback)
        return
    for world_size in range(2, 18):  # shards of one size, and of two
        assert 0 < pricing.coding_s.__wrapped__(codec, world_size, feedback) < 1


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_measured_is_a_usual_chunk(codec: str) -> None:
    """4 MB; between a tenth of a nanosecond a byte and what no link would be worth."""
    assert pricing._CHUNK.nbytes == 4 * pricing.NUMEL == 4 * 2**20
    assert 1e-11 < pricing.coding_s.__wrapped__(codec, 3, codecs.get(codec).biased) < 1e-6


def test_the_work_of_a_codec_is_in_the_time_and_the_mirrors_is_not(small: None) -> None:
    """A codec that sleeps takes as long; a group that sleeps does not count."""
    coarse = type(codecs.get("coarse"))
    encode, copy = coarse.encode, pricing._Mirror.all_to_all

    def slow(self: Any, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        time.sleep(2e-3)
        encode(self, grad, out, seed)

    def idle(self: Any, *args: Any) -> Any:
        time.sleep(20e-3)
        self.own_s += 20e-3
        return copy(self, *args)

    with mock.patch.object(coarse, "encode", slow):
        coding_s = pricing.coding_s.__wrapped__("coarse", 2, True)
    assert 4e-3 <= coding_s * 4 * pricing.NUMEL < 20e-3  # for the other rank, and for both
    with mock.patch.object(pricing._Mirror, "all_to_all", idle):
        assert pricing.coding_s.__wrapped__("coarse", 2, True) * 4 * pricing.NUMEL < 20e-3


def test_it_is_measured_once_for_each_case(small: None) -> None:
    with mock.patch.object(pricing, "_timed", return_value=[1.0, 2.0, 3.0]) as timed:
        pricing.coding_s.cache_clear()
        first = pricing.coding_s("coarse", 2, True)
        assert pricing.coding_s("coarse", 2, True) == first == 1.0 / (4 * pricing.NUMEL)
        assert timed.call_count == 1
        pricing.coding_s("coarse", 2, False)
        pricing.coding_s("coarse", 3, True)
        assert timed.call_count == 3
    pricing.coding_s.cache_clear()
