"""Simulation: the engine's rules, by hand and at large; and nothing beats the ideal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commsched import policies
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.plan import Plan, Task
from commsched.profile import Link, ParamTimes, Profile
from commsched.settings import Settings
from commsched.simulate import Timeline, ddp, ideal, link_seconds, simulate
from tests.mixed import mixed_settings, registered, shaped, with_shapes
from tests.profiles import profile_of, profiles, small_settings

EPS = 1e-9
# The unit of the examples by hand: one element of float32 takes one second on the link of 2 ranks.
SECONDS = 0.25


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


any_profile = profiles() | with_shapes(shaped())
any_settings = small_settings() | mixed_settings()


@st.composite
def plans(
    draw: st.DrawFn, chosen: st.SearchStrategy[Settings] = any_settings
) -> tuple[Plan, Profile]:
    """Any policy's plan, or one in an order that has nothing to do with readiness."""
    profile = draw(any_profile)
    name = draw(st.sampled_from(policies.names()))
    plan = policies.get(name)(profile, draw(chosen))
    if name == "fifo" and draw(st.booleans()):
        plan = replace(plan, tasks=in_turn(draw(st.permutations(plan.tasks))))
    return plan, profile


def in_turn(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The same order of chunks, each chunk's own tasks in theirs."""
    turns = {
        chunk: iter(sorted((t for t in tasks if t.chunk == chunk), key=lambda task: task.round))
        for chunk in {task.chunk for task in tasks}
    }
    return tuple(next(turns[task.chunk]) for task in tasks)


def any_plan(test: Callable[..., None]) -> Callable[..., None]:
    """For any plan and the profile it was made for."""
    return settings(max_examples=60)(given(plans())(test))


# ---------------------------------------------------------------- by hand


def by_hand(
    *numels: int, ready_s: Sequence[float], use_s: Sequence[float], alpha_s: float = 0.0
) -> Profile:
    """One parameter a bucket; an optimizer step takes 1 s, and so does what is between steps."""
    buckets = tuple(
        BucketSpec((ParamSpec(f"p{at}", numel),), "float32") for at, numel in enumerate(numels)
    )
    params = tuple(
        ParamTimes(f"p{at}", ready, use, 1.0)
        for at, (ready, use) in enumerate(zip(ready_s, use_s, strict=True))
    )
    link = Link(alpha_s, SECONDS)
    return Profile(Layout(buckets), 2, tuple(ready_s), params, 10.0, 20.0, 1.0, link)


def chunk_of(bucket: int, numel: int, start: int = 0) -> Chunk:
    return Chunk((Piece(bucket, start, numel),), "float32")


def plan_of(profile: Profile, *steps: tuple[str, Chunk], credit: int = 10**6) -> Plan:
    chunks = [chunk for _, chunk in steps]
    tasks = tuple(
        Task(at, op, chunk, "none", chunks[:at].count(chunk))
        for at, (op, chunk) in enumerate(steps)
    )
    return Plan("by hand", profile.layout, tasks, credit)


TWO = by_hand(8, 6, ready_s=(4, 18), use_s=(5, 0), alpha_s=2.0)
ALL = "all_reduce"


def test_tasks_wait_for_the_hook_the_latency_and_the_link() -> None:
    plan = plan_of(TWO, (ALL, chunk_of(0, 4)), (ALL, chunk_of(0, 4, 4)), (ALL, chunk_of(1, 6)))
    times = simulate(plan, TWO).tasks
    assert [item.ready_s for item in times] == [4, 4, 18]
    assert [item.issued_s for item in times] == [4, 4, 18]
    assert [item.begin_s for item in times] == [6, 10, 20]  # the second one's latency is hidden
    assert [item.end_s for item in times] == [10, 14, 26]


def test_credit_holds_a_task_back_so_that_its_latency_shows() -> None:
    steps = [(ALL, chunk_of(0, 4)), (ALL, chunk_of(0, 4, 4))]
    times = simulate(plan_of(TWO, *steps, credit=31), TWO).tasks
    assert [item.issued_s for item in times] == [4, 10]
    assert [item.begin_s for item in times] == [6, 12]
    assert simulate(plan_of(TWO, *steps, credit=32), TWO).tasks[1].issued_s == 4
    assert [item.issued_s for item in simulate(plan_of(TWO, *steps, credit=1), TWO).tasks] == [
        4,
        10,
    ]


def test_a_head_that_is_not_ready_blocks_what_is_behind_it() -> None:
    plan = plan_of(TWO, (ALL, chunk_of(1, 6)), (ALL, chunk_of(0, 8)))
    assert [item.issued_s for item in simulate(plan, TWO).tasks] == [18, 18]


def test_a_fused_chunk_waits_for_its_last_bucket() -> None:
    chunk = Chunk((Piece(0, 0, 8), Piece(1, 0, 6)), "float32")
    (times,) = simulate(plan_of(TWO, (ALL, chunk)), TWO).tasks
    assert (times.ready_s, times.end_s) == (18, 18 + 2 + 14)


def test_halves_take_half_the_link_and_the_second_waits_for_the_first() -> None:
    steps = [("reduce_scatter", chunk_of(0, 8)), ("all_gather", chunk_of(0, 8))]
    times = simulate(plan_of(TWO, *steps), TWO).tasks
    assert [(item.issued_s, item.begin_s, item.end_s) for item in times] == [
        (4, 6, 10),
        (10, 12, 16),
    ]


def test_forward_waits_where_a_parameter_is_first_read() -> None:
    """Backward 0..20, the rest ..21; p1 is read at once, p0 five seconds of computing later."""
    plan = plan_of(TWO, (ALL, chunk_of(1, 6)), (ALL, chunk_of(0, 8)))  # over at 26 and 34
    timeline = simulate(plan, TWO)
    # p1: 21 -> 26, its step -> 27, computing -> 32, p0 -> 34, its step -> 35, computing -> 40.
    assert timeline.bucket_exposed_s == (2, 5)
    assert timeline.exposed_s == 7
    assert timeline.step_s == 40 == TWO.compute_s + 7


def test_each_wait_is_for_the_last_task_of_a_parameter_and_only_for_that() -> None:
    steps = [(ALL, chunk_of(0, 4)), (ALL, chunk_of(1, 6)), (ALL, chunk_of(0, 4, 4))]
    timeline = simulate(plan_of(TWO, *steps), TWO)
    assert [item.end_s for item in timeline.tasks] == [10, 26, 30]
    assert timeline.bucket_exposed_s == (0, 5)  # forward is at p0 at 32


def test_all_is_over_when_forward_is() -> None:
    late = by_hand(8, ready_s=(20,), use_s=(99,))  # read by what comes after forward
    timeline = simulate(plan_of(late, (ALL, chunk_of(0, 8))), late)
    assert timeline.step_s == late.compute_s  # 20 + 8 < 20 + 1 + 10
    long = by_hand(80, ready_s=(20,), use_s=(99,))
    timeline = simulate(plan_of(long, (ALL, chunk_of(0, 80))), long)
    assert timeline.step_s == 20 + 80 + 1


def test_not_deferred_backward_waits_for_everything() -> None:
    plan = plan_of(TWO, (ALL, chunk_of(0, 8)), (ALL, chunk_of(1, 6)))
    timeline = simulate(plan, TWO, deferred=False)
    assert timeline.step_s == TWO.compute_s + 6
    assert timeline.bucket_exposed_s == (0, 6)


def test_plain_ddp_sends_buckets_whole_and_waits_in_backward() -> None:
    timeline = ddp(replace(TWO, ready_s=(17, 18)))
    assert [(item.issued_s, item.end_s) for item in timeline.tasks] == [(17, 27), (18, 33)]
    assert timeline.bucket_exposed_s == (7, 6)


def test_the_ideal_by_hand() -> None:
    """p1 overtakes p0 at 18; without it p0 would be over at 22, with it p1 is at 24, p0 at 28."""
    profile = by_hand(8, 6, ready_s=(14, 18), use_s=(2, 0), alpha_s=2.0)
    # p1 is due at 21, p0 at 21 + its step 1 + computing 2 = 24: late by 3 and by 4.
    assert ideal(profile) == profile.compute_s + 4
    sooner = replace(profile.params[0], ready_s=10.0)
    assert ideal(replace(profile, params=(sooner, profile.params[1]))) == profile.compute_s + 3


# ---------------------------------------------------------------- the engine's rules


def check_rules(plan: Plan, profile: Profile, timeline: Timeline) -> None:
    alpha_s = profile.link.alpha_s
    before_s: dict[Chunk, float] = {}
    for task, times in zip(plan.tasks, timeline.tasks, strict=True):
        hooks_s = max(profile.ready_s[piece.bucket] for piece in task.chunk.pieces)
        expected_s = before_s[task.chunk] if task.round else hooks_s
        assert times.ready_s == expected_s >= hooks_s
        assert times.issued_s >= times.ready_s
        assert times.begin_s >= times.issued_s + alpha_s
        assert times.end_s == pytest.approx(times.begin_s + link_seconds(task, profile))
        before_s[task.chunk] = times.end_s
    for first, second in pairwise(timeline.tasks):
        assert first.issued_s <= second.issued_s
        assert first.end_s <= second.begin_s


@any_plan
def test_order_readiness_latency_and_one_link(case: tuple[Plan, Profile]) -> None:
    check_rules(*case, simulate(*case))


@any_plan
def test_credit_is_kept_and_nothing_waits_without_a_reason(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    times = simulate(plan, profile).tasks
    for at, (task, own) in enumerate(zip(plan.tasks, times, strict=True)):
        before = list(zip(plan.tasks[:at], times[:at], strict=True))
        in_flight = sum(other.wire_bytes for other, item in before if item.end_s > own.issued_s)
        assert not in_flight or in_flight + task.wire_bytes <= plan.credit_bytes
        last_s = max((item.issued_s for _, item in before), default=0.0)
        if own.issued_s > max(
            own.ready_s, last_s
        ):  # then it waited for credit, as briefly as can be
            sooner = [(t, item) for t, item in before if item.end_s >= own.issued_s]
            assert any(item.end_s == own.issued_s for _, item in sooner)
            assert sum(t.wire_bytes for t, _ in sooner) + task.wire_bytes > plan.credit_bytes


@any_plan
def test_exposed_communication_adds_up(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    last_s = max((item.end_s for item in simulate(plan, profile).tasks), default=0.0)
    for deferred in (True, False):
        timeline = simulate(plan, profile, deferred)
        assert len(timeline.bucket_exposed_s) == len(profile.layout.buckets)
        assert min(timeline.bucket_exposed_s, default=0.0) >= 0
        assert timeline.step_s == pytest.approx(profile.compute_s + timeline.exposed_s)
        assert timeline.step_s >= last_s - EPS
    assert timeline.exposed_s == pytest.approx(max(0.0, last_s - profile.backward_s))


@any_plan
def test_deferring_never_costs(case: tuple[Plan, Profile]) -> None:
    assert simulate(*case).step_s <= simulate(*case, deferred=False).step_s + EPS


@given(plans(), st.floats(0, 1), st.floats(0, 1), st.integers(0, 4096))
@settings(max_examples=50)
def test_a_better_link_or_more_credit_never_costs(
    case: tuple[Plan, Profile], alpha: float, beta: float, more: int
) -> None:
    plan, profile = case
    link = Link(profile.link.alpha_s * alpha, profile.link.beta_s * beta)
    better = replace(profile, link=link)
    richer = replace(plan, credit_bytes=plan.credit_bytes + more)
    for deferred in (True, False):
        step_s = simulate(plan, profile, deferred).step_s
        assert simulate(plan, better, deferred).step_s <= step_s + EPS
        assert simulate(richer, profile, deferred).step_s <= step_s + EPS
    assert ideal(better) <= ideal(profile) + EPS


@any_plan
def test_two_halves_send_what_an_all_reduce_sends(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    for task in plan.tasks:
        whole_s, *halves_s = (
            link_seconds(replace(task, op=op), profile)
            for op in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert whole_s == pytest.approx(sum(halves_s))
        share = 2 * (profile.world_size - 1) / profile.world_size
        assert whole_s == pytest.approx(task.wire_bytes * share * profile.link.beta_s)


@any_plan
def test_what_goes_whole_to_all_is_sent_to_each(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    for task in plan.tasks:
        gather_s = link_seconds(replace(task, op="gather"), profile)
        share = profile.world_size - 1
        assert gather_s == pytest.approx(task.wire_bytes * share * profile.link.beta_s)


@any_plan
def test_the_link_is_busy_for_what_is_sent(case: tuple[Plan, Profile]) -> None:
    plan, profile = case
    busy_s = sum(item.end_s - item.begin_s for item in simulate(plan, profile).tasks)
    sent = sum(task.sent_bytes(profile.world_size) for task in plan.tasks)
    assert busy_s == pytest.approx(sent * profile.link.beta_s)


# ---------------------------------------------------------------- the ideal


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16"])
@given(st.data(), st.booleans())
def test_nothing_beats_the_ideal(codec: str, data: st.DataObject, deferred: bool) -> None:
    """Of codecs that take as many bytes for a chunk as for its parameters one by one."""
    chosen = any_settings.map(lambda item: replace(item, codec=codec, codec_rules=""))
    plan, profile = data.draw(plans(chosen))
    step_s = simulate(plan, profile, deferred).step_s
    assert step_s >= ideal(profile, codec) - EPS
    assert ddp(profile).step_s >= ideal(profile) - EPS


@given(plans(), st.booleans())
def test_nothing_beats_what_computing_and_the_link_take(
    case: tuple[Plan, Profile], deferred: bool
) -> None:
    """Whatever the codecs."""
    plan, profile = case
    sent = sum(task.sent_bytes(profile.world_size) for task in plan.tasks)
    step_s = simulate(plan, profile, deferred).step_s
    assert step_s >= max(profile.compute_s, sent * profile.link.beta_s) - EPS


@given(profiles())
def test_the_ideal_is_above_both_bounds(profile: Profile) -> None:
    share = 2 * (profile.world_size - 1) / profile.world_size
    wire_s = profile.layout.nbytes * share * profile.link.beta_s
    assert ideal(profile) >= max(profile.compute_s, wire_s) - EPS


@pytest.mark.parametrize("name", ["priority", "rs_ag"])
def test_small_chunks_without_latency_come_close_to_the_ideal(name: str) -> None:
    profile = profile_of("resnet50", 1, Link(0.0, 8e-9))
    plan = policies.get(name)(profile, Settings(chunk_mb=0.125, fusion_mb=0.0))
    assert simulate(plan, profile).step_s <= 1.02 * ideal(profile)


Job = tuple[int, int, int]  # release, due, length


@cache
def best_lateness(jobs: tuple[Job, ...], now: int = 0) -> int:
    """Brute force over all preemptive schedules; with whole numbers one in whole steps is best."""
    if not jobs:
        return -(10**6)
    ready = [at for at, (release, _, _) in enumerate(jobs) if release <= now]
    if not ready:
        return best_lateness(jobs, now + 1)
    ends = []
    for at in ready:
        release, due, length = jobs[at]
        others = jobs[:at] + jobs[at + 1 :]
        if length == 1:
            ends.append(max(now + 1 - due, best_lateness(others, now + 1)))
        else:
            ends.append(best_lateness((*others, (release, due, length - 1)), now + 1))
    return min(ends)


whole_numbers = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 3))


@given(st.lists(whole_numbers, min_size=1, max_size=4), st.integers(0, 3))
@example([(0, 8, 3), (1, 0, 2)], 0)
def test_the_ideal_is_the_best_of_all_preemptive_schedules(rows: list[Job], shift: int) -> None:
    """Release, first use and length of each parameter; hooks come `shift` later than gradients."""
    ready_s, use_s, lengths = zip(*rows, strict=True)
    profile = by_hand(*lengths, ready_s=[12.0 + item for item in ready_s], use_s=use_s)
    hooks_s = tuple(item + shift for item in profile.ready_s)
    profile = replace(profile, ready_s=hooks_s)
    due, jobs = 21, []
    for at in sorted(range(len(rows)), key=lambda at: use_s[at]):
        jobs.append((12 + ready_s[at], due + use_s[at], lengths[at]))
        due += 1  # its optimizer step
    best = best_lateness(tuple(jobs), 12)
    assert ideal(profile) == profile.compute_s + max(0, best)
