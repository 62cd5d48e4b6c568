"""The pure parts of bench/convergence.py and bench/codecs.py: what is compared, and targets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.codecs import contests, measure, row_of
from bench.codecs import verdict as speed_verdict
from bench.convergence import _plain
from bench.convergence_plot import draw
from bench.convergence_report import CLOSE, find, merge, reach_s, rows_of, target_of, verdict
from bench.convergence_tasks import EXACT, TASKS, is_exact, rate_at
from bench.plain_codecs import has_plain_rounds, plain_rounds
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


def test_when_a_curve_comes_close_is_between_its_points() -> None:
    assert reach_s([1.0, 3.0], [3.0, 1.0], 2.0) == pytest.approx(2.0)
    assert reach_s([1.0, 3.0], [3.0, 1.0], 0.5) is None
    assert reach_s([1.0, 3.0], [3.0, 1.0], 4.0) == 1.0
    assert reach_s([1.0, 3.0], [float("nan"), 1.0], 2.0) == 3.0


def test_a_picture_shows_also_what_has_diverged(tmp_path: Path) -> None:
    nan = float("nan")
    bad = curve("int8", 0, nan, held_out=[nan, nan, nan])
    rows = rows_of("gpt", {EXACT: EXACT, "int8": EXACT}, [curve(EXACT, 0, 1.0), bad])
    document = {"rows": [_plain(asdict(row)) for row in rows]}
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(document, first)
    draw(document, second)
    assert first.read_bytes() == second.read_bytes()
    assert b"</svg>" in first.read_bytes()


def test_seeds_choose_parameters_and_nothing_held_out_is_trained_on() -> None:
    task = TASKS["digits"]()
    one, same, other = (next(task.model(seed).parameters()) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not set(task._train.tolist()) & set(task._held_out.tolist())
    assert task.optimizer([one], "dgc:ratio=0.01").param_groups[0]["momentum"] == 0.0
    assert task.optimizer([one], "topk").param_groups[0]["momentum"] == 0.9


# ---------------------------------------------------------------- bench/codecs.py


def test_throughput_is_of_the_median_and_beside_plain_torch() -> None:
    row = row_of("int8:block=512", "decode", 1_000_000, [4e-4, 1e-3, 2e-4], [8e-4])
    assert (row.gb_s, row.plain_gb_s, row.ratio) == pytest.approx((10.0, 5.0, 2.0))
    assert speed_verdict(row) == ">= 10: met"
    assert speed_verdict(replace(row, gb_s=9.9)) == ">= 10: not met"
    assert speed_verdict(row_of("fp16", "decode", 10, [1.0], [1.0])) == ""


@pytest.mark.parametrize("name", [name for name in codecs.names() if codecs.get(name).lossy])
def test_every_codec_is_timed_twice(name: str) -> None:
    found = [*contests([name], [4096])]
    operations = [one.operation for one in found]
    if has_plain_rounds(codecs.get(name)):
        assert operations == ["rounds"]
        return
    assert operations[:3] == ["encode", "encode_feedback", "decode"]
    for row in (measure(one, 1) for one in found):
        assert min(row.ours_s + row.plain_s) > 0
        assert len(row.ours_s) == len(row.plain_s)


@pytest.mark.parametrize("text", ["dgc:ratio=0.1", "vote:ratio=0.1"])
def test_plain_sparse_rounds_average_the_largest(text: str) -> None:
    grad = torch.randn(400, generator=torch.Generator().manual_seed(1))
    largest = grad.abs().topk(40).indices
    expected = torch.zeros(400).index_copy(0, largest, grad[largest])
    if text.startswith("vote"):  # the wire adds up what it leaves: each rank's share
        expected /= 2
    plain_rounds(text, grad, 20, 2)()
    assert torch.allclose(grad, expected)


@pytest.mark.parametrize("text", ["powersgd:rank=2", "acpsgd:rank=2"])
def test_plain_low_rank_rounds_give_a_matrix_of_low_rank(text: str) -> None:
    grad = torch.randn(400, generator=torch.Generator().manual_seed(1))
    plain_rounds(text, grad, 20, 2)()
    assert torch.linalg.matrix_rank(grad.view(20, 20), rtol=1e-4) == 2


def test_where_there_is_no_plain_version_that_is_said() -> None:
    with pytest.raises(ValueError, match="no plain version of codec int8"):
        plain_rounds("int8", torch.ones(4), 2, 2)
