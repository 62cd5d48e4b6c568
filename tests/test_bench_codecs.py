"""The pure parts of bench/convergence.py: what is compared with what, and when a target is met."""

from __future__ import annotations

from typing import Any

import pytest

from bench.convergence_report import CLOSE, find, merge, rows_of, target_of, verdict
from bench.convergence_tasks import EXACT, TASKS, is_exact, rate_at
from commsched import codecs


def curve(how: str, seed: int, final: float, **more: Any) -> dict[str, Any]:
    return {
        "how": how,
        "seed": seed,
        "steps": [10, 20, 30],
        "seconds": [1.0, 2.0, 3.0],
        "held_out": [3.0, 2.0, final],
        "trained": [3.0, 2.0, final],
        "step_ms": 5.0,
        "sent_bytes": 1e6,
        "agree": True,
        **more,
    }


def test_ratios_are_of_equal_seeds() -> None:
    curves = [curve(EXACT, 0, 1.0), curve(EXACT, 1, 2.0)]
    curves += [curve("int8", 0, 1.02), curve("int8", 1, 2.0)]
    rows = rows_of("digits", {EXACT: EXACT, "int8": EXACT}, curves)
    row = find(rows, "int8")
    assert row is not None
    assert row.ratios == pytest.approx([1.02, 1.0])
    assert row.ratio == pytest.approx(1.01)
    assert (row.held_out, row.sent_mb, row.agree) == (pytest.approx(1.51), 1.0, True)
    assert row.close_s is not None
    assert row.close_s <= 3.0
    assert CLOSE == 1.05


@pytest.mark.parametrize(("final", "said"), [(1.04, "met"), (1.06, "not met")])
def test_a_target_is_met_or_not(final: float, said: str) -> None:
    rows = rows_of(
        "gpt", {EXACT: EXACT, "sign": EXACT}, [curve(EXACT, 0, 1), curve("sign", 0, final)]
    )
    assert verdict(rows[1]) == f"<= 1.05: {said}"
    assert verdict(rows[0]) == ""


def test_what_is_not_finite_meets_nothing() -> None:
    rows = rows_of(
        "gpt",
        {EXACT: EXACT, "fp8": EXACT},
        [curve(EXACT, 0, 1.0), curve("fp8", 0, float("nan"))],
    )
    assert rows[1].ratio is None
    assert verdict(rows[1]) == "<= 1.01: not met"


def test_targets_are_those_of_the_default_options() -> None:
    assert target_of("topk:ratio=0.01") == target_of("topk") == 0.05
    assert target_of("topk:ratio=0.001") is None
    assert target_of(EXACT) is None
    assert {name for name in codecs.names() if target_of(name) == 0.01} == {
        *("fp16", "bf16", "int8", "fp8", "dynamic8")
    }


def test_ranks_are_as_slow_as_the_slowest_and_must_agree() -> None:
    slow = curve("int8", 0, 1.0, seconds=[2.0, 3.0, 4.0], step_ms=9.0)
    both = merge([curve("int8", 0, 1.0), slow])
    assert (both["seconds"], both["step_ms"], both["agree"]) == ([2.0, 3.0, 4.0], 9.0, True)
    assert not merge([curve("int8", 0, 1.0), curve("int8", 0, 1.1)])["agree"]


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [rate_at(step, 200) for step in range(200)]
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates[0] < 0.2
    assert rates[-1] < 0.01


@pytest.mark.parametrize("task", TASKS)
def test_a_codec_is_compared_with_plain_ddp_under_the_same_optimizer(task: str) -> None:
    made = TASKS[task]()
    for name in codecs.names():
        assert is_exact(made.reference(name))
        if name != "dgc":
            assert made.reference(name) == EXACT
