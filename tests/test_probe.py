"""Probing the link and agreeing on a profile: equal on all ranks, whatever each one measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.errors import CommSchedError
from commsched.group import Board, Group, Membership
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.probe import agree_on_median, agree_on_profile, fit_link, probe_link
from commsched.profile import Link, ParamTimes, Profile
from commsched.recorder import Recorder
from tests.distributed import ranks

LAYOUT = Layout(
    (
        BucketSpec((ParamSpec("head.bias", 10), ParamSpec("head.weight", 30)), "float32"),
        BucketSpec((ParamSpec("body", 60),), "float32"),
    )
)


def measured(scale: float = 1.0, layout: Layout = LAYOUT, used: bool = True) -> dict[str, Any]:
    """A recorder's summary of steps in which everything took `scale` times as long."""
    now_s = [0.0]

    def go(seconds: float) -> None:
        now_s[0] += seconds * scale

    recorder = Recorder(now=lambda: now_s[0])
    for _ in range(3):
        recorder.forward_begins()
        go(0.25)
        if used:
            recorder.used("body")
        go(0.25)
        recorder.forward_ends()
        for key, spec in enumerate(layout.buckets):
            go(1.0)
            recorder.bucket_ready(key, spec)
        recorder.backward_ends()
        begin_s = now_s[0]
        go(1.0)
        recorder.stepped(begin_s, now_s[0], {"head.bias": 10, "head.weight": 30, "body": 60})
        go(0.125)
    recorder.forward_begins()
    return recorder.summary()


# ---------------------------------------------------------------- ranks as threads


class Done:
    """The work of a collective that takes no time."""

    def wait(self) -> None:
        pass


class Rank:
    """One rank's view of a world of threads."""

    def __init__(self, rows: list[bytes], barrier: threading.Barrier, rank: int) -> None:
        self.rows, self.barrier, self.rank = rows, barrier, rank
        self.size = len(rows)
        self.calls: list[int] = []  # how much each collective carried

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self.calls.append(0)
        self.rows[self.rank] = payload
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows

    def broadcast_bytes(self, payload: bytes) -> bytes:
        return self.all_gather_bytes(payload)[0]

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.calls.append(tensor.nbytes)
        return Done()


def on_threads(size: int, body: Callable[[Rank], Any]) -> list[Any]:
    """What `body` gives or raises on each rank; all have taken part in the same collectives."""
    barrier, rows = threading.Barrier(size, timeout=20), [b""] * size
    world = [Rank(rows, barrier, rank) for rank in range(size)]

    def guarded(rank: Rank) -> Any:
        try:
            return body(rank)
        except CommSchedError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        ends = list(pool.map(guarded, world))
    assert all(rank.calls == world[0].calls for rank in world)
    return ends


def agreed(*summaries: dict[str, Any], layouts: list[Layout] | None = None) -> list[Any]:
    def body(group: Rank) -> Profile:
        layout = LAYOUT if layouts is None else layouts[group.rank]
        return agree_on_profile(group, layout, len(summaries), summaries[group.rank])

    return on_threads(len(summaries), body)


# ---------------------------------------------------------------- probing


class Wire:
    """An only rank's view of `size` ranks on a link that takes `alpha_s` + bytes x `beta_s`."""

    rank = 0

    def __init__(self, size: int, alpha_s: float, beta_s: float) -> None:
        self.size, self.alpha_s, self.beta_s = size, alpha_s, beta_s
        self.now_s = self.free_s = 0.0
        self.sent: list[int] = []

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size

    def broadcast_bytes(self, payload: bytes) -> bytes:
        return payload

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.nbytes)
        factor = 2 * (self.size - 1) / self.size
        self.free_s = max(self.now_s, self.free_s) + factor * tensor.nbytes * self.beta_s
        return Arriving(self, self.free_s + self.alpha_s)


class Arriving:
    def __init__(self, wire: Wire, at_s: float) -> None:
        self.wire, self.at_s = wire, at_s

    def wait(self) -> None:
        self.wire.now_s = max(self.wire.now_s, self.at_s)


alphas = st.floats(1e-5, 5e-3)
betas = st.floats(1e-10, 1e-7)  # 80 Gbit/s to 80 Mbit/s


@given(st.integers(2, 64), alphas, betas)
@settings(deadline=None)
def test_a_links_line_is_found(size: int, alpha_s: float, beta_s: float) -> None:
    wire = Wire(size, alpha_s, beta_s)
    link = probe_link(wire, lambda: wire.now_s)
    assert link.beta_s == pytest.approx(beta_s, rel=1e-3)
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-3)


@pytest.mark.parametrize(
    ("gbit", "most_s"), [(100, 0.05), (10, 0.2), (1, 0.45), (0.1, 0.3), (0.01, 0.5)]
)
@pytest.mark.parametrize("size", [2, 64])
def test_probing_takes_bounded_time(size: int, gbit: float, most_s: float) -> None:
    wire = Wire(size, 1e-4, 8e-9 / gbit)
    probe_link(wire, lambda: wire.now_s)
    assert wire.now_s < most_s


def test_one_rank_has_no_link() -> None:
    wire = Wire(1, 1e-4, 8e-9)
    assert probe_link(wire, lambda: wire.now_s) == Link(pytest.approx(1e-4), 0.0)


@given(st.floats(1e-7, 10), st.floats(1e-7, 10))
def test_noise_gives_no_nonsense(fast_s: float, slow_s: float) -> None:
    link = fit_link([(4e3, fast_s), (1e5, 1.0), (8e6, slow_s)])
    assert 0 < link.alpha_s <= fast_s
    assert 0 < link.beta_s <= slow_s / 7e6


def test_ranks_with_other_clocks_send_the_same_and_find_the_same() -> None:
    def body(group: Rank) -> Link:
        ticks = iter(range(10**6))  # every look at the clock is later, on rank 1 much later
        return probe_link(group, lambda: next(ticks) * (1e-3, 0.2, 2e-3)[group.rank])

    links = on_threads(3, body)
    assert links[0] == links[1] == links[2]


# ---------------------------------------------------------------- agreeing


def test_the_profile_is_the_median_of_ranks() -> None:
    profiles = agreed(measured(2.0), measured(1.0), measured(10.0))
    assert profiles[0] == profiles[1] == profiles[2]
    assert profiles[0] == Profile(
        layout=LAYOUT,
        world_size=3,
        ready_s=(2.0, 4.0),
        params=(
            ParamTimes("head.bias", 2.0, 0.0, pytest.approx(0.2)),
            ParamTimes("head.weight", 2.0, 0.0, pytest.approx(0.6)),
            ParamTimes("body", 4.0, 0.5, pytest.approx(1.2)),
        ),
        forward_s=1.0,
        backward_s=4.0,
        other_s=0.25,
        link=profiles[0].link,
    )
    assert profiles[0].compute_s == pytest.approx(7.25)


def test_of_two_ranks_it_is_the_mean() -> None:
    first, second = agreed(measured(1.0), measured(2.0))
    assert first == second
    assert first.forward_s == 0.75
    assert first.ready_s == (1.5, 3.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_a_parameter_is_ready_before_its_bucket_on_any_mix_of_ranks(scales: list[float]) -> None:
    profile, *others = agreed(*map(measured, scales))
    assert all(other == profile for other in others)
    assert Profile.from_json(profile.to_json()) == profile
    ready = {p.name: p.ready_s for p in profile.params}
    for bucket, bucket_s in zip(LAYOUT.buckets, profile.ready_s, strict=True):
        assert all(ready[param.name] <= bucket_s <= profile.backward_s for param in bucket.params)


def test_a_rank_that_never_saw_a_parameter_used_asks_for_it_at_once() -> None:
    uses = [p.params[2].use_s for p in agreed(measured(), measured(used=False), measured())]
    assert uses == [0.25] * 3
    uses = [p.params[2].use_s for p in agreed(measured(used=False), measured(used=False))]
    assert uses == [0.0] * 2


def test_a_rank_without_a_complete_step_has_no_say() -> None:
    profiles = agreed(Recorder().summary(), measured(3.0))
    assert profiles[0] == profiles[1]
    assert profiles[0].forward_s == 1.5


def test_where_no_rank_has_measured_only_the_link_is_known() -> None:
    first, second = agreed(Recorder().summary(), Recorder().summary())
    assert first == second
    assert not first.measured
    assert replace(first, link=Link(0.0, 0.0)) == Profile.unmeasured(LAYOUT, 2)


def test_a_bucket_that_ddp_left_out_is_ready_with_the_one_before_it() -> None:
    first, second = agreed(*[measured(layout=Layout(LAYOUT.buckets[:1]))] * 2)
    assert first == second
    assert first.ready_s == (1.0, 1.0)
    assert first.params[2] == ParamTimes("body", 1.0, 0.0, 0.0)
    first, second = agreed(*[measured(layout=Layout(LAYOUT.buckets[1:]))] * 2)
    assert first.ready_s == (0.0, 1.0)
    assert first.params[0] == ParamTimes("head.bias", 0.0, 0.0, 0.0)


RENAMED = Layout((LAYOUT.buckets[0], BucketSpec((ParamSpec("torso", 60),), "float32")))
RESIZED = Layout((LAYOUT.buckets[0], BucketSpec((ParamSpec("body", 61),), "float32")))
NOT_A_NUMBER = {**measured(), "forward_s": float("nan")}


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (measured(layout=RENAMED), "measured parameters that the plan does not have (torso)"),
        (measured(layout=RESIZED), "measured other buckets than the plan's"),
        (NOT_A_NUMBER, "measured times that are not numbers"),
    ],
    ids=["names", "sizes", "nan"],
)
def test_a_misfit_is_an_error_on_every_rank(summary: dict[str, Any], said: str) -> None:
    errors = agreed(measured(), measured(), summary)
    assert all(isinstance(error, CommSchedError) for error in errors)
    assert len(set(map(str, errors))) == 1
    assert f"rank 2: {said}" in str(errors[0])
    assert "rank 0" not in str(errors[0])


def test_other_buckets_than_rank_0s_are_an_error_on_every_rank() -> None:
    layouts = [LAYOUT, RESIZED, LAYOUT]
    errors = agreed(measured(), measured(layout=RESIZED), measured(), layouts=layouts)
    assert all(isinstance(error, CommSchedError) for error in errors)
    assert "rank 1: other buckets than rank 0's" in str(errors[2])


def test_ranks_agree_on_the_median_of_a_number() -> None:
    numbers = (1.5, 9.0, 1.0)
    assert on_threads(3, lambda group: agree_on_median(group, numbers[group.rank])) == [1.5] * 3


# ---------------------------------------------------------------- real ranks


def make_group() -> Group:
    member = Membership(dist.group.WORLD)
    board = Board(member)
    board.join(20.0, lambda: False)
    return Group(member, board, 4, 20.0)


@ranks(2)
def test_loopback_is_probed_within_a_second(rank: int) -> None:
    group = make_group()
    begin_s = time.monotonic()
    link = probe_link(group)
    assert time.monotonic() - begin_s < 1.0
    assert 1e-6 < link.alpha_s < 0.1
    assert 1e-12 < link.beta_s < 1e-6
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, link)
    assert theirs[0] == theirs[1]


@pytest.mark.parametrize("fits", [True, False])
@ranks(3)
def test_real_ranks_agree(rank: int, fits: bool) -> None:
    group = make_group()
    mine = measured(1.0 + rank, LAYOUT if fits or rank != 1 else RENAMED)
    if fits:
        profile = agree_on_profile(group, LAYOUT, 3, mine)
        assert profile.forward_s == 1.0
        said = profile.to_json()
    else:
        with pytest.raises(CommSchedError, match=r"rank 1: measured .*torso") as caught:
            agree_on_profile(group, LAYOUT, 3, mine)
        said = str(caught.value)
    theirs: list[Any] = [None] * 3
    dist.all_gather_object(theirs, said)
    assert len(set(theirs)) == 1
