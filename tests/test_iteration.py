"""Iteration: plan order whatever comes when, and nothing that came is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.errors import CommSchedError
from commsched.iteration import Iteration, KnownPlan
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.plan import Plan
from commsched.policies import get
from commsched.profile import Profile
from commsched.settings import MB, Settings
from tests.mixed import registered

CHUNK_BYTES, FUSION_BYTES = 256, 128  # of float32: cut above 64 elements, fused below 32
SETTINGS = Settings(chunk_mb=CHUNK_BYTES / MB, fusion_mb=FUSION_BYTES / MB)
CUT, FUSED = 150, 10  # a bucket of three chunks, one of less than a chunk


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


PlanOf = Callable[[Layout], Plan]


def plan_of(layout: Layout) -> Plan:
    return get("fifo")(Profile.unmeasured(layout, 2), SETTINGS)


def in_two(layout: Layout) -> Plan:
    """A codec that takes two tasks a chunk, except for buckets of one element: those are exact."""
    chosen = replace(SETTINGS, codec="coarse", codec_min_numel=2)
    return get("fifo")(Profile.unmeasured(layout, 2), chosen)


PLANS: dict[str, PlanOf] = {"one task": plan_of, "two tasks": in_two}


def spec(key: int, numel: int) -> BucketSpec:
    return BucketSpec((ParamSpec(f"p{key}", numel),), "float32")


def job(key: int, numel: int) -> Job:
    return Job(key, spec(key, numel), torch.full((numel,), float(key)), Progress())


def known(*numels: int, by: PlanOf = plan_of) -> KnownPlan:
    """A plan for buckets of these sizes, whose keys are their places."""
    layout = Layout(tuple(spec(key, numel) for key, numel in enumerate(numels)))
    return KnownPlan(by(layout), {key: key for key in range(len(numels))})


def begin(*numels: int, by: PlanOf = plan_of) -> Iteration:
    return Iteration(by, known(*numels, by=by))


def take(iteration: Iteration) -> list[Run]:
    """Issue everything that is ready, as the engine does on a link that takes no time."""
    runs = []
    while (run := iteration.head()) is not None:
        assert iteration.order.popleft() is run
        run.done = True
        runs.append(run)
    return runs


def carried(runs: Iterable[Run]) -> list[tuple[int, int, int]]:
    """(key, first element, elements) of every piece, in the order in which they are sent."""
    return [
        (run.jobs[piece.bucket].key, piece.start, piece.numel)
        for run in runs
        for piece in run.chunk.pieces
    ]


def keys(runs: Iterable[Run]) -> list[list[int]]:
    return [[run.jobs[piece.bucket].key for piece in run.chunk.pieces] for run in runs]


# ---------------------------------------------------------------- as planned


def test_tasks_go_in_plan_order() -> None:
    iteration = begin(CUT, FUSED, FUSED, CUT)
    plan = iteration.next_plan().plan
    assert [run.task for run in iteration.order] == list(plan.tasks)
    runs = []
    for key, numel in enumerate((CUT, FUSED, FUSED, CUT)):
        iteration.add(job(key, numel))
        runs += take(iteration)
    assert [run.task for run in runs] == list(plan.tasks)
    assert all(run.plan is plan for run in runs)
    iteration.end()
    assert not iteration.order
    assert iteration.new_layout() is None


def test_nothing_is_ready_before_its_bucket_has_come() -> None:
    iteration = begin(CUT, CUT)
    assert iteration.head() is None
    iteration.add(job(0, CUT))
    assert len(take(iteration)) == 3
    assert iteration.head() is None
    assert len(iteration.order) == 3


def test_a_fused_chunk_waits_for_all_its_buckets() -> None:
    iteration = begin(FUSED, FUSED, FUSED)
    for key in range(2):
        iteration.add(job(key, FUSED))
        assert iteration.head() is None
    iteration.add(job(2, FUSED))
    (run,) = take(iteration)
    assert sorted(run.jobs) == [0, 1, 2]
    assert [view[0].item() for view in run.views()] == [0.0, 1.0, 2.0]


def test_a_jobs_tasks_are_counted_as_it_comes() -> None:
    iteration = begin(CUT, FUSED, FUSED)
    jobs = [job(0, CUT), job(1, FUSED), job(2, FUSED)]
    for item in jobs:
        iteration.add(item)
    assert [item.tasks_left for item in jobs] == [3, 1, 1]


def test_an_empty_bucket_has_no_tasks() -> None:
    for iteration in (begin(0, CUT), Iteration(plan_of, None)):
        empty = job(0, 0)
        iteration.add(empty)
        assert empty.tasks_left == 0
        assert iteration.head() is None
        iteration.add(job(1, CUT))
        assert carried(take(iteration)) == [(1, 0, 64), (1, 64, 64), (1, 128, 22)]


# ---------------------------------------------------------------- two tasks a chunk


def issue(iteration: Iteration) -> list[Run]:
    """Put everything that is ready on the wire, from which nothing has come back yet."""
    runs = []
    while iteration.head() is not None:
        runs.append(iteration.order.popleft())
    return runs


def test_a_second_task_waits_for_the_first_one_to_be_done() -> None:
    iteration = begin(FUSED, CUT, by=in_two)
    iteration.add(job(0, FUSED))
    (first,) = issue(iteration)
    assert (first.task.round, first.after) == (0, None)
    assert iteration.head() is None
    iteration.add(job(1, CUT))
    assert iteration.head() is None  # it blocks what is behind it, on every rank alike
    first.done = True
    second, *others = issue(iteration)
    assert (second.task.round, second.after) == (1, first)
    assert [run.task.round for run in others] == [0, 0, 0]


def test_all_tasks_of_a_chunk_carry_the_same() -> None:
    iteration = begin(CUT, FUSED, FUSED, by=in_two)
    items = [job(0, CUT), job(1, FUSED), job(2, FUSED)]
    for item in items:
        iteration.add(item)
    assert [item.tasks_left for item in items] == [6, 2, 2]
    runs = take(iteration)
    for run in runs:
        if run.after is not None:
            assert run.after.task.chunk == run.task.chunk
            assert run.after.jobs == run.jobs
            assert run.after.chunk == run.chunk
    assert sum(run.after is not None for run in runs) == len(runs) / 2


def test_a_gradient_is_whole_after_the_last_task_only() -> None:
    iteration = begin(FUSED, by=in_two)
    item = job(0, FUSED)
    iteration.add(item)
    for left in (2, 1, 0):
        assert item.tasks_left == left
        assert item.has(0) == (left == 0)
        assert item.complete() == (left == 0)
        if left:
            run = iteration.order.popleft()
            item.task_done(run.covers[0])


@pytest.mark.parametrize("came", [[0], [1], [2], [0, 2], [1, 2]])
def test_both_tasks_go_without_the_bucket_that_does_not_come(came: list[int]) -> None:
    iteration = begin(FUSED, FUSED, FUSED, by=in_two)
    for key in came:
        iteration.add(job(key, FUSED))
    iteration.end()
    assert keys(take(iteration)) == [came, came]
    assert not iteration.order


def test_both_tasks_of_a_bucket_that_does_not_come_are_dropped() -> None:
    iteration = begin(FUSED, CUT, FUSED, by=in_two)
    iteration.add(job(2, FUSED))
    assert keys(take(iteration)) == [[2], [2]]
    iteration.end()
    assert not iteration.order


def test_an_unknown_bucket_takes_two_tasks_too_and_is_compared_once() -> None:
    iteration = begin(FUSED, by=in_two)
    iteration.add(job(7, CUT))
    runs = take(iteration)
    assert keys(runs) == [[7]] * 6
    assert [run.unknown for run in runs] == [True] + [False] * 5
    assert sorted(run.task.round for run in runs) == [0, 0, 0, 1, 1, 1]


def test_a_run_knows_its_step() -> None:
    iteration = Iteration(in_two, known(FUSED, by=in_two), 17)
    iteration.add(job(0, FUSED))
    iteration.add(job(1, FUSED))
    assert [run.step for run in take(iteration)] == [17] * 4
    assert iteration.step == 17


# ---------------------------------------------------------------- buckets that do not come


def test_a_skipped_bucket_is_dropped_when_a_later_one_comes() -> None:
    iteration = begin(CUT, CUT, CUT)
    iteration.add(job(1, CUT))
    assert keys(take(iteration)) == [[1]] * 3
    iteration.add(job(2, CUT))
    assert keys(take(iteration)) == [[2]] * 3
    iteration.end()
    assert iteration.new_layout() is None


def test_buckets_missing_at_the_end_are_dropped() -> None:
    iteration = begin(CUT, CUT, CUT)
    iteration.add(job(0, CUT))
    assert len(iteration.order) == 9
    iteration.end()
    assert iteration.ended
    assert keys(take(iteration)) == [[0]] * 3
    assert not iteration.order


def test_a_fused_chunk_goes_without_the_bucket_that_was_skipped() -> None:
    iteration = begin(FUSED, FUSED, FUSED)
    iteration.add(job(0, FUSED))
    iteration.add(job(2, FUSED))
    (run,) = take(iteration)
    assert keys([run]) == [[0, 2]]
    assert run.chunk.numel == 2 * FUSED
    assert len(run.views()) == 2


def test_a_fused_chunk_goes_without_the_bucket_missing_at_the_end() -> None:
    for came in ([0], [1], [0, 1], [1, 2], [2]):
        iteration = begin(FUSED, FUSED, FUSED)
        for key in came:
            iteration.add(job(key, FUSED))
        iteration.end()
        assert keys(take(iteration)) == [came]


def test_an_end_without_any_bucket_leaves_nothing() -> None:
    iteration = begin(CUT, FUSED, FUSED)
    assert iteration.finished()  # a new iteration may replace it
    iteration.end()
    assert iteration.head() is None
    assert not iteration.order
    assert iteration.new_layout() is None


# ---------------------------------------------------------------- buckets that nobody knows


def test_without_a_plan_buckets_go_as_they_come() -> None:
    iteration = Iteration(plan_of, None)
    assert iteration.next_plan() is None
    for key, numel in ((5, CUT), (3, FUSED), (9, FUSED)):
        item = job(key, numel)
        iteration.add(item)
        runs = take(iteration)
        assert {key for run in keys(runs) for key in run} == {key}
        assert item.tasks_left == len(runs) > 0
    layout = iteration.new_layout()
    assert layout == Layout((spec(5, CUT), spec(3, FUSED), spec(9, FUSED)))


def test_an_unknown_bucket_is_appended_and_asks_for_a_plan() -> None:
    iteration = begin(CUT, FUSED)
    iteration.add(job(0, CUT))
    iteration.add(job(1, FUSED))
    iteration.add(job(7, CUT))
    assert keys(take(iteration)) == [[0]] * 3 + [[1]] + [[7]] * 3
    assert iteration.new_layout() == Layout((spec(0, CUT), spec(1, FUSED), spec(7, CUT)))


def test_after_an_unknown_bucket_known_ones_go_as_they_come() -> None:
    iteration = begin(CUT, CUT)
    iteration.add(job(7, FUSED))
    iteration.add(job(0, CUT))
    iteration.add(job(1, CUT))
    assert keys(take(iteration)) == [[7]] + [[0]] * 3 + [[1]] * 3
    iteration.end()
    assert not iteration.order


def test_an_adopted_plan_is_the_next_iterations() -> None:
    iteration = Iteration(plan_of, None)
    for key in (5, 3, 9):
        iteration.add(job(key, FUSED))
    take(iteration)
    iteration.end()
    plan = plan_of(iteration.new_layout())
    iteration.adopt(plan)
    following = iteration.next_plan()
    assert following == KnownPlan(plan, {5: 0, 3: 1, 9: 2})
    second = Iteration(plan_of, following)
    for key in (5, 3, 9):
        second.add(job(key, FUSED))
    assert keys(take(second)) == [[5, 3, 9]]  # fused, now that they are known to come together
    second.end()
    assert second.new_layout() is None
    assert second.next_plan() is following


def test_an_iteration_is_finished_once_it_is_closed() -> None:
    iteration = Iteration(plan_of, None)
    assert iteration.finished()
    iteration.add(job(0, FUSED))
    assert not iteration.finished()
    iteration.end()
    assert not iteration.finished()
    iteration.closed = True
    assert iteration.finished()


# ---------------------------------------------------------------- late buckets


def test_a_bucket_that_comes_after_the_end_is_still_sent() -> None:
    iteration = begin(CUT, FUSED, FUSED)
    iteration.add(job(0, CUT))
    iteration.end()
    late = job(1, FUSED)
    iteration.add(late)
    assert keys(take(iteration)) == [[0]] * 3 + [[1]]
    assert late.tasks_left == 1
    assert iteration.new_layout() == Layout((spec(0, CUT), spec(1, FUSED)))


def test_a_bucket_that_comes_after_it_was_dropped_is_still_sent() -> None:
    iteration = begin(FUSED, FUSED, CUT)
    iteration.add(job(2, CUT))
    iteration.add(job(0, FUSED))
    assert keys(take(iteration)) == [[2]] * 3 + [[0]]


def test_a_bucket_that_comes_twice_is_sent_twice() -> None:
    """A State begins a new step instead; but work that nobody counts must never be done."""
    for numel in (CUT, FUSED):
        iteration = begin(numel)
        for _ in range(2):
            item = job(0, numel)
            iteration.add(item)
            assert item.tasks_left > 0
        assert sum(row[2] for row in carried(take(iteration))) == 2 * numel


# ---------------------------------------------------------------- the jobs


@pytest.mark.parametrize(("slack", "left_at_near"), [(0.0, 0), (1 / 8, 2), (1 / 7, 2), (1.0, 16)])
def test_progress_is_near_when_few_enough_tasks_are_left(slack: float, left_at_near: int) -> None:
    progress = Progress(slack)
    for _ in range(16):
        progress.add_task()
    states = []
    progress.end()
    for left in range(15, -1, -1):
        if progress.near.is_set():
            states.append(left + 1)
        progress.task_done()
    assert progress.near.is_set()
    assert max(states, default=0) == left_at_near


def test_progress_is_not_near_before_all_tasks_are_known() -> None:
    progress = Progress(1 / 8)
    progress.add_task()
    progress.task_done()
    assert not progress.near.is_set()  # more buckets may come
    progress.end()
    assert progress.near.is_set()


def test_a_small_step_is_waited_for_to_the_end() -> None:
    progress = Progress(1 / 8)
    for _ in range(7):
        progress.add_task()
    progress.end()
    for _ in range(6):
        progress.task_done()
    assert not progress.near.is_set()


def test_tasks_count_for_the_job_and_for_its_step() -> None:
    item = job(0, CUT)
    Iteration(plan_of, None).add(item)
    assert item.tasks_left == 3
    item.progress.end()
    for _ in range(3):
        assert not item.progress.near.is_set()
        item.progress.task_done()
    assert item.progress.near.is_set()
    item.finish()
    assert item.done.is_set()
    assert item.future.value().data_ptr() == item.buffer.data_ptr()


USES = {
    "read": lambda result: result.clone(),
    "sum": lambda result: torch.zeros(FUSED) + result,
    "copy from": lambda result: torch.zeros(FUSED).copy_(result),
    "write": lambda result: result.zero_(),
    "view": lambda result: result.view(2, -1),
    "list": lambda result: torch.cat([torch.zeros(FUSED), result]),
    "keyword": lambda result: torch.mul(torch.zeros(FUSED), 2, out=result),
}


@pytest.mark.parametrize("use", USES)
def test_the_result_of_a_job_that_failed_raises_its_error(use: str) -> None:
    item = job(0, FUSED)
    error = CommSchedError("the link is gone")
    item.finish(error)
    assert item.done.is_set()
    assert item.progress.near.is_set()
    result = item.future.value()  # never raises: it would lose the error's type in the reducer
    assert (result.shape, result.dtype) == (item.buffer.shape, item.buffer.dtype)
    with pytest.raises(CommSchedError) as caught:
        USES[use](result)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)


# ---------------------------------------------------------------- anything may happen

SIZES = st.sampled_from([0, 1, FUSED, 31, 64, CUT])


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], int]:
    """Sizes of the planned buckets; (key, size) of those that come; after how many the end is."""
    planned = draw(st.lists(SIZES, max_size=6))
    strangers = draw(st.lists(SIZES, max_size=2))
    every = list(enumerate([*planned, *strangers]))
    in_order = draw(st.booleans())
    comes = draw(st.permutations(every))[: draw(st.integers(0, len(every)))]
    comes = sorted(comes) if in_order else comes
    return planned, comes, draw(st.integers(0, len(comes)))


def replay(
    history: tuple[list[int], list[tuple[int, int]], int],
    takes: Iterable[bool],
    by: PlanOf = plan_of,
) -> tuple[list[Run], list[Job], Iteration]:
    planned, comes, end_after = history
    iteration = begin(*planned, by=by) if planned else Iteration(by, None)
    turns = iter(takes)
    runs, jobs = [], []
    for at in range(len(comes) + 1):
        if at == end_after:
            iteration.end()
        if at < len(comes):
            jobs.append(job(*comes[at]))
            iteration.add(jobs[-1])
        if next(turns, True):
            runs += take(iteration)
    iteration.end()
    return runs + take(iteration), jobs, iteration


@pytest.mark.parametrize("by", PLANS)
@given(history=histories(), takes=st.lists(st.booleans(), max_size=9))
@settings(deadline=None)
def test_whatever_came_is_sent_once(
    by: str, history: tuple[list[int], list[tuple[int, int]], int], takes: list[bool]
) -> None:
    """In each round of its codec."""
    runs, jobs, iteration = replay(history, takes, PLANS[by])
    assert not iteration.order
    left = dict.fromkeys((item.key for item in jobs), 0)
    last = {(run.plan.digest, run.task.chunk): run.task.round for run in runs}
    for wanted in (0, 1):  # where there is one round, it is both the first and the last one
        sent: dict[int, list[tuple[int, int]]] = {item.key: [] for item in jobs}
        in_round = [
            run
            for run in runs
            if run.task.round == min(wanted, last[run.plan.digest, run.task.chunk])
        ]
        for key, start, numel in carried(in_round):
            sent[key].append((start, numel))
        for item in jobs:
            end = 0
            for start, numel in sent[item.key]:
                assert start == end
                end += numel
            assert end == item.spec.numel
    for key, _, _ in carried(runs):
        left[key] += 1
    assert all(item.tasks_left == left[item.key] for item in jobs)


@pytest.mark.parametrize("by", PLANS)
@given(
    history=histories(),
    ours=st.lists(st.booleans(), max_size=9),
    theirs=st.lists(st.booleans(), max_size=9),
)
@settings(deadline=None)
def test_the_order_does_not_depend_on_when_tasks_are_issued(
    by: str,
    history: tuple[list[int], list[tuple[int, int]], int],
    ours: list[bool],
    theirs: list[bool],
) -> None:
    """Ranks see the same buckets but issue at other moments: what they issue must be the same."""
    left, right = replay(history, ours, PLANS[by])[0], replay(history, theirs, PLANS[by])[0]
    assert carried(left) == carried(right)
    assert [(r.plan.digest, r.task.index) for r in left] == [
        (r.plan.digest, r.task.index) for r in right
    ]


@pytest.mark.parametrize("by", PLANS)
@given(history=histories())
@settings(deadline=None)
def test_a_new_layout_is_asked_for_exactly_when_something_unplanned_came(
    by: str, history: tuple[list[int], list[tuple[int, int]], int]
) -> None:
    runs, jobs, iteration = replay(history, [], PLANS[by])
    planned = iteration.next_plan()
    unplanned = [run for run in runs if planned is None or run.plan is not planned.plan]
    layout = iteration.new_layout()
    if unplanned:
        assert layout == Layout(tuple(item.spec for item in jobs))
    elif layout is not None:  # an empty bucket that came as a stranger has no runs
        assert any(item.spec.numel == 0 for item in jobs)


@pytest.mark.parametrize("by", PLANS)
@given(history=histories())
@settings(deadline=None)
def test_the_iteration_after_a_new_plan_follows_it(
    by: str, history: tuple[list[int], list[tuple[int, int]], int]
) -> None:
    _, comes, _ = history
    _, _, iteration = replay(history, [], PLANS[by])
    layout = iteration.new_layout()
    if layout is None:
        return
    plan = PLANS[by](layout)
    iteration.adopt(plan)
    second = Iteration(PLANS[by], iteration.next_plan())
    for key, numel in comes:
        second.add(job(key, numel))
    assert [run.task for run in take(second)] == list(plan.tasks)
    second.end()
    assert second.new_layout() is None
