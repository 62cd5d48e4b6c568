"""Advice: hypothetical buckets are those that DDP would make, and the best one is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched import policies
from commsched.advice import CAPS_MB, HOOK_S, WORTH, Advice, advise, rebucketed
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.profile import Link, ParamTimes, Profile
from commsched.settings import MB, Settings
from commsched.simulate import simulate
from tests.profiles import GIGABIT, profile_of, profiles

PRIORITY, FIFO = policies.get("priority"), policies.get("fifo")


# ---------------------------------------------------------------- buckets


def as_ddp_does(profile: Profile, cap_bytes: int) -> list[tuple[str, ...]]:
    """The parameters of each bucket, by torch's own function; buckets sorted."""
    times = {param.name: param.ready_s for param in profile.params}
    rows = [(param, spec) for spec in profile.layout.buckets for param in spec.params]
    rows.sort(key=lambda row: times[row[0].name])
    tensors = [torch.empty(p.numel, dtype=getattr(torch, spec.dtype)) for p, spec in rows]
    sparse = [spec.sparse for _, spec in rows]
    if not rows:
        return []
    indices = list(range(len(rows)))
    found, _ = dist._compute_bucket_assignment_by_size(tensors, [cap_bytes], sparse, indices)
    return sorted(tuple(rows[at][0].name for at in bucket) for bucket in found)


@given(profiles(), st.integers(1, 6000))
def test_buckets_are_those_of_ddp(profile: Profile, cap_bytes: int) -> None:
    buckets = rebucketed(profile, cap_bytes).layout.buckets
    names = [tuple(param.name for param in spec.params) for spec in buckets]
    assert sorted(names) == as_ddp_does(profile, cap_bytes)
    if len({spec.dtype for spec in buckets}) == 1 and not any(spec.sparse for spec in buckets):
        ready = {param.name: param.ready_s for param in profile.params}
        flat = [ready[name] for bucket in names for name in bucket]
        assert flat == sorted(flat)


@given(profiles(), st.integers(1, 6000))
@settings(max_examples=50)
def test_nothing_is_lost_and_hooks_come_in_order(profile: Profile, cap_bytes: int) -> None:
    guess = rebucketed(profile, cap_bytes)
    kinds = [
        {(param, spec.dtype, spec.sparse) for spec in item.layout.buckets for param in spec.params}
        for item in (profile, guess)
    ]
    assert kinds[0] == kinds[1]
    assert sorted(guess.params, key=repr) == sorted(profile.params, key=repr)
    specs = [param for spec in guess.layout.buckets for param in spec.params]
    assert [param.name for param in guess.params] == [param.name for param in specs]
    assert len(guess.ready_s) == len(guess.layout.buckets)
    assert list(guess.ready_s) == sorted(guess.ready_s)
    assert guess.backward_s >= max(guess.ready_s, default=0.0)


def test_a_bucket_is_ready_with_its_last_gradient_and_each_hook_costs() -> None:
    times = tuple(ParamTimes(f"p{at}", at + 1.0, 0.0, 0.0) for at in range(4))
    one = BucketSpec(tuple(ParamSpec(f"p{at}", 10) for at in range(4)), "float32")
    whole = Profile(Layout((one,)), 2, (4.5,), times, 1.0, 5.0, 0.0, GIGABIT)
    guess = rebucketed(whole, 80)
    assert [len(spec.params) for spec in guess.layout.buckets] == [2, 2]
    assert guess.ready_s == pytest.approx((2 + HOOK_S, 4 + 2 * HOOK_S))
    assert guess.backward_s == pytest.approx(5 + HOOK_S)
    # Back again: the hooks that are no longer called are no longer paid for.
    again = rebucketed(guess, 10**6)
    assert again.ready_s == pytest.approx((4.0,), abs=2 * HOOK_S)
    assert again.backward_s == pytest.approx(5.0)


def test_the_same_cap_gives_the_same_buckets_at_the_same_times() -> None:
    profile = profile_of("resnet50", 8)
    again = rebucketed(profile, 8 * MB)
    assert again.layout == profile.layout
    assert again.ready_s == pytest.approx(profile.ready_s, abs=len(profile.ready_s) * HOOK_S)
    assert again.backward_s == pytest.approx(profile.backward_s)


# ---------------------------------------------------------------- advice


def predicted(profile: Profile, cap_mb: int) -> float:
    guess = rebucketed(profile, cap_mb * MB)
    return simulate(PRIORITY(guess, Settings()), guess).step_s


def test_the_best_cap_is_the_one_with_the_shortest_step() -> None:
    for model in ("resnet50", "gpt2"):
        profile = profile_of(model, 25)
        advice = advise(profile, Settings(), PRIORITY)
        steps = {cap: predicted(profile, cap) for cap in CAPS_MB}
        assert advice.best_s == steps[advice.best_cap_mb] == min(steps.values())
        assert advice.present_s == simulate(PRIORITY(profile, Settings()), profile).step_s


def test_a_cap_much_too_large_is_said_with_what_a_better_one_saves() -> None:
    profile = profile_of("gpt2", 50)
    advice = advise(profile, Settings(), PRIORITY)
    assert advice.best_cap_mb < 25
    assert advice.gain > 0.05
    saved_ms = (advice.present_s - advice.best_s) * 1e3
    assert saved_ms == pytest.approx(advice.gain * advice.present_s * 1e3)
    text = str(advice)
    assert f"bucket_cap_mb={advice.best_cap_mb} " in text
    assert f"{advice.gain:.0%}" in text
    assert "\n" not in text


def test_what_it_advises_needs_no_advice() -> None:
    for model in ("resnet50", "gpt2"):
        advice = advise(profile_of(model, 50), Settings(), PRIORITY)
        following = advise(profile_of(model, advice.best_cap_mb), Settings(), PRIORITY)
        assert following.gain < WORTH
        assert "nothing to change" in str(following)


def test_where_hooks_cost_more_than_they_hide_buckets_stay_large() -> None:
    advice = advise(profile_of("resnet50", 25, Link(0.0, 0.0)), Settings(), PRIORITY)
    assert advice.best_cap_mb == max(CAPS_MB)
    assert "nothing to change" in str(advice)


def test_without_the_optimizer_the_wait_is_in_backward() -> None:
    profile = profile_of("resnet50", 50)
    advice = advise(profile, Settings(), FIFO, deferred=False)
    assert advice.present_s == simulate(FIFO(profile, Settings()), profile, False).step_s
    assert advice.best_s < advice.present_s


@pytest.mark.parametrize(("best_s", "said"), [(0.981, False), (0.979, True), (1.5, False)])
def test_little_is_not_worth_a_change(best_s: float, said: bool) -> None:
    advice = Advice(1.0, best_s, 8)
    assert ("bucket_cap_mb" in str(advice)) == said
    assert ("nothing to change" in str(advice)) != said


def test_a_model_without_gradients_is_fine() -> None:
    empty = replace(profile_of("resnet50"), layout=Layout(()), ready_s=(), params=())
    assert advise(empty, Settings(), PRIORITY).gain <= 0
    zero = replace(empty, forward_s=0.0, backward_s=0.0, other_s=0.0)
    assert "nothing to change" in str(advise(zero, Settings(), PRIORITY))
