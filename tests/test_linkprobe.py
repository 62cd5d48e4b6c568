"""The link probe: the line, the budget, the suggestions, and `commsched probe` on two ranks."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.launch import launch
from bench.links import loopback_links
from commsched.cli import main
from commsched.linkprobe import terminal as linkreport
from commsched.linkprobe.collectives import NAMES, Wires
from commsched.linkprobe.run import Probed
from commsched.linkprobe.suggestions import advise, compared
from commsched.linkprobe.sweep import MIB, Point, Sweep, fit, own_sizes, sweep
from commsched.plan import MOST_IN_FLIGHT
from commsched.profile import Link
from commsched.settings import resolve

ROOT = Path(__file__).resolve().parent.parent
QUIET = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}

alphas = st.floats(1e-5, 5e-3)
betas = st.floats(1e-10, 1e-7)  # 80 Gbit/s to 80 Mbit/s
SENT = [4.0**power * 1024 for power in range(8)]


# ---------------------------------------------------------------- the line


@given(alphas, betas)
def test_a_line_is_found(alpha_s: float, beta_s: float) -> None:
    line = fit([(sent, alpha_s + sent * beta_s) for sent in SENT])
    assert line.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert line.beta_s == pytest.approx(beta_s, rel=1e-6)
    assert line.max_error < 1e-9
    assert line.gb_s == pytest.approx(1e-9 / beta_s, rel=1e-6)


@given(alphas, betas, st.lists(st.floats(0.8, 1.25), min_size=8, max_size=8))
def test_noise_moves_it_by_no_more_than_itself(
    alpha_s: float, beta_s: float, noise: list[float]
) -> None:
    rows = [(sent, (alpha_s + sent * beta_s) * n) for sent, n in zip(SENT, noise, strict=True)]
    line = fit(rows)
    errors = [abs((line.alpha_s + sent * line.beta_s) / took_s - 1) for sent, took_s in rows]
    assert line.max_error == pytest.approx(max(errors), rel=1e-6, abs=1e-12)
    assert line.median_error <= line.max_error < 1.0
    assert min(line.alpha_s, line.beta_s) >= 0


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-7, 100)), min_size=1, max_size=9))
def test_nothing_is_negative_whatever_was_measured(rows: list[tuple[float, float]]) -> None:
    line = fit(rows)
    assert min(line.alpha_s, line.beta_s, line.median_error) >= 0
    assert math.isfinite(line.alpha_s + line.beta_s + line.max_error)
    assert line.points == len(rows)


@given(alphas, betas, st.integers(0, 7), st.floats(1.5, 3))
def test_too_long_and_too_short_count_alike(
    alpha_s: float, beta_s: float, at: int, factor: float
) -> None:
    """An error in a sum of two terms moves the line up about as far as it moves it down."""
    rows = [(sent, alpha_s + sent * beta_s) for sent in SENT]
    moved = []
    for change in (factor, 1 / factor):
        off = [(s, t * change if i == at else t) for i, (s, t) in enumerate(rows)]
        line = fit(off)
        moved.append((line.alpha_s + rows[at][0] * line.beta_s) / rows[at][1])
    assert moved[0] >= 1 - 1e-9
    assert moved[1] <= 1 + 1e-9


@pytest.mark.parametrize("rows", [[], [(1.0, 0.0)], [(1.0, 1.0), (2.0, -1.0)]])
def test_a_line_needs_times(rows: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="needs at least one point"):
        fit(rows)


# ---------------------------------------------------------------- the budget


class Simulated(Wires):
    """One rank's view of a link that takes `alpha_s` + bytes x `beta_s`, one after another."""

    def __init__(self, size: int, alpha_s: float, beta_s: float) -> None:
        super().__init__(None, 0, size)  # type: ignore[arg-type]
        self.alpha_s, self.beta_s = alpha_s, beta_s
        self.now_s = self.free_s = 0.0

    def _send(self, nbytes: float) -> Any:
        self.free_s = max(self.now_s, self.free_s) + nbytes * self.beta_s
        return Arriving(self, self.free_s + self.alpha_s)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> Any:
        return self._send(2 * (self.size - 1) / self.size * tensor.nbytes)

    def all_to_all(self, out: Any, inp: Any, out_sizes: Any = (), in_sizes: Any = ()) -> Any:
        return self._send((self.size - 1) / self.size * inp.nbytes if not in_sizes else inp.nbytes)

    def broadcast(self, tensor: torch.Tensor) -> Any:
        return self._send(tensor.nbytes)

    def gathered(self, values: Any) -> list[list[float]]:
        self.now_s += self.alpha_s
        return [list(values)] * self.size

    def barrier(self) -> None:
        self.now_s = max(self.now_s, self.free_s) + self.alpha_s


class Arriving:
    def __init__(self, wires: Simulated, at_s: float) -> None:
        self.wires, self.at_s = wires, at_s

    def wait(self) -> None:
        self.wires.now_s = max(self.wires.now_s, self.at_s)


def simulated(gbit: float, budget_s: float, quick: bool = True) -> tuple[Sweep, Simulated]:
    wires = Simulated(2, 2e-4, 8e-9 / gbit)
    return sweep(wires, budget_s, quick, lambda: wires.now_s), wires


@pytest.mark.parametrize("gbit", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("budget_s", [2.0, 16.0])
def test_it_ends_within_its_budget_and_says_what_it_left_out(gbit: float, budget_s: float) -> None:
    found, wires = simulated(gbit, budget_s)
    assert wires.now_s < 1.1 * budget_s
    assert all(found.alone(name) for name in NAMES)
    measured = {(p.collective, p.nbytes, p.in_flight, p.burst) for p in found.points}
    left_out = {(s.collective, s.nbytes, s.in_flight, s.burst) for s in found.skipped}
    assert not measured & left_out
    assert {case[:2] for case in measured | left_out if case[3] == 1} == {
        (name, nbytes) for name in NAMES for nbytes in (2**10, 2**15, 2**20, 2**23)
    }
    if gbit <= 0.01:
        assert any("Skipped, one at a time" in line for line in linkreport.skipped(found))


def test_the_links_line_and_lanes_are_found() -> None:
    found, _ = simulated(1.0, 16.0)
    for name in NAMES:
        line = found.line(name)
        assert line.beta_s == pytest.approx(8e-9, rel=0.01)
        assert line.alpha_s == pytest.approx(2e-4, rel=0.01)
    advice = advise(found, 2)
    own = own_sizes(Link(2e-4, 8e-9), 2)
    assert advice.chunk_bytes == own.chunk_bytes == MIB
    assert advice.lanes == 1  # alpha is 2 % of a chunk's time
    assert advice.credit_bytes == 3 * MIB
    assert "2 give +" in " ".join(advice.reasons)
    assert "would choose chunk_mb=1 and credit_mb=4" in compared(advice, Link(2e-4, 8e-9), 2)
    with_4 = advice.__class__(own.chunk_bytes, own.credit_bytes, 2, ())
    assert "chooses the same" in compared(with_4, Link(2e-4, 8e-9), 2)


# ---------------------------------------------------------------- suggestions


def swept(chunk: int, speeds: dict[int, list[float]], alpha_s: float, beta_s: float) -> Sweep:
    """All-reduces alone on a line, and several at once with these GB/s by size."""
    points = [
        Point("all_reduce", int(sent), 1, 1, sent, alpha_s + sent * beta_s, 3) for sent in SENT
    ]
    for nbytes, row in speeds.items():
        for most, gb_s in zip((1, 2, 4, 8), row, strict=True):
            points.append(Point("all_reduce", nbytes, most, 16, nbytes, nbytes / gb_s / 1e9, 3))
    return Sweep(points)


@given(alphas, betas, st.lists(st.floats(0.01, 10), min_size=4, max_size=4))
@settings(deadline=None)
def test_lanes_are_the_fewest_that_fill_the_link(
    alpha_s: float, beta_s: float, row: list[float]
) -> None:
    own = own_sizes(Link(*_line(alpha_s, beta_s)), 2)
    advice = advise(swept(own.chunk_bytes, {own.chunk_bytes: row}, alpha_s, beta_s), 2)
    assert advice.chunk_bytes == own.chunk_bytes
    enough = [most for most, gb_s in zip((1, 2, 4, 8), row, strict=True) if gb_s >= 0.95 * max(row)]
    assert advice.lanes == enough[0]
    count = advice.credit_bytes // advice.chunk_bytes
    assert 3 <= count <= MOST_IN_FLIGHT
    assert count == min(MOST_IN_FLIGHT, max(3, advice.lanes + 1))
    variables = dict(line.split("=") for line in advice.environment())
    accepted = resolve({}, variables).settings
    assert (accepted.chunk_bytes, accepted.credit_bytes) == (
        advice.chunk_bytes,
        advice.credit_bytes,
    )


def _line(alpha_s: float, beta_s: float) -> tuple[float, float]:
    line = fit([(sent, alpha_s + sent * beta_s) for sent in SENT])
    return line.alpha_s, line.beta_s


@pytest.mark.parametrize(("larger_gb_s", "chunk"), [(0.125, MIB), (0.5, 4 * MIB)])
def test_larger_chunks_where_those_of_the_rule_do_not_fill_the_link(
    larger_gb_s: float, chunk: int
) -> None:
    speeds = {MIB: [0.12] * 4, 4 * MIB: [larger_gb_s] * 4}
    advice = advise(swept(MIB, speeds, 1e-4, 8e-9), 2)
    assert advice.chunk_bytes == chunk
    assert ("reaches only 24%" in advice.reasons[0]) == (chunk > MIB)


def test_without_several_at_once_the_credit_is_the_policies() -> None:
    advice = advise(swept(MIB, {}, 1e-4, 8e-9), 2)
    own = own_sizes(Link(*_line(1e-4, 8e-9)), 2)
    assert (advice.chunk_bytes, advice.credit_bytes) == (own.chunk_bytes, own.credit_bytes)
    assert "not measured" in advice.reasons[-1]


# ---------------------------------------------------------------- what is written


def test_everything_measured_is_in_the_tables_the_json_and_the_picture(tmp_path: Path) -> None:
    found, _ = simulated(0.1, 4.0)
    probed = Probed(0, 2, "gloo", found, None, 4.0)
    document = json.loads(json.dumps(linkreport.as_json(probed, advise(found, 2)), allow_nan=False))
    assert len(document["points"]) == len(found.points)
    assert len(document["skipped"]) == len(found.skipped)
    assert document["lines"]["all_reduce"]["gb_s"] == pytest.approx(0.0125, rel=0.02)
    alone, lines, together = linkreport.tables(found)
    assert lines.row_count == len(NAMES)
    assert alone.row_count == len({p.nbytes for p in found.points if p.burst == 1})
    assert together.row_count
    pytest.importorskip("matplotlib")
    linkreport.draw(found, tmp_path / "link.svg", "a link")
    drawn = (tmp_path / "link.svg").read_text()
    assert "</svg>" in drawn


# ---------------------------------------------------------------- the command


def probe(*args: str, **environ: str | None) -> Any:
    bare = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return CliRunner().invoke(main, ["probe", *args], env={**bare, **environ})


def test_alone_it_says_how_to_start_it() -> None:
    result = probe()
    assert result.exit_code != 0
    assert "torchrun --nproc-per-node 2 -m commsched probe" in result.output
    one = probe(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    assert one.exit_code != 0
    assert "one rank alone has no link" in one.output
    named = probe("--picture", "a.txt", RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost")
    assert "must end in .svg, .png or .pdf" in named.output


def test_a_peer_that_never_comes_is_an_error() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    result = probe("--timeout-s", "1", **rank)
    assert result.exit_code == 1
    assert "the ranks did not meet within 1 s" in result.output


def test_two_ranks_probe_and_write_it_down(tmp_path: Path) -> None:
    printed: list[str] = []
    argv = [sys.executable, "-m", "commsched", "probe", "--quick", "--seconds", "2"]
    argv += ["--json", str(tmp_path / "link.json"), "--picture", str(tmp_path / "link.png")]
    with loopback_links(2) as links:
        ends = launch(links, argv, 40, QUIET, lambda _, line, err: err or printed.append(line))
    assert [end.status for end in ends] == ["ok", "ok"], [end.tail for end in ends]
    assert sum(line.startswith("COMMSCHED_CHUNK_MB=") for line in printed) == 1
    assert sum(line.startswith("COMMSCHED_CREDIT_MB=") for line in printed) == 1
    document = json.loads((tmp_path / "link.json").read_text())
    assert set(document["lines"]) == set(NAMES)
    assert document["suggestions"]["environment"] == [
        line for line in printed if line.startswith("COMMSCHED_")
    ]
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")


SPOILED = """
import os, time
from commsched.linkprobe import sweep as linkprobe
left, add = [12], linkprobe._Bench.add
def spoiled(*args, **more):
    left[0] -= 1
    if not left[0]:
        {end}
    add(*args, **more)
linkprobe._Bench.add = spoiled
from commsched.cli import main
main(["probe", "--timeout-s", "2"])
"""


@pytest.mark.parametrize("end", ["os._exit(7)", "time.sleep(100)"])
def test_a_peer_that_fails_or_hangs_is_an_error(end: str) -> None:
    with loopback_links(2) as links:
        argv = [sys.executable, "-m", "commsched", "probe", "--timeout-s", "2"]
        first = links.popen(0, argv, QUIET, stderr=subprocess.PIPE, text=True)
        links.popen(1, [sys.executable, "-c", SPOILED.format(end=end)], QUIET)
        _, said = first.communicate(timeout=40)
    assert first.returncode == 1
    assert "the probe stopped at" in said
    assert "start all ranks again" in said
    assert "Traceback" not in said
    if "sleep" in end:
        assert "ranks that did not come: [1]" in said
