"""Scenarios: every combination asked for, predicted as the simulator predicts it, and shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched import policies, profiles
from commsched.advice import rebucketed
from commsched.cli import main
from commsched.errors import CommSchedError
from commsched.profile import Link, Profile
from commsched.settings import MB, Settings
from commsched.simulate import ddp, ideal
from commsched.tuning.candidates import predict
from commsched.whatif.alpha_beta import at_ranks
from commsched.whatif.scenarios import DDP, Grid, base_line, choices, recomputed, rows_of, serial
from tests.profiles import profile_of

RATES = st.floats(0.1, 200)
MODELS = st.sampled_from(["resnet50", "vgg16", "gpt2"])


def simulate(*args: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *args])


# ---------------------------------------------------------------- rows


def test_rows_are_what_the_simulator_says() -> None:
    profile = profile_of("resnet50")
    grid = Grid(choices(), (None, 4.0), (None, 10.0), (None, 8), hop_s=1e-4)
    rows = list(rows_of(profile, grid))
    by_name = {candidate.name: candidate for candidate in (base_line(), *grid.candidates)}
    assert len(rows) == 2 * 2 * 2 * len(by_name)
    for row in rows:
        gbps = 1.0 if row.gbps == pytest.approx(1.0) else row.gbps
        there = at_ranks(profile, row.ranks, gbps, 1e-4)
        own = there if row.bucket_cap_mb is None else rebucketed(there, int(row.bucket_cap_mb * MB))
        timeline = predict(by_name[row.candidate], own)
        assert row.step_ms == pytest.approx(timeline.step_s * 1e3)
        assert row.exposed_ms == pytest.approx(timeline.exposed_s * 1e3)
        assert row.vs_ddp == pytest.approx(timeline.step_s / ddp(there).step_s)
        assert row.ideal_ms == pytest.approx(ideal(own) * 1e3)


def test_as_measured_is_the_profile_itself() -> None:
    profile = profile_of("vgg16")
    (row,) = rows_of(profile, Grid(()))
    assert row.step_ms == ddp(profile).step_s * 1e3
    assert (row.candidate, row.vs_ddp, row.ranks, row.deferred) == (DDP, 1.0, 2, False)


def test_the_base_line_has_the_profiles_own_buckets_whatever_is_asked() -> None:
    profile = profile_of("resnet50", 50)
    rows = list(rows_of(profile, Grid(choices(["priority"]), (2.0,))))
    assert [(row.candidate, row.bucket_cap_mb) for row in rows] == [
        (DDP, None),
        (DDP, 2.0),
        ("priority, deferred", 2.0),
    ]
    assert rows[1].vs_ddp == pytest.approx(rows[1].step_ms / rows[0].step_ms)
    assert rows[1].vs_ddp < 1


@given(MODELS, st.sampled_from([2, 8, 64]), RATES, RATES)
@settings(max_examples=10, deadline=None)
def test_more_gigabits_never_slow_plain_ddp(
    model: str, ranks: int, one: float, other: float
) -> None:
    grid = Grid((), gbps=tuple(sorted((one, other))), ranks=(ranks,), hop_s=1e-5)
    slow, fast = rows_of(profile_of(model), grid)
    assert fast.step_ms <= slow.step_ms + 1e-9


@given(MODELS, RATES)
@settings(max_examples=10, deadline=None)
def test_more_ranks_never_speed_plain_ddp(model: str, gbps: float) -> None:
    grid = Grid((), gbps=(gbps,), ranks=(2, 3, 16, 1024), hop_s=1e-5)
    steps = [row.step_ms for row in rows_of(profile_of(model), grid)]
    assert steps == sorted(steps)


@given(MODELS, st.sampled_from([2, 16, 256]), RATES, st.floats(0, 1e-4), st.booleans())
@settings(max_examples=10, deadline=None)
def test_no_exact_row_beats_the_bound(
    model: str, ranks: int, gbps: float, hop_s: float, in_series: bool
) -> None:
    grid = Grid(choices(), gbps=(gbps,), ranks=(ranks,), hop_s=hop_s, in_series=in_series)
    for row in rows_of(profile_of(model), grid):
        assert row.step_ms >= row.ideal_ms - 1e-6
        assert row.step_ms >= row.compute_ms - 1e-9


def test_best_is_the_shorter_of_ring_and_tree() -> None:
    profile = profile_of("resnet50")
    found = {
        name: list(
            rows_of(profile, Grid(choices(), ranks=(64,), gbps=(1.0, 100.0), algorithm=name))
        )
        for name in ("ring", "tree", "best")
    }
    for ring, tree, best in zip(*found.values(), strict=True):
        assert best.step_ms == min(ring.step_ms, tree.step_ms)
        assert best.algorithm in ("ring", "tree")
    assert {row.algorithm for row in found["best"]} == {"ring", "tree"}


@pytest.mark.parametrize("name", profiles.names())
def test_a_thousand_ranks_are_no_trouble(name: str) -> None:
    grid = Grid(choices(), gbps=(10.0,), ranks=(1024,))
    rows = list(rows_of(profiles.load(name).profile, grid))
    assert all(math.isfinite(row.step_ms) for row in rows)
    assert all(row.exposed_ms > 0 for row in rows)


def test_one_at_a_time_each_latency_is_paid() -> None:
    """All gradients ready at once: latencies add up, where otherwise the wire hides them."""
    base = replace(profile_of("resnet50"), link=Link(5e-3, 8e-9))
    count = len(base.layout.buckets)
    flat = replace(base, ready_s=(base.backward_s,) * count)
    together = predict(base_line(), flat).step_s
    apart = predict(serial(base_line()), flat).step_s
    assert apart - together == pytest.approx((count - 1) * 5e-3)


def test_coding_costs_time() -> None:
    profile = profile_of("resnet50")
    found = choices(["priority"], ["int8"], deferred=True)
    free, paid = (
        [row for row in rows_of(profile, Grid(found, coding_s=cost)) if row.codec == "int8"]
        for cost in ({}, {"int8": 2e-8})
    )
    assert paid[0].step_ms > free[0].step_ms


def test_computing_is_scaled_in_proportion() -> None:
    profile = profile_of("gpt2")
    twice = recomputed(profile, 2 * profile.compute_s)
    assert twice.compute_s == pytest.approx(2 * profile.compute_s)
    assert twice.ready_s == pytest.approx([2 * ready_s for ready_s in profile.ready_s])
    assert (twice.layout, twice.link) == (profile.layout, profile.link)
    with pytest.raises(CommSchedError, match="no computing times"):
        recomputed(Profile.unmeasured(profile.layout, 2), 1.0)


def test_choices_are_those_that_make_sense() -> None:
    names = [candidate.name for candidate in choices()]
    assert names[:2] == ["fifo", "fifo, whole buckets"]
    assert names[2:] == [f"{policy}, deferred" for policy in policies.names()]
    assert choices(["priority", "rs_ag"], deferred=False) == ()
    both = choices(["fifo"], ["none", "topk:ratio=0.01"], deferred=True)
    assert [candidate.lossy for candidate in both] == [False, True]
    assert len(choices(settings=Settings(chunk_mb=8), deferred=False)) == 1


def test_what_was_never_measured_is_refused() -> None:
    empty = Profile.unmeasured(profile_of("vgg16").layout, 2)
    with pytest.raises(CommSchedError, match="no measured times"):
        list(rows_of(empty, Grid(choices())))


# ---------------------------------------------------------------- the command


def test_json_holds_every_row() -> None:
    result = simulate("resnet50", "--ranks", "2,1024", "--gbps", "1,10,25", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {(row["ranks"], row["gbps"]) for row in document["rows"]} == {
        (ranks, gbps) for ranks in (2, 1024) for gbps in (1.0, 10.0, 25.0)
    }
    assert "367 images/s" in document["source"]


def test_the_table_names_what_varies_and_what_is_fastest() -> None:
    result = simulate("vgg16", "--gbps", "10", "--ranks", "4,64", "--policy", "priority")
    assert result.exit_code == 0, result.output
    assert "ring" in result.output
    for text in ("ranks", "priority, deferred", "64 ranks, 10 Gbit/s: plain DDP loses"):
        assert text in result.output
    assert "bucket MB" not in result.output.split("┏")[1].splitlines()[1]


def test_free_coding_is_said_and_a_figure_is_used() -> None:
    free = simulate("resnet50", "--codec", "int8,topk:ratio=0.02")
    assert "coding with int8, topk:ratio=0.02 is taken to be free" in free.output
    rows = [
        json.loads(simulate("resnet50", "--codec", "int8", "--json", *more).stdout)
        for more in ([], ["--coding", "int8=10"])
    ]
    assert rows[0]["remarks"]
    assert not rows[1]["remarks"]
    last = [document["rows"][-1]["step_ms"] for document in rows]
    assert last[1] > last[0]


@pytest.mark.parametrize(
    ("args", "ending"),
    [
        (["--ranks", "2,64", "--gbps", "1,10"], "svg"),
        (["--gbps", "1,100", "--bucket-cap-mb", "4,25"], "png"),
        ([], "pdf"),
    ],
)
def test_a_picture_is_drawn(args: list[str], ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture.{ending}"
    result = simulate("vgg16", *args, "--picture", str(path))
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 1000
    if ending == "svg":
        text = path.read_text()
        assert all(f"<!-- {word} -->" in text for word in ("computing alone", "ddp", "ranks"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "cannot be read"),
        (["resnet50", "--ranks", "1"], "at least 2"),
        (["resnet50", "--gbps", "fast"], "is not a list like"),
        (["resnet50", "--gbps", "0"], "at least"),
        (["resnet50", "--gbps", "nan"], "at least"),
        (["resnet50", "--codec", "none,int9"], "did you mean"),
        (["resnet50", "--set", "chunk=8"], "NAME=VALUE"),
        (["resnet50", "--set", "chunk_mb=-8"], "0 to 1024"),
        (["resnet50", "--coding", "int8"], "neither measured nor"),
        (["resnet50", "--policy", "best"], "fifo"),
        (["resnet50", "--compute-ms", "0"], "compute-ms"),
        (["resnet50", "--picture", "x.nothing"], "cannot be drawn"),
    ],
)
def test_bad_input_is_refused_in_words(args: list[str], said: str) -> None:
    result = simulate(*args)
    assert result.exit_code != 0
    assert said in result.output
    assert "Traceback" not in result.output
