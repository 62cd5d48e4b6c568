"""The tuner: what it tries, for how long, and what it keeps. Pure."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.settings import Settings
from commsched.tuning.candidates import Candidate
from commsched.tuning.phases import MEASURE
from commsched.tuning.tuner import HOPELESS, MOST_STEPS, TRIED, WORTH, Outcome, Row, Tuner

POLICIES = ("fifo", "priority", "rs_ag")
DDP_STEPS = 4  # until DDP's buckets have settled, and the step in which the profile is agreed on


def candidate(
    name: str,
    policy: str = "fifo",
    codec: str = "none",
    deferred: bool = False,
    chunk_mb: float = 0,
) -> Candidate:
    settings = Settings(policy=policy, codec=codec, chunk_mb=float(chunk_mb))
    return Candidate(name, settings, deferred, plain=name == "ddp")


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[Row], dict[str, float]]:
    """Candidates with predictions, and the true step time of each."""
    seconds = st.floats(0.05, 0.2)
    rows, times = [], {}
    kinds = draw(st.lists(st.tuples(st.sampled_from(POLICIES), st.booleans()), max_size=9))
    for at, (policy, lossy) in enumerate(kinds):
        codec = "int8" if lossy else "none"
        one = candidate(f"c{at}", policy, codec, deferred=policy != "fifo", chunk_mb=at)
        rows.append(Row(one, draw(seconds)))
    if not rows or draw(st.booleans()):
        rows.insert(0, Row(candidate("ddp"), draw(seconds)))
    for row in rows:
        times[row.candidate.name] = draw(seconds)
    return rows, times


def again(rows: list[Row]) -> list[Row]:
    """The same candidates, not tried."""
    return [Row(row.candidate, row.predicted_s) for row in rows]


def run(tuner: Tuner, times: dict[str, float]) -> tuple[Outcome, list[str], int]:
    """The outcome, what was in effect in turn, and how many steps it took."""
    trials, steps = [], 0
    while tuner.outcome is None:
        trials.append(tuner.trial.name)
        steps += 1 + tuner.steps
        tuner.measured(times[tuner.trial.name])
        assert len(trials) < 100
    return tuner.outcome, trials, steps


@given(searches())
def test_the_fastest_is_kept_unless_something_safer_is_as_fast(
    search: tuple[list[Row], dict[str, float]],
) -> None:
    rows, times = search
    outcome, trials, steps = run(Tuner(rows, 0.04, 0.05), times)
    by_name = {row.candidate.name: row.candidate for row in rows}
    assert steps == outcome.steps <= MOST_STEPS
    assert len(set(trials)) <= TRIED
    if not trials:  # nothing else was worth trying
        return
    best_s = min(times[name] for name in trials)
    chosen = by_name[outcome.chosen]
    assert times[chosen.name] <= best_s / (1 - WORTH) + 1e-12
    if "ddp" in trials and not chosen.plain:
        assert times[chosen.name] <= (1 - WORTH) * times["ddp"] + 1e-12
    exact = [times[name] for name in trials if not by_name[name].lossy]
    if chosen.lossy and exact:
        assert times[chosen.name] <= (1 - WORTH) * min(exact) + 1e-12
    assert outcome.step_s == pytest.approx(times[chosen.name])


@given(searches())
def test_plain_ddp_and_something_exact_are_always_tried(
    search: tuple[list[Row], dict[str, float]],
) -> None:
    rows, times = search
    _, trials, _ = run(Tuner(rows, 0.04, 0.05), times)
    by_name = {row.candidate.name: row.candidate for row in rows}
    if not trials:
        return
    if "ddp" in by_name:
        assert trials[0] == "ddp"
    if any(not row.candidate.lossy for row in rows):
        assert any(not by_name[name].lossy for name in trials)


@given(searches())
def test_an_outcome_survives_json(search: tuple[list[Row], dict[str, float]]) -> None:
    rows, times = search
    outcome, _, _ = run(Tuner(rows, 0.04, 0.05), times)
    read = Outcome.from_dict(json.loads(json.dumps(outcome.to_dict())))
    assert read == outcome
    assert Candidate.from_dict(read.candidate).name == outcome.chosen
    assert {row["name"] for row in read.rows} == {row.candidate.name for row in rows}
    assert read.compute_ms == pytest.approx(40)
    assert str(outcome).startswith(f"automatic mode keeps {outcome.chosen}: ")


@given(searches())
def test_equal_searches_go_alike(search: tuple[list[Row], dict[str, float]]) -> None:
    rows, times = search
    one, other = Tuner(again(rows), 0.04, 0.05), Tuner(again(rows), 0.04, 0.05)
    assert run(one, times) == run(other, times)


def test_tuning_takes_less_than_sixty_steps() -> None:
    assert DDP_STEPS + MEASURE + MOST_STEPS < 60


def test_one_candidate_is_chosen_at_once() -> None:
    tuner = Tuner([Row(candidate("ddp"), 0.1)], 0.04, 0.05)
    assert tuner.outcome is not None
    assert (tuner.outcome.chosen, tuner.outcome.steps, tuner.steps) == ("ddp", 0, 0)
    assert tuner.trial.plain


def test_what_is_predicted_to_be_hopeless_is_not_tried() -> None:
    rows = [
        Row(candidate("good", "priority", deferred=True), 0.1),
        Row(candidate("bad", "rs_ag", deferred=True), 0.1 * HOPELESS + 0.01),
        Row(candidate("near"), 0.1 * HOPELESS - 0.001),
    ]
    _, trials, _ = run(Tuner(rows, 0.04, 0.05), {"good": 0.1, "near": 0.2})
    assert set(trials) == {"good", "near"}


def test_one_of_each_kind_comes_before_another_chunk_size() -> None:
    rows = [Row(candidate("ddp"), 0.1)]
    for at in range(4):
        rows.append(
            Row(candidate(f"p{at}", "priority", deferred=True, chunk_mb=at), 0.1 + at / 1e3)
        )
    rows += [Row(candidate("f"), 0.115), Row(candidate("r", "rs_ag", deferred=True), 0.117)]
    _, trials, _ = run(Tuner(rows, 0.04, 0.05), dict.fromkeys(["ddp", "p0", "p1", "f", "r"], 0.1))
    assert trials[:5] == ["ddp", "p0", "f", "r", "p1"]


def test_a_close_race_is_run_again_by_turns_and_outliers_do_not_decide() -> None:
    rows = [Row(candidate("ddp"), 0.1), Row(candidate("p", "priority", deferred=True), 0.1)]
    tuner = Tuner(rows, 0.04, 0.05)
    tuner.measured(0.100)
    tuner.measured(0.099)
    turns = []
    while tuner.outcome is None:
        turns.append(tuner.trial.name)
        slow = turns == ["p"]  # once, something else ran
        tuner.measured(0.150 if slow else 0.090 if tuner.trial.name == "p" else 0.100)
    assert turns == ["p", "ddp"] * 3
    assert tuner.outcome.chosen == "p"
    assert "x plain DDP" in tuner.outcome.why


def test_plain_ddp_is_in_the_final_of_two_others() -> None:
    rows = [
        Row(candidate("ddp"), 0.1),
        Row(candidate("p", "priority", deferred=True), 0.1),
        Row(candidate("r", "rs_ag", deferred=True), 0.1),
    ]
    times = {"ddp": 0.1, "p": 0.085, "r": 0.087}
    outcome, trials, _ = run(Tuner(rows, 0.04, 0.05), times)
    assert trials[3:] == ["p", "r", "ddp"] * 2
    assert outcome.chosen == "p"
    _, trials, _ = run(Tuner(again(rows), 0.04, 0.05), {**times, "ddp": 0.12})
    assert trials[3:] == ["p", "r"] * 3  # it is out of the race


@pytest.mark.parametrize(
    ("gain", "slow_turn", "chosen"), [(0.03, False, "p"), (0.03, True, "ddp"), (0.1, True, "p")]
)
def test_a_small_gain_must_show_in_every_turn(gain: float, slow_turn: bool, chosen: str) -> None:
    rows = [Row(candidate("ddp"), 0.1), Row(candidate("p", "priority", deferred=True), 0.1)]
    tuner = Tuner(rows, 0.04, 0.05)
    tuner.measured(0.1)
    tuner.measured(0.098)
    turns = 0
    while tuner.outcome is None:
        turns += 1
        slow = slow_turn and turns == 3
        fast = tuner.trial.name == "p" and not slow
        tuner.measured(0.1 * (1 - gain) if fast else 0.1)
    assert tuner.outcome.chosen == chosen, tuner.outcome
    if chosen == "ddp":
        assert "not in each of 4 turns" in tuner.outcome.why


def test_a_clear_winner_needs_no_final() -> None:
    rows = [Row(candidate("ddp"), 0.1), Row(candidate("p", "priority", deferred=True), 0.1)]
    _, trials, _ = run(Tuner(rows, 0.04, 0.05), {"ddp": 0.1, "p": 0.08})
    assert trials == ["ddp", "p"]
