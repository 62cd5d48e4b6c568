"""A link among other ranks keeps to the formulas, their limits and their order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.errors import CommSchedError
from commsched.layout import Layout
from commsched.profile import Link, Profile
from commsched.simulate import ddp, ideal
from commsched.whatif.alpha_beta import (
    ALGORITHMS,
    TREE_RATE,
    at_ranks,
    gbps_of,
    hops,
    link_of,
    per_hop_s,
)
from tests.profiles import profile_of

COUNTS = st.integers(2, 4096)
RATES = st.floats(0.01, 1000)
HOPS_S = st.floats(0, 1e-2)
NAMES = st.sampled_from(ALGORITHMS)


def profile(world_size: int = 2, link: Link | None = None) -> Profile:
    empty = Profile.unmeasured(Layout(()), world_size)
    return replace(empty, link=link or Link(1e-3, 8e-9), measured=True)


def all_reduce_s(found: Profile, nbytes: float) -> float:
    n = found.world_size
    return found.link.alpha_s + 2 * (n - 1) / n * nbytes * found.link.beta_s


@given(NAMES, RATES, HOPS_S)
def test_two_ranks_are_the_measured_ones_whatever_the_algorithm(
    name: str, gbps: float, hop_s: float
) -> None:
    link = Link(2 * hop_s, 8e-9 / gbps)
    found = at_ranks(profile(2, link), 2, algorithm=name).link
    assert found.alpha_s == pytest.approx(link.alpha_s)
    assert found.beta_s == pytest.approx(link.beta_s)


@given(COUNTS, RATES, HOPS_S)
def test_what_was_measured_comes_back(ranks: int, gbps: float, hop_s: float) -> None:
    there = at_ranks(profile(), ranks, gbps, hop_s)
    assert gbps_of(there.link) == pytest.approx(gbps)
    assert per_hop_s(there.link, ranks) == pytest.approx(hop_s)
    again = at_ranks(at_ranks(there, 7), ranks)
    assert again.link.alpha_s == pytest.approx(there.link.alpha_s)
    assert again.link.beta_s == pytest.approx(there.link.beta_s)
    assert at_ranks(there) is there


@given(COUNTS)
def test_latency_grows_with_the_ring_and_with_the_logarithm(ranks: int) -> None:
    assert hops(ranks, "ring") == 2 * (ranks - 1)
    assert 2 ** (hops(ranks, "tree") // 2 - 1) < ranks <= 2 ** (hops(ranks, "tree") // 2)
    assert hops(ranks, "tree") <= hops(ranks, "ring")


@given(NAMES, st.integers(2, 1000), RATES, HOPS_S, st.floats(0, 1e9))
def test_more_ranks_never_take_less(
    name: str, ranks: int, gbps: float, hop_s: float, nbytes: float
) -> None:
    few, more = (at_ranks(profile(), n, gbps, hop_s, name) for n in (ranks, ranks + 1))
    assert all_reduce_s(few, nbytes) <= all_reduce_s(more, nbytes) * (1 + 1e-12)


@given(NAMES, COUNTS, RATES, RATES, HOPS_S, st.floats(0, 1e9))
def test_more_gigabits_never_take_more(
    name: str, ranks: int, one: float, other: float, hop_s: float, nbytes: float
) -> None:
    slow, fast = (at_ranks(profile(), ranks, r, hop_s, name) for r in sorted((one, other)))
    assert all_reduce_s(fast, nbytes) <= all_reduce_s(slow, nbytes)


@pytest.mark.parametrize(("name", "rate"), [("ring", 1.0), ("tree", TREE_RATE)])
def test_bytes_tend_to_twice_the_gradients(name: str, rate: float) -> None:
    nbytes, gbps = 1e8, 10.0
    limit_s = 2 * nbytes * 8e-9 / gbps / rate
    taken = [all_reduce_s(at_ranks(profile(), n, gbps, 0.0, name), nbytes) for n in (4, 64, 1024)]
    assert taken == sorted(taken)
    assert taken[-1] == pytest.approx(limit_s, rel=2e-3)
    assert all(taken_s < limit_s for taken_s in taken)


def test_trees_win_where_latency_counts_and_rings_where_bytes_do() -> None:
    ring, tree = (at_ranks(profile(), 256, 10, 3e-5, name) for name in ("ring", "tree"))
    assert all_reduce_s(tree, 1e5) < all_reduce_s(ring, 1e5)
    assert all_reduce_s(ring, 1e9) < all_reduce_s(tree, 1e9)


@pytest.mark.parametrize("ranks", [2, 3, 8, 100, 1024])
def test_the_simulated_all_reduce_takes_what_the_formula_says(ranks: int) -> None:
    """One bucket that is ready when backward ends: its whole all-reduce is exposed."""
    whole = profile_of("resnet50", cap_mb=1024)
    found = at_ranks(whole, ranks, 10, 3e-5)
    nbytes = whole.layout.nbytes
    formula_s = 2 * (ranks - 1) * 3e-5 + 2 * (ranks - 1) / ranks * nbytes * 8e-10
    late_s = max(0.0, found.backward_s - found.ready_s[-1])
    assert ddp(found).exposed_s == pytest.approx(formula_s - late_s)


@given(st.sampled_from([2, 16, 1024]), st.floats(0.1, 400), st.floats(0.1, 400))
def test_steps_keep_the_order_of_rates(ranks: int, one: float, other: float) -> None:
    base = profile_of("resnet50")
    slow, fast = (at_ranks(base, ranks, rate, 1e-5) for rate in sorted((one, other)))
    assert ddp(fast).step_s <= ddp(slow).step_s + 1e-12
    assert ideal(fast) <= ideal(slow) + 1e-12


def test_a_free_link_stays_free() -> None:
    free = Link(0.0, 0.0)
    assert gbps_of(free) == math.inf
    assert at_ranks(profile(2, free), 64).link == free
    assert link_of(math.inf, 0.0, 64, "tree") == free


def test_one_rank_has_no_link_to_go_by() -> None:
    alone = profile(1, Link(1e-3, 0.0))
    for known in ({}, {"gbps": 10.0}, {"hop_s": 1e-5}):
        with pytest.raises(CommSchedError, match="--gbps and --latency-us"):
            at_ranks(alone, 8, **known)
    assert at_ranks(alone, 8, 10, 1e-5).link == link_of(10, 1e-5, 8)
