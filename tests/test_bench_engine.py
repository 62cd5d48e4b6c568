"""bench/engine.py: its cases and figures, and a run on two ranks. No speeds are asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
# bench is not installed. At the end: the repository's `cuda` must not shadow an installed one.
sys.path.append(str(ROOT))

from bench.engine import HEADS, Bare, Case, OurEngine, Row, cases, main, measure  # noqa: E402
from bench.launch import launch  # noqa: E402
from bench.links import loopback_links  # noqa: E402
from commsched.layout import BucketSpec, Layout, ParamSpec  # noqa: E402
from commsched.policies import get as get_policy  # noqa: E402
from commsched.profile import Profile  # noqa: E402
from tests.distributed import ranks  # noqa: E402


@given(
    lines=st.integers(1, 40),
    count=st.integers(1, 60),
    in_flight=st.integers(1, 16),
    buckets=st.integers(1, 9),
)
def test_the_engine_cuts_just_the_chunks_of_the_case(
    lines: int, count: int, in_flight: int, buckets: int
) -> None:
    case = Case(64 * lines, count, in_flight, buckets)
    numels = case.bucket_numels()
    specs = [BucketSpec((ParamSpec(f"p{i}", n),), "float32") for i, n in enumerate(numels)]
    plan = get_policy("fifo")(Profile.unmeasured(Layout(tuple(specs)), 2), case.settings)
    assert min(numels) > 0
    assert [task.wire_bytes for task in plan.tasks] == [case.nbytes] * count
    assert plan.credit_bytes == in_flight * case.nbytes


def test_counts_are_for_all_sizes_or_one_each() -> None:
    assert [case.count for case in cases([64, 128], [7], 4, 8)] == [7, 7]
    assert [case.count for case in cases([64, 128], [7, 9], 4, 8)] == [7, 9]
    chosen = cases([1024, 2**30], [], 4, 8)
    assert chosen[0].count > chosen[1].count >= 8
    with pytest.raises(ValueError, match="3 counts for 2 sizes"):
        cases([64, 128], [1, 2, 3], 4, 8)


def test_sizes_are_whole_lines() -> None:
    assert [case.nbytes for case in cases([1, 64, 65], [1], 4, 8)] == [64, 64, 128]


def test_figures_are_of_one_chunk() -> None:
    row = Row(Case(64, 100, 4, 8), [2e-3, 3e-3, 9e-3], [1e-3, 2e-3, 3e-3], [1e-2] * 3, [5e-3] * 3)
    figures = row.figures()
    assert (*figures,) == HEADS
    assert figures["engine us"] == pytest.approx(30)
    assert figures["c10d us"] == pytest.approx(20)
    assert figures["more us"] == pytest.approx(10)
    assert figures["engine/s"] == pytest.approx(1e6 / 30)
    assert figures["engine cpu us"] == pytest.approx(100)
    assert figures["c10d cpu us"] == pytest.approx(50)
    assert figures["ratio"] == pytest.approx(2)  # median of 2, 1.5 and 3, round by round


@ranks(2)
def test_both_average_the_same(rank: int) -> None:
    case = Case(128, 10, 3, 4)
    engine, bare = OurEngine(case, rank), Bare(case, rank)
    for _ in range(3):
        engine.iteration()
        bare.iteration()
    issued = engine.driven.engine.issued
    engine.driven.close()
    assert set(engine.flat.tolist()) == set(bare.flat.tolist()) == {0.5}
    assert [index for _, index in issued[-2 * case.count :]] == [*range(case.count)] * 2


@ranks(2)
def test_a_wrong_sum_is_an_error(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bare, "iteration", lambda _: None)
        with pytest.raises(RuntimeError, match=r"c10d averaged .* wrongly"):
            measure(Case(64, 2, 1, 1), 1, 2)


def test_it_runs_on_two_ranks(tmp_path: Path) -> None:
    said: list[str] = []

    def echo(rank: int, line: str, is_stderr: bool) -> None:
        if rank == 0 and not is_stderr:
            said.append(line)

    path = tmp_path / "engine.json"
    arguments = ["-s", "64", "-s", "4096", "-n", "6", "-r", "2", "-x", "2", "--json", str(path)]
    with loopback_links(2) as links:
        command = [sys.executable, str(ROOT / "bench" / "engine.py"), *arguments]
        results = launch(links, command, time_limit_s=60, echo=echo)
    assert [result.status for result in results] == ["ok", "ok"], [r.tail for r in results]
    rows = [line.split() for line in said if not line.startswith("#")]
    assert [row[:3] for row in rows] == [["64", "6", "4"], ["4096", "6", "4"]]
    saved = json.loads(path.read_text())
    assert "commsched" in saved["versions"]
    for row in saved["rows"]:
        assert len(row["engine_s"]) == len(row["c10d_s"]) == 2
        assert row["engine_us"] > 0
        assert row["engine_cpu_us"] > 0


def test_outside_a_job_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun"):
        main.main(["-n", "1"])
    with pytest.raises(SystemExit):
        main.main(["-s", "64", "-s", "128", "-n", "1", "-n", "2", "-n", "3"])
    assert "3 counts for 2 sizes" in capsys.readouterr().err
