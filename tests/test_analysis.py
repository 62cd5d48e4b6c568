"""Analysis of traces whose exposed, overlapped and busy times are known by construction."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from commsched import policies
from commsched.errors import CommSchedError
from commsched.reporting.analysis import Analysis, analyse
from commsched.reporting.findings import causes, headline, offers
from commsched.reporting.intervals import intersect, length, subtract, union
from commsched.reporting.remedies import CODECS, NO_PROFILE, Alternative, Outlook, outlook
from commsched.reporting.terminal import about
from commsched.settings import Settings
from commsched.tracing.file import read_all
from tests.profiles import profile_of
from tests.traces import RankFile, simulated, written

MS = 1e-3
ON_FILES = hypothesis_settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
INTERVALS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda row: (row[0], row[0] + row[1])),
    max_size=8,
)


def covered(intervals: Iterable[tuple[float, float]]) -> set[int]:
    """Every millisecond that one of them covers: the slow way."""
    return {at for begin, end in intervals for at in range(int(begin), int(end))}


def analysed(files: list[RankFile], folder: Path) -> Analysis:
    return analyse(read_all([written(files, folder)]))


def simulated_run(
    folder: Path, architecture: str, policy: str, deferred: bool, late_s: float = 0.0
) -> tuple[Analysis, float]:
    profile = profile_of(architecture, 8)
    settings = Settings(policy=policy)
    plan = policies.get(policy)(profile, settings)
    choice = f"{policy}, deferred" if deferred else policy
    files, timeline = simulated(
        profile,
        plan,
        deferred=deferred,
        choice=choice,
        settings=asdict(settings),
        late_s={1: late_s} if late_s else None,
    )
    return analysed(files, folder), 1e3 * timeline.exposed_s


@given(INTERVALS, INTERVALS)
def test_sets_of_time(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> None:
    a, b = union(one), union(other)
    assert length(a) == len(covered(one))
    assert covered(intersect(a, b)) == covered(one) & covered(other)
    assert covered(subtract(a, b)) == covered(one) - covered(other)
    assert all(end < begin for (_, end), (begin, _) in pairwise(a))


@ON_FILES
@given(waits=INTERVALS, comms=INTERVALS)
def test_figures_of_a_step(
    waits: list[tuple[int, int]], comms: list[tuple[int, int]], tmp_path: Path
) -> None:
    """A step from 100 to 200 ms; whatever overlaps counts once, what is outside does not."""
    file = RankFile(0, 1)
    # Three steps; the first, which is the model's second one, is left out.
    for number, begin in enumerate((-200, -100, 100), 1):
        end = 100 if begin == -100 else begin + 100
        file.step(number, 1 + begin * MS, 1 + end * MS, phase="measuring", deferred=True)
    for begin, end in waits:
        file.span("wait", "training", 1 + begin * MS, 1 + end * MS, step=3, bucket=None, params="")
    for task, (begin, end) in enumerate(comms):
        args = {"step": 3, "task": task, "round": 0, "bucket": [0], "sent_bytes": 10**6}
        file.span("comm", "wire 0", 1 + begin * MS, 1 + end * MS, **args)
    within = set(range(100, 200))
    exposed, busy = covered(waits) & within, covered(comms) & within
    before = covered(waits) & set(range(100))
    figures = analysed([file], tmp_path)
    (rank,) = figures.ranks
    assert figures.steps == 2
    assert rank.exposed_ms == pytest.approx((len(exposed) + len(before)) / 2, abs=1e-6)
    assert rank.busy * rank.step_ms == pytest.approx(len(busy) / 2, abs=1e-6)
    assert rank.idle_ms == pytest.approx((len(exposed - busy) + len(before)) / 2, abs=1e-6)
    assert rank.compute_ms == pytest.approx(rank.step_ms - rank.exposed_ms)
    assert rank.sent_mb == pytest.approx(len(comms) / 2)
    if not busy:
        assert rank.overlap is None
    else:
        share = max(0.0, 1 - (len(exposed) + len(before)) / len(busy))
        assert rank.overlap == pytest.approx(share, abs=1e-6)
    # Whoever is to blame, nothing is blamed twice and nothing is forgotten.
    assert sum(row.exposed_ms for row in figures.tensors) == pytest.approx(rank.exposed_ms)


@pytest.mark.parametrize(
    ("architecture", "policy", "deferred"),
    [
        ("resnet50", "fifo", False),
        ("gpt2", "priority", True),
        ("vgg16", "rs_ag", True),
    ],
)
def test_agrees_with_the_simulation_that_made_the_traces(
    architecture: str, policy: str, deferred: bool, tmp_path: Path
) -> None:
    figures, exposed_ms = simulated_run(tmp_path, architecture, policy, deferred)
    assert exposed_ms > 50  # else this says nothing
    assert figures.exposed_ms == pytest.approx(exposed_ms, rel=1e-3)
    assert sum(row.exposed_ms for row in figures.tensors) == pytest.approx(exposed_ms, rel=1e-3)
    assert sum(row.exposed_ms for row in figures.layers) == pytest.approx(exposed_ms, rel=1e-3)
    assert sum(row.exposed_ms for row in figures.buckets) == pytest.approx(exposed_ms, rel=1e-3)
    assert figures.straggler is None
    foreseen = outlook(figures)
    assert not isinstance(foreseen, str)
    # It knows what is in effect, up to what deferring costs the training thread.
    assert foreseen.present_ms == pytest.approx(figures.step_ms, rel=0.01)


def test_buckets_in_deferred_steps_as_simulated(tmp_path: Path) -> None:
    profile = profile_of("vgg16", 8)
    plan = policies.get("priority")(profile, Settings(policy="priority"))
    files, timeline = simulated(profile, plan, deferred=True, choice="priority, deferred")
    figures = analysed(files, tmp_path)
    expected = [1e3 * seconds for seconds in timeline.bucket_exposed_s]
    assert [row.exposed_ms for row in figures.buckets] == pytest.approx(expected, abs=0.01)
    first_s = profile.ready_s[0]
    ready_ms = [1e3 * (at_s - first_s) for at_s in profile.ready_s]
    assert [row.ready_ms for row in figures.buckets] == pytest.approx(ready_ms, abs=0.01)


def test_the_reducers_own_wait_counts_where_nothing_is_deferred(tmp_path: Path) -> None:
    """Our wait ends at 60 ms, the last task at 80: DDP's reducer waits in between."""
    file = RankFile(0, 1)
    for number in range(3):
        begin = 1 + 0.1 * number
        file.step(number, begin, begin + 0.1)
        args = {"step": number, "task": 0, "round": 0, "bucket": [0]}
        file.span("wait", "training", begin + 0.04, begin + 0.06, step=number, bucket=None)
        file.span("comm", "wire 0", begin, begin + 0.08, **args)
        file.span("forward", "training", begin + 0.085, begin + 0.1, step=number)
    assert analysed([file], tmp_path).exposed_ms == pytest.approx(40)


def test_settled_steps_only(tmp_path: Path) -> None:
    file = RankFile(0, 1)
    for number in range(12):
        phase = "measuring" if number < 3 else "trying" if number < 6 else "settled"
        choice = "fifo" if number < 8 else "priority, deferred"
        slow = 9.0 if number == 10 else 0.0  # a checkpoint
        begin = 10 * number + (slow if number > 10 else 0.0)
        file.step(number, begin, 10 + begin + 9 * slow, phase=phase, choice=choice)
    figures = analysed([file], tmp_path)
    assert figures.steps == 3
    assert figures.choice == "priority, deferred"
    said = " | ".join(figures.left_out)
    assert "2 steps: the model's first" in said
    assert "4 steps: measuring" in said
    assert "2 steps: before the choice of 'priority, deferred'" in said
    assert "1 step: computing took over 3 x the median" in said


def test_a_rank_that_computes_longer_is_named(tmp_path: Path) -> None:
    figures, _ = simulated_run(tmp_path, "resnet50", "fifo", False, late_s=0.15)
    late = figures.straggler
    assert late is not None
    assert late.rank == 1
    assert 1e3 * late.cost_s == pytest.approx(150, rel=0.05)
    assert "its backward takes 150 ms" in late.cause
    assert figures.ranks[1].last_share == 1
    assert figures.ranks[1].late_ms == pytest.approx(150, rel=0.05)
    assert any("rank 1 is late" in line for line in causes(figures))


def test_a_rank_that_starts_late_is_named(tmp_path: Path) -> None:
    """Rank 2 loads data for 40 ms more; the others wait for its tasks."""
    files = [RankFile(rank, 3) for rank in range(3)]
    for file in files:
        for number in range(4):
            begin = 1 + 0.2 * number
            late = 0.04 if file.rank == 2 else 0.0
            file.step(number, begin, begin + 0.2)
            backward = begin + late, begin + late + 0.05
            file.span("backward", "training", *backward, step=number)
            args = {"step": number, "task": 0, "round": 0, "bucket": [0], "plan": "x"}
            file.span("comm", "wire 0", backward[1], begin + 0.12, **args)
            file.span("wait", "training", backward[1], begin + 0.12, step=number, bucket=0)
            file.span("forward", "training", begin + 0.12, begin + 0.16, step=number)
    figures = analysed(files, tmp_path)
    assert figures.straggler is not None
    assert figures.straggler.rank == 2
    assert 1e3 * figures.straggler.cost_s == pytest.approx(40, rel=0.01)
    assert "starts late" in figures.straggler.cause
    assert "because rank 2 is late" in headline(figures)


def test_without_a_profile_it_says_what_cannot_be_said(tmp_path: Path) -> None:
    profile = profile_of("resnet50", 25)
    plan = policies.get("fifo")(profile, Settings())
    files, timeline = simulated(profile, plan, deferred=False, choice="fifo", noted=False)
    figures = analysed(files, tmp_path)
    assert figures.exposed_ms == pytest.approx(1e3 * timeline.exposed_s, rel=1e-3)
    assert figures.layers == ()
    assert figures.tensors[0].name.startswith("bucket ")
    foreseen = outlook(figures)
    assert foreseen == NO_PROFILE
    assert offers(figures, foreseen) == [NO_PROFILE]


def test_offers_are_sorted_and_worth_it(tmp_path: Path) -> None:
    figures, _ = simulated_run(tmp_path, "resnet50", "fifo", False)
    foreseen = outlook(figures)
    assert not isinstance(foreseen, str)
    assert all(row.gain >= 0.02 for row in foreseen.offers)
    harms = ["codec" if row.kind == "codec" else row.kind == "link" for row in foreseen.offers]
    exact = harms.index("codec")
    gains = [row.gain for row in foreseen.offers[:exact]]
    assert gains == sorted(gains, reverse=True)
    assert harms == [False] * exact + ["codec"] * harms.count("codec") + [True]
    order = [row.group for row in foreseen.offers if row.kind == "codec"]
    assert order == [one for one in ("codec bf16", "codec int8", "codec powersgd") if one in order]
    kinds = {row.kind for row in foreseen.offers}
    assert {"schedule", "codec", "link"} <= kinds
    lines = offers(figures, foreseen)
    assert any(line.startswith("hand the optimizer over") for line in lines)
    assert lines[-1].startswith("(predicted from the profile measured in this run")
    lossy = [line for line in lines if any(name in line for name in CODECS)]
    assert lossy == [line for line in lines if "docs/codecs.md" in line]
    assert foreseen.ideal_ms <= min(row.step_ms for row in foreseen.rows if row.kind == "schedule")


def test_a_harsher_codec_must_gain_more() -> None:
    def codec(name: str, step_ms: float) -> Alternative:
        do = f"COMMSCHED_CODEC={name}"
        return Alternative(name, do, "codec", f"codec {name}", step_ms, 1 - step_ms / 100, True)

    def offered(*rows: Alternative) -> list[str]:
        return [row.name for row in Outlook(100, 50, 60, 100, rows).offers]

    assert offered(codec("powersgd", 69), codec("int8", 69.5), codec("bf16", 70)) == ["bf16"]
    assert offered(codec("powersgd", 59), codec("int8", 60), codec("bf16", 70)) == ["bf16", "int8"]
    assert offered(codec("int8", 60), codec("bf16", 99)) == ["int8"]


@pytest.mark.parametrize("handed_over", [True, False])
def test_the_optimizer_is_not_asked_for_twice(handed_over: bool, tmp_path: Path) -> None:
    profile = profile_of("resnet50", 8)
    plan = policies.get("fifo")(profile, Settings())
    files, _ = simulated(profile, plan, deferred=False, choice="fifo", settings=asdict(Settings()))
    for file in files:
        file.lines[0] = file.lines[0].replace(
            '"rank":', f'"handed_over": {json.dumps(handed_over)}, "rank":'
        )
    figures = analysed(files, tmp_path)
    said = " ".join(offers(figures, outlook(figures)))
    assert ("hand the optimizer over" in said) is not handed_over
    assert ("COMMSCHED_POLICY=" in said) is handed_over


@pytest.mark.parametrize(("settled", "steps", "unsettled"), [(4, 10, 6), (5, 5, 0)])
def test_a_run_that_has_hardly_settled(
    settled: int, steps: int, unsettled: int, tmp_path: Path
) -> None:
    file = RankFile(0, 1)
    for number in range(2, 8 + settled):
        phase = "trying" if number < 8 else "settled"
        file.step(number, number, number + 1.0, phase=phase)
    figures = analysed([file], tmp_path)
    assert (figures.steps, figures.unsettled) == (steps, unsettled)
    assert any("hardly settled" in line for line in about(figures)) is bool(unsettled)


def test_a_link_that_is_too_slow_for_the_model(tmp_path: Path) -> None:
    from commsched.profile import Link

    profile = profile_of("vgg16", 8, Link(1e-4, 1e-8))
    plan = policies.get("fifo")(profile, Settings())
    files, _ = simulated(profile, plan, deferred=False, choice="fifo", settings=asdict(Settings()))
    figures = analysed(files, tmp_path)
    assert figures.busy < 0.9
    assert "no order hides all of it, only fewer bytes or a faster link would" in headline(figures)


def test_hidden_communication_is_said_plainly(tmp_path: Path) -> None:
    from commsched.profile import Link

    profile = profile_of("resnet50", 8, Link(1e-5, 1e-11))
    plan = policies.get("fifo")(profile, Settings())
    files, _ = simulated(profile, plan, deferred=False, choice="fifo", settings=asdict(Settings()))
    figures = analysed(files, tmp_path)
    assert headline(figures).startswith("Communication is hidden")
    foreseen = outlook(figures)
    assert offers(figures, foreseen) == ["communication is hidden: nothing to gain"]


def test_no_usable_steps(tmp_path: Path) -> None:
    with pytest.raises(CommSchedError, match="COMMSCHED_TRACE_STEPS"):
        analysed([RankFile(0, 1)], tmp_path)
    apart = [RankFile(0, 2), RankFile(1, 2)]
    apart[0].step(1, 1, 2)
    apart[1].step(2, 2, 3)
    with pytest.raises(CommSchedError, match="2 steps: not complete on every rank"):
        analysed(apart, tmp_path)


def test_figures_are_json(tmp_path: Path) -> None:
    figures, _ = simulated_run(tmp_path, "resnet50", "fifo", False)
    data = json.loads(json.dumps(figures.to_dict(), allow_nan=False))
    assert data["exposed_ms"] == figures.exposed_ms
    assert data["ranks"][0]["rank"] == 0
    assert {"noted", "typical"}.isdisjoint(data)


def test_what_was_tried_and_found_no_better_is_not_offered(tmp_path: Path) -> None:
    from commsched.reporting.remedies import Alternative, Outlook

    def row(name: str, do: str, step_ms: float, measured_ms: float | None) -> Alternative:
        gain = 1 - step_ms / 100
        return Alternative(name, do, "schedule", name, step_ms, gain, False, measured_ms)

    rows = (
        row("a", "do a", 80, 99),
        row("b", "do b", 85, 90),
        row("c", "do c", 90, None),
        row("d", "do d", 99, None),
        row("now", "", 100, 100),
    )
    assert [one.name for one in Outlook(100, 50, 60, 120, rows).offers] == ["b", "c"]
