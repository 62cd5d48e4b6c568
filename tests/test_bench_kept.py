"""bench/kept.py: which kept run is compared with, and what is said of it; on made-up runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
# bench is not installed. At the end: the repository's `cuda` must not shadow an installed one.
sys.path.append(str(ROOT))

from bench.kept import Kept, baseline, kept_runs, main, ratios, say, slower  # noqa: E402

MACHINE = {"cpu": "Some CPU", "cores": 2, "vectors": "AVX2"}
OTHER = {**MACHINE, "cores": 64}
VERSIONS = {"python": "3.11", "torch": "2.13.0", "commsched": "0.1"}
TINY = """
def test_nothing(benchmark):
    benchmark(lambda: None)

def test_twice(benchmark):
    benchmark(lambda: sum(range(100)))
"""


def kept(times_s: dict[str, tuple[float, float]], **changes: Any) -> Kept:
    times = {name: {"median": median, "min": least} for name, (median, least) in times_s.items()}
    fields = {"name": "a.json", "date": "2026", "machine": MACHINE, "versions": VERSIONS}
    return Kept(**{**fields, "times": times, **changes})


def said(before: Kept, now: Kept, threshold: float | None = None) -> tuple[int, str]:
    console = Console(width=120, file=io.StringIO(), record=True)
    code = say(before, now, threshold, console)
    return code, console.export_text()


BEFORE = kept({"f[a-b]": (1e-3, 1e-3), "g": (2e-6, 1e-6)})


def test_a_regression_fails_only_with_a_threshold() -> None:
    now = kept({"f[a-b]": (2e-3, 1.9e-3), "g": (2e-6, 1e-6)})
    code, text = said(BEFORE, now)
    assert code == 0
    assert "SLOWER" not in text
    assert "f[a-b]" in text  # no markup
    assert "2.00" in text
    assert "1.90" in text
    code, text = said(BEFORE, now, threshold=1.5)
    assert code == 1
    assert "SLOWER than 1.5 x: f[a-b]" in text
    assert said(BEFORE, now, threshold=3)[0] == 0


def test_one_of_two_figures_is_noise() -> None:
    now = kept({"f[a-b]": (3e-3, 1e-3), "g": (2e-6, 3e-6)})
    assert slower(ratios(BEFORE, now), 1.2) == []
    assert said(BEFORE, now, threshold=1.2)[0] == 0


def test_those_that_got_slower_most_come_first() -> None:
    found = ratios(BEFORE, kept({"g": (8e-6, 1e-6), "f[a-b]": (1e-3, 5e-4), "new": (1.0, 1.0)}))
    assert [ratio.name for ratio in found] == ["g", "f[a-b]"]
    assert found[0].of_medians == pytest.approx(4)
    assert found[1].of_least == pytest.approx(0.5)


def test_another_machine_is_said_and_never_judged() -> None:
    now = kept({"f[a-b]": (9.0, 9.0)}, machine=OTHER)
    code, text = said(BEFORE, now)
    assert code == 0
    assert "OTHER MACHINE" in text
    assert "Some CPU, 64 cores, AVX2" in text
    assert "Some CPU, 2 cores, AVX2" in text
    code, text = said(BEFORE, now, threshold=2)
    assert code == 2
    assert "cannot be told" in text
    assert "SLOWER" not in text


def test_versions_and_names_that_differ_are_said() -> None:
    now = kept({"h": (1.0, 1.0)}, versions={**VERSIONS, "torch": "2.14.0"})
    code, text = said(BEFORE, now)
    assert code == 0
    assert "torch 2.13.0 -> 2.14.0" in text
    assert "python" not in text
    assert "Only in the kept run: f[a-b], g." in text
    assert "New: h." in text
    assert said(BEFORE, now, threshold=2)[0] == 2  # nothing to judge by


def test_many_names_are_counted() -> None:
    many = kept({f"f{i}": (1.0, 1.0) for i in range(10)})
    assert "f5, ... 10 in all" in said(many, kept({}))[1]
    assert "OTHER" not in said(many, kept({}))[1]


def test_the_last_run_of_this_machine_is_the_one() -> None:
    runs = [
        kept({}, name="old", date="1"),
        kept({}, name="mine", date="2"),
        kept({}, name="theirs", date="3", machine=OTHER),
    ]
    for machine, name in ((MACHINE, "mine"), (OTHER, "theirs"), ({**OTHER, "cores": 1}, "theirs")):
        found = baseline(runs, machine)
        assert found is not None
        assert found.name == name
    assert baseline([], MACHINE) is None


def test_runs_are_sorted_by_date_and_others_refused(tmp_path: Path) -> None:
    for name, date in (
        ("0002_b", "2026-01-02"),
        ("0001_c", "2026-01-03"),
        ("0003_a", "2026-01-01"),
    ):
        content = {
            "machine_info": {"machine": MACHINE, "versions": VERSIONS},
            "datetime": date,
            "benchmarks": [{"fullname": "f", "stats": {"median": 1.0, "min": 0.5}}],
        }
        (tmp_path / name).with_suffix(".json").write_text(json.dumps(content))
    runs = kept_runs(tmp_path)
    assert [run.date[-1] for run in runs] == ["1", "2", "3"]
    assert runs[0].times == {"f": {"median": 1.0, "min": 0.5}}
    for text in ("{}", "[]", "{"):
        (tmp_path / "0004_x.json").write_text(text)
        with pytest.raises(ValueError, match="no run kept"):
            kept_runs(tmp_path)


def test_nothing_kept_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["compare", "--folder", str(tmp_path)])
    assert stop.value.code == 2  # 1 is for what got slower
    assert "make bench" in capsys.readouterr().err


def test_keep_then_compare(tmp_path: Path) -> None:
    """pytest-benchmark writes what is read here, and nothing that names the host."""
    tiny, folder = tmp_path / "tiny.py", tmp_path / "kept"
    tiny.write_text(TINY)
    code = f"""
import bench.kept as kept
kept.FILES = ({str(tiny)!r},)
kept.MEASURE += ("--benchmark-max-time=0.01",)
kept.main(["keep", "--folder", {str(folder)!r}], standalone_mode=False)
kept.main(["compare", "--folder", {str(folder)!r}, "--threshold", "1e9", "--", "-k", "twice"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 benchmarks, geometric mean" in done.stdout
    assert "Only in the kept run" in done.stdout
    (path,) = folder.rglob("*.json")  # comparing keeps nothing
    info = json.loads(path.read_text())["machine_info"]
    assert info.keys() == {"machine", "versions"}
    assert {"torch", "numba", "numpy", "commsched", "python"} <= info["versions"].keys()


def test_the_planning_benchmarks_run() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable"]
    done = subprocess.run(
        [*argv, "bench/micro_planning.py"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
