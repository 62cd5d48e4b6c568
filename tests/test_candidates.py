"""Candidates: what may be chosen, and no more; and what each is predicted to take. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched import codecs
from commsched.plan import Plan
from commsched.profile import Profile
from commsched.rules import parse_rules, used
from commsched.settings import Settings
from commsched.simulate import ddp, ideal
from commsched.tuning.candidates import HIDDEN, Candidate, candidates, plan_of, predict
from tests.profiles import profile_of, profiles, small_settings

ALLOW = st.lists(st.sampled_from(["bf16", "int8", "topk:ratio=0.02"]), unique=True, max_size=3)


def lossy_of(plan: Plan) -> set[str]:
    return {task.codec for task in plan.tasks if codecs.get(task.codec).lossy}


@given(profiles(), st.booleans(), ALLOW)
def test_nothing_lossy_that_is_not_allowed(
    profile: Profile, deferrable: bool, allow: list[str]
) -> None:
    allowed = {str(codecs.get(codec)) for codec in allow}
    for one in candidates(profile, Settings(), deferrable=deferrable, allow=allow):
        assert {codec for codec in used(one.settings) if codecs.get(codec).lossy} <= allowed
        assert lossy_of(plan_of(one, profile)) <= allowed
        assert one.lossy == (one.codec != "none")
        assert not (one.deferred and not deferrable)


@given(profiles(), small_settings(), st.booleans())
def test_a_users_own_codec_is_in_all_candidates_and_nothing_else_is_added(
    profile: Profile, settings: Settings, deferrable: bool
) -> None:
    found = candidates(
        profile, settings, fixed=frozenset({"codec"}), deferrable=deferrable, allow=["powersgd"]
    )
    assert found
    for one in found:
        assert one.settings.codec == settings.codec
        assert one.plain is False or not codecs.get(settings.codec).lossy


@given(profiles(), small_settings(), st.booleans())
def test_what_is_fixed_stays_and_names_are_unique(
    profile: Profile, settings: Settings, deferrable: bool
) -> None:
    settings = replace(settings, codec="none")
    fixed = frozenset({"chunk_mb", "fusion_mb", "credit_mb"})
    found = candidates(profile, settings, fixed=fixed, deferrable=deferrable, allow=["int8"])
    for one in found:
        assert one.settings.chunk_mb == settings.chunk_mb
        assert one.settings.fusion_mb == settings.fusion_mb
        assert one.settings.credit_mb == settings.credit_mb
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert [one.plain for one in found] == [True, *[False] * (len(found) - 1)]


@given(profiles(), st.booleans())
def test_predictions_keep_to_the_bounds(profile: Profile, deferrable: bool) -> None:
    for one in candidates(profile, Settings(), deferrable=deferrable):
        step_s = predict(one, profile).step_s
        if one.plain:
            assert step_s == ddp(profile).step_s
        assert step_s >= ideal(profile) - 1e-9
        assert Candidate.from_dict(one.to_dict()) == one


@pytest.mark.parametrize("architecture", ["resnet50", "gpt2", "vgg16"])
@pytest.mark.parametrize("deferrable", [False, True])
def test_as_few_gradients_are_compressed_as_hide_the_communication(
    architecture: str, deferrable: bool
) -> None:
    profile = profile_of(architecture, cap_mb=4)
    (one,) = (
        one
        for one in candidates(profile, Settings(), deferrable=deferrable, allow=["bf16"])
        if one.lossy
    )
    policy = "priority" if deferrable else "fifo"
    full = Candidate("full", Settings(policy=policy, codec="bf16"), deferrable)
    most = predict(full, profile)
    limit_s = most.exposed_s + HIDDEN * most.step_s
    assert predict(one, profile).exposed_s <= limit_s + 1e-12
    rules = parse_rules(one.settings.codec_rules)
    if one.settings.codec == "none":  # a part: with one fewer it would not be enough
        fewer = ";".join(f"{name}={codec}" for name, codec in rules[:-1])
        part = replace(one, settings=replace(one.settings, codec_rules=fewer))
        assert predict(part, profile).exposed_s > limit_s
        # Those that are ready last.
        bucket = {p.name: at for at, b in enumerate(profile.layout.buckets) for p in b.params}
        chosen = {name for name, _ in rules}
        others = [at for name, at in bucket.items() if name not in chosen]
        assert min(bucket[name] for name in chosen) >= max(others)


def test_a_codec_that_costs_more_than_it_saves_is_no_candidate() -> None:
    profile = profile_of("resnet50", cap_mb=4)
    for cost_s, some in ((0.0, True), (2e-8, False)):
        cost = {"int8": cost_s}
        found = candidates(profile, Settings(), deferrable=False, allow=["int8"], coding_s=cost)
        assert any(one.lossy for one in found) is some
        full = Candidate("full", Settings(policy="fifo", codec="int8"))
        assert (predict(full, profile, cost).step_s < ddp(profile).step_s) is some


def test_small_and_one_dimensional_parameters_stay_exact() -> None:
    profile = profile_of("resnet50", cap_mb=4)
    found = candidates(profile, Settings(), deferrable=True, allow=["int8"])
    one = next(one for one in found if one.lossy)
    numels = {p.name: p.numel for b in profile.layout.buckets for p in b.params}
    assert all(numels[name] >= 1024 for name, _ in parse_rules(one.settings.codec_rules))
