"""Phases: when to measure, plan and defer; the same on every rank, and again when steps drift."""

from __future__ import annotations

import time
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commsched import overlap, phases
from commsched.phases import MEASURE, Phases
from tests.deferring import Training, differ
from tests.distributed import ranks


def settled() -> Phases:
    """Phases that have planned."""
    one = Phases()
    for _ in range(MEASURE + 1):
        assert not one.begin()
        one.end([0, 1])
    assert one.begin()
    return one


def test_a_plan_is_made_once_after_equal_steps() -> None:
    one = settled()
    assert not one.measuring
    assert not one.begin()
    assert one.knows(1)
    assert not one.knows(2)


def test_other_buckets_mean_measuring_again() -> None:
    one = settled()
    one.end([0, 2])
    assert one.measuring
    for _ in range(MEASURE):
        assert not one.begin()
        one.end([0, 2])
    assert one.begin()


def test_buckets_that_always_change_are_always_measured() -> None:
    one = Phases()
    for step in range(50):
        assert not one.begin()
        one.end([0, 1 + step % 2])


@pytest.mark.parametrize(("ratio", "again"), [(1.0, False), (1.2, False), (1.5, True), (0.5, True)])
def test_a_drift_beyond_tolerance_means_measuring_again(ratio: float, again: bool) -> None:
    one = settled()
    due = [step for step in range(300) if one.check_due() or one.end([0, 1])]
    assert due[0] == phases.CHECK  # and stays due until somebody looks
    assert one.drifted(ratio) is again
    assert one.measuring is again
    assert not one.check_due()


def test_looks_become_rarer_with_each_new_measurement() -> None:
    one = settled()
    looks = []
    for step in range(20 * phases.CHECK):
        one.begin()
        if one.check_due():
            looks.append(step)
            one.drifted(2.0)
        one.end([0, 1])
    gaps = [after - before for before, after in pairwise(looks)]
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


@ranks(2)
def test_nothing_is_deferred_where_nothing_would_be_gained(rank: int) -> None:
    ours, plain = Training(policy="auto"), Training(plain=True)
    with mock.patch.object(overlap, "DEFER_S", 1.0):  # as if each parameter cost a second
        for _ in range(15):
            ours.step(rank)
            plain.step(rank)
            assert ours.pending() == 0
    assert ours.state is not None
    assert ours.state._session is not None
    assert ours.state._session.overlap is not None
    outlook = ours.state._session.overlap.outlook()
    assert outlook is not None
    assert not outlook.worth_it
    assert outlook.step_s == outlook.synchronous_s
    assert not differ(ours.values(), plain.values())
    ours.close()
