"""Phases: when to measure, plan and defer; the same on every rank, and again when steps drift."""

from __future__ import annotations

import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commsched.tuning import phases
from commsched.tuning.phases import MEASURE, Event, Phases
from tests.deferring import Training, differ
from tests.distributed import ranks


def settled() -> Phases:
    """Phases that have planned."""
    one = Phases()
    for _ in range(MEASURE + 1):
        assert one.begin() is Event.NOTHING
        one.end([0, 1])
    assert one.begin() is Event.MEASURED
    return one


def test_a_plan_is_made_once_after_equal_steps() -> None:
    one = settled()
    assert not one.measuring
    assert one.begin() is Event.NOTHING
    assert one.knows(1)
    assert not one.knows(2)


def test_other_buckets_mean_measuring_again() -> None:
    one = settled()
    one.end([0, 2])
    assert one.measuring
    for _ in range(MEASURE):
        assert one.begin() is Event.NOTHING
        one.end([0, 2])
    assert one.begin() is Event.MEASURED


def test_buckets_that_always_change_are_always_measured() -> None:
    one = Phases()
    for step in range(50):
        assert one.begin() is Event.NOTHING
        assert one.unsteady
        one.end([0, 1 + step % 2])


def test_nothing_is_planned_before_it_may_be() -> None:
    one = Phases()
    for _ in range(20):
        assert one.begin(may_plan=False) is Event.NOTHING
        one.end([0])
    assert not one.unsteady
    assert one.begin() is Event.MEASURED


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_trial_is_over_after_its_steps_and_then_nothing_is_tried(trials: list[int]) -> None:
    one = settled()
    for steps in [*trials, 0]:
        one.end([0, 1])
        one.try_for(steps)
        for _ in range(steps):
            assert one.name == "trying"
            assert one.begin() is Event.NOTHING
            one.end([0, 1])
        if steps:
            assert one.begin() is Event.TRIED
    assert one.name == "settled"
    assert one.begin() is Event.NOTHING


def test_other_buckets_end_a_trial() -> None:
    one = settled()
    one.end([0, 1])
    one.try_for(3)
    one.begin()
    one.end([0, 2])
    one.try_for(3)  # what was agreed on meanwhile is of the old buckets
    assert one.name == "measuring"
    assert one.begin() is Event.NOTHING


def steps_until_check(one: Phases) -> int:
    for step in range(10_000):
        one.end([0, 1])
        if one.begin() is Event.CHECK:
            return step
    raise AssertionError("never")


@pytest.mark.parametrize(("ratio", "again"), [(1.0, False), (1.2, False), (1.5, True), (0.5, True)])
def test_a_drift_beyond_tolerance_means_measuring_again(ratio: float, again: bool) -> None:
    one = settled()
    assert steps_until_check(one) == phases.CHECK - 1
    assert one.drifted(ratio) is again
    assert one.measuring is again
    one.try_for(0)
    assert one.name == ("measuring" if again else "settled")


def test_looks_become_rarer_with_each_new_measurement() -> None:
    one, gaps = settled(), []
    for _ in range(4):
        gaps.append(steps_until_check(one))
        one.drifted(2.0)
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3 * phases.CHECK


@ranks(2)
def test_ranks_measure_again_together_when_steps_take_longer(rank: int) -> None:
    with mock.patch.object(phases, "CHECK", 6):
        ours, plain = Training(), Training(plain=True)
        ours.step(rank)  # the phases begin with the first bucket
    plain.step(rank)
    deferred = []
    for step in range(40):
        if step > 20 and rank == 1:
            time.sleep(0.03)  # one slow rank slows all
        ours.step(rank)
        plain.step(rank)
        deferred.append(ours.pending() > 0)
    assert ours.state is not None
    assert ours.state._session is not None
    made = ours.state._session.engine.planner.made
    assert made is not None
    profile = made.profile
    assert profile is not None
    # Planned, then measured again at least once, then deferred again.
    changes = [a != b for a, b in pairwise(deferred)]
    assert sum(changes) >= 3
    assert deferred[-1]
    assert not differ(ours.values(), plain.values())
    both: list[list[bool]] = [[], []]
    dist.all_gather_object(both, deferred)
    assert both[0] == both[1]
    digests: list[object] = [None, None]
    dist.all_gather_object(digests, profile.to_json())
    assert digests[0] == digests[1]
    assert torch.isfinite(torch.tensor(profile.compute_s))
    ours.close()
