"""``commsched report``: what it prints, and how it ends."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commsched import policies
from commsched.cli import main
from commsched.commands import report as command
from commsched.settings import Settings
from tests.profiles import profile_of
from tests.traces import RankFile, simulated, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = profile_of("resnet50", 8)
    settings = Settings(policy="fifo")
    plan = policies.get("fifo")(profile, settings)
    files, _ = simulated(profile, plan, deferred=False, choice="fifo", settings=asdict(settings))
    return written(files, tmp_path_factory.mktemp("traces"))


@pytest.fixture(autouse=True)
def coding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is not busy: in a test nothing is timed."""
    monkeypatch.setattr(command, "_timed", lambda codec, world_size: 4e-10)


def report(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, args)])


def test_terminal(folder: Path) -> None:
    result = report(folder)
    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[0]
    assert first.startswith("You lose 324 ms of 1111 ms a step (29%) to communication, because ")
    for text in (
        "3 steps of 2 ranks, fifo",
        "left out: 1 step",
        "overlap 60%",
        "hand the optimizer",
    ):
        assert text in result.stdout


def test_files_as_well_as_folders(folder: Path) -> None:
    assert report(*sorted(folder.iterdir())).stdout.splitlines()[0].startswith("You lose 324 ms")


def test_json(folder: Path) -> None:
    result = report(folder, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["exposed_ms"] == pytest.approx(324.46, abs=0.1)
    assert data["headline"].startswith("You lose")
    assert data["do"]
    assert data["predicted"]["present_ms"] == pytest.approx(data["step_ms"], rel=0.01)
    assert len(data["ranks"]) == 2
    assert len(data["buckets"]) == len(profile_of("resnet50", 8).layout.buckets)


def test_html_and_terminal(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = report(folder, "--html", page)
    assert result.exit_code == 0, result.output
    assert f"page: {page}" in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_no_steps(tmp_path: Path) -> None:
    result = report(written([RankFile(0, 1)], tmp_path))
    assert result.exit_code == 1
    assert "COMMSCHED_TRACE_STEPS" in result.stderr


def test_no_traces(tmp_path: Path) -> None:
    result = report(tmp_path)
    assert result.exit_code == 1
    assert "COMMSCHED_TRACE" in result.stderr


def test_a_page_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    result = report(folder, "--html", tmp_path / "no" / "page.html")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr
