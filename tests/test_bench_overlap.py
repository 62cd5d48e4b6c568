"""bench/overlap.py: OSU's formula, its options, and a run on two ranks. No speeds are asserted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
# bench is not installed. At the end: the repository's `cuda` must not shadow an installed one.
sys.path.append(str(ROOT))

from bench.driven import Driven  # noqa: E402
from bench.launch import launch  # noqa: E402
from bench.links import loopback_links  # noqa: E402
from bench.overlap import (  # noqa: E402
    HEADS,
    Options,
    Row,
    Times,
    _line,
    best_percent,
    main,
    measure,
    overlap_percent,
    read_sizes,
    sizes_between,
)
from bench.overlap_ways import Matmul, Sleep, make  # noqa: E402
from tests.distributed import ranks  # noqa: E402

SECONDS = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    ("overall_s", "compute_s", "comm_s", "percent"),
    [
        (1.0, 1.0, 0.5, 100.0),  # all of it hidden
        (1.5, 1.0, 0.5, 0.0),  # none
        (1.125, 1.0, 0.5, 75.0),
        (2.0, 1.0, 0.5, 0.0),  # both got slower: never below 0
    ],
)
def test_overlap_is_what_communication_did_not_add(
    overall_s: float, compute_s: float, comm_s: float, percent: float
) -> None:
    assert overlap_percent(overall_s, compute_s, comm_s) == pytest.approx(percent)


@given(compute_s=SECONDS, comm_s=SECONDS, hidden=st.floats(0, 1))
def test_overlap_is_the_hidden_share(compute_s: float, comm_s: float, hidden: float) -> None:
    overall_s = compute_s + (1 - hidden) * comm_s
    error = 1e-12 * overall_s / comm_s * 100 + 1e-9
    assert overlap_percent(overall_s, compute_s, comm_s) == pytest.approx(100 * hidden, abs=error)


def test_without_communication_there_is_no_overlap() -> None:
    assert math.isnan(overlap_percent(1.0, 1.0, 0.0))
    row = Row("ddp", 8, *[Times(1.0, 1.0, 0.5, 0.5)] * 2)
    assert row.to_dict()["mean"]["overlap_percent"] is None
    assert _line(row).split()[4] == "-"


def test_what_a_step_costs_anyway_is_not_communication() -> None:
    times = Times(overall_s=1.5, compute_s=1.1, comm_s=0.6, nothing_s=0.1)
    assert times.overlap_percent == pytest.approx(20)


@given(layers=st.integers(1, 30), compute_ratio=st.floats(0, 4), forward_share=st.floats(0, 0.9))
def test_the_best_overlap_is_that_of_a_serial_link(
    layers: int, compute_ratio: float, forward_share: float
) -> None:
    backward_s, free_s = (1 - forward_share) * compute_ratio, 0.0  # communication takes 1 s
    for layer in range(layers):
        free_s = max(free_s, (layer + 1) * backward_s / layers) + 1 / layers
    options = Options(layers=layers, compute_ratio=compute_ratio, forward_share=forward_share)
    expected = overlap_percent(free_s, backward_s, 1.0)
    assert best_percent(options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4:64", (4, 64)), ("64K:1M", (65536, 2**20)), ("16m", (1, 2**24)), (":1k", (1, 1024))],
)
def test_sizes_are_read_as_osu_does(text: str, sizes: tuple[int, int]) -> None:
    assert read_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "4:", "x", "1T", "8:4", "0", "-4:8", "1.5M"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|largest"):
        read_sizes(text)


def test_sizes_grow_by_the_factor() -> None:
    assert [*sizes_between(1024, 70_000, 4)] == [1024, 4096, 16384, 65536]
    assert [*sizes_between(1, 9, 2)] == [4, 4, 4, 8]  # whole numbers, one at least


@pytest.mark.parametrize("compute", [Sleep(0.0), Matmul(0.0, 1e-5)])
def test_no_computing_takes_none(compute: Any) -> None:
    compute.run(1.0)


def test_products_are_as_many_as_asked_for() -> None:
    assert Matmul.product_seconds(10) > 0
    assert Matmul(1.0, 0.25)._products == 4


def test_bad_options_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in ((["-m", "8:4"], "larger than"), (["-w", "nope"], "unknown hook")):
        with pytest.raises(SystemExit) as stop:
            main.main(arguments)
        assert stop.value.code == 1
        assert said in capsys.readouterr().err


@ranks(2)
def test_an_engine_without_ddp_averages(rank: int) -> None:
    import torch

    from commsched.settings import Settings

    driven = Driven(Settings(policy="fifo", timeout_s=30.0), [5, 70])
    for step in range(3):
        buffers = [torch.full((5,), 2.0 * rank + step), torch.full((70,), -float(rank))]
        for buffer in buffers:
            driven.ready(buffer)
        driven.finish()
        assert torch.equal(buffers[0], torch.full((5,), 1.0 + step))
        assert torch.equal(buffers[1], torch.full((70,), -0.5))
    driven.close()


@pytest.mark.parametrize(
    "text", ["c10d", "engine", "ddp", "commsched:policy=fifo", "commsched:optimizer=true"]
)
@ranks(2)
def test_every_way_measures_all_four_kinds_of_steps(rank: int, text: str) -> None:
    options = Options(iterations=1, warmup=1, rounds=1, layers=3, forward_share=0.25, sleep=True)
    row = measure(text, 4096, Sleep(0.003), options)
    assert (row.way, row.nbytes) == (text, 4096)
    for times in (row.mean, row.largest):
        assert times.compute_s >= 0.003
        assert times.overall_s >= 0.003
        assert min(times.comm_s, times.nothing_s) > 0


@ranks(2)
def test_an_unknown_way_is_an_error(rank: int) -> None:
    with pytest.raises(ValueError, match="unknown hook"):
        make("nothing", 64, 1, Sleep(0.0), 0.0, 1)


def lines_of(script: str, *arguments: str) -> Sequence[str]:
    """What rank 0 of two prints; both must end well."""
    said: list[str] = []

    def echo(rank: int, line: str, is_stderr: bool) -> None:
        if rank == 0 and not is_stderr:
            said.append(line)

    with loopback_links(2) as links:
        command = [sys.executable, str(ROOT / script), *arguments]
        results = launch(links, command, time_limit_s=60, echo=echo)
    assert [result.status for result in results] == ["ok", "ok"], [r.tail for r in results]
    return said


def test_it_runs_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    arguments = ["-i1", "-x1", "-r1", "--layers=2", "-wc10d", "-wengine", "-wddp", f"--json={path}"]
    lines = lines_of("bench/overlap.py", "-m1K:4K", *arguments)
    head = [line for line in lines if line.startswith("# Size")]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert len(head) == 1
    assert all(text in head[0] for text in HEADS)
    assert [(row[0], row[-1]) for row in rows] == [
        (size, way) for size in ("1024", "4096") for way in ("c10d", "engine", "ddp")
    ]
    saved = json.loads(path.read_text())
    assert saved["ranks"] == 2
    assert {"torch", "numba", "numpy", "commsched", "python"} <= saved["versions"].keys()
    assert saved["machine"]["cores"] >= 1
    for row, line in zip(saved["rows"], rows, strict=True):
        assert float(line[1]) == pytest.approx(1e6 * row["mean"]["overall_s"], abs=0.01)
        assert row["largest"]["overall_s"] >= row["mean"]["overall_s"]
