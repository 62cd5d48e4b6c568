"""bench/collectives.py: sizes, columns, totals, and both kinds of rows on two ranks."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.collective_exchanges import RS_AG, Averaging, Exchanges, ways
from bench.collective_rows import (
    AGGREGATES,
    Result,
    Row,
    as_json,
    average_bus_bw,
    parse_size,
    result_of,
    sizes,
    text_of,
    wrong_in,
)
from bench.collectives import main
from bench.launch import launch
from bench.links import loopback_links
from commsched import codecs
from commsched.linkprobe.collectives import NAMES, Wires
from tests.distributed import ranks

ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("1K", 1024), ("32M", 2**25), ("2g", 2**31), ("1.5k", 1536)]
)
def test_sizes_are_written_as_for_nccl_tests(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1T", "-1K", "0", "1KB", "1e400", "nan"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        parse_size(text)


@given(st.integers(1, 10**6), st.integers(1, 10**9), st.integers(2, 10))
def test_sizes_go_up_by_the_factor(least: int, most: int, factor: int) -> None:
    found = list(sizes(least, most, factor))
    assert all(b == a * factor for a, b in pairwise(found))
    assert found == [] if least > most else (found[0] == least and found[-1] <= most)


# ---------------------------------------------------------------- columns


@given(st.lists(st.floats(1e-6, 10), min_size=2, max_size=9), st.integers(1, 10**9))
def test_bandwidths_are_nccl_tests(times_s: list[float], nbytes: int) -> None:
    n = len(times_s)
    for aggregate, seconds in zip(
        AGGREGATES, (times_s[0], sum(times_s) / n, min(times_s), max(times_s)), strict=True
    ):
        result = result_of(times_s, aggregate, nbytes, "all_reduce", 0)
        assert result.time_us == pytest.approx(1e6 * seconds)
        assert result.max_us == pytest.approx(1e6 * max(times_s))
        assert result.alg_bw == pytest.approx(nbytes / seconds / 1e9)
        assert result.bus_bw == pytest.approx(result.alg_bw * 2 * (n - 1) / n)


GOOD = Result(10.0, 12.0, 1.0, 2.0, 0)


def test_a_way_without_a_result_says_why_in_its_place() -> None:
    row = Row("all_to_all", 1024, 128, "float", "none", -1, GOOD, "torch has none")
    line = text_of(row, exchange=False)
    assert line.split()[:9] == [
        "1024",
        "128",
        "float",
        "none",
        "-1",
        "10.00",
        "1.000",
        "2.000",
        "0",
    ]
    assert line.endswith("N/A: torch has none")
    data = as_json(row)
    assert data["in_place"] == {"unavailable": "torch has none"}
    assert (data["out_of_place"]["time"], data["out_of_place"]["nwrong"]) == (10.0, 0)


def test_totals() -> None:
    bad = Result(10.0, 12.0, 1.0, 4.0, 3)
    rows = [
        Row("all_reduce", 8, 2, "float", "sum", -1, GOOD, bad),
        Row("all_to_all", 8, 1, "float", "none", -1, GOOD, "none"),
    ]
    assert wrong_in(rows) == 3
    assert average_bus_bw(rows) == pytest.approx(8 / 3)
    assert average_bus_bw([]) == 0.0


# ---------------------------------------------------------------- exchanges x codecs


def test_every_codec_is_among_the_ways() -> None:
    assert {*ways()} == {*codecs.names(), RS_AG}


def test_a_codec_that_takes_no_such_gradients_says_so() -> None:
    with pytest.raises(ValueError, match=r"int8 leaves torch\.int64 gradients as they are"):
        Averaging(Wires(None, 0, 2), "int8", 8, torch.int64)  # type: ignore[arg-type]


OPTIONS = argparse.Namespace(n=1, w=0, c=1, a=1, dtype="float")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way_averages(world_size: int) -> None:
    ranks(world_size)(every_way)()


def every_way(rank: int, world_size: int) -> None:
    exchanges = Exchanges(Wires.of_world("cpu"), OPTIONS, torch.float32)
    for way in ways():
        row = exchanges.row(way, 4 * 4096)
        assert isinstance(row.in_place, Result), row
        assert row.in_place.nwrong == 0, row
        assert row.coding is not None
        assert row.coding.rel_err is not None
        assert (row.coding.rel_err < 1e-6) == (not codecs.get(way.partition("/")[0]).lossy), row
        assert row.coding.wire_bytes > 0
        assert row.coding.ratio > 0.99 or way in ("powersgd", "acpsgd")


@ranks(2)
def test_an_average_that_is_wrong_or_differs_is_found(rank: int, world_size: int) -> None:
    class Spoiled(Averaging):
        def once(self):  # type: ignore[no-untyped-def]
            phases = super().once()
            if rank == 1:
                self.bucket[5] += 1
            return phases

    exchanges = Exchanges(Wires.of_world("cpu"), OPTIONS, torch.float32)
    for way in ("none", RS_AG, "int8"):
        averaging = Spoiled(Wires.of_world("cpu"), way, 64, torch.float32)
        averaging.grads.copy_(exchanges._gradients(averaging, rank))
        assert exchanges.check(averaging)[0] == 1, way


# ---------------------------------------------------------------- the command


def collectives(*args: str) -> tuple[list[str], list[str], str]:
    printed: list[str] = []
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    argv = [sys.executable, str(ROOT / "bench" / "collectives.py"), *args]
    with loopback_links(2) as links:
        ends = launch(links, argv, 60, quiet, lambda _, line, err: err or printed.append(line))
    return [end.status for end in ends], printed, "\n".join(ends[0].tail)


WAYS = "none", RS_AG, "int8", "topk:ratio=0.1"


def test_two_ranks_print_every_collective_and_exchanges(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, printed, said = collectives(
        *("-b", "4", "-e", "4K", "-f", "32", "-n", "2", "--json", str(path)),
        *("-o", *NAMES, *WAYS),
    )
    assert status == ["ok", "ok"], said
    assert "# Out of bounds values : 0 OK" in printed
    assert any(line.startswith("# Avg bus bandwidth") for line in printed)
    document = json.loads(path.read_text())
    assert document["out_of_bounds"] == {"count": 0, "okay": True}
    assert document["config"]["minimum_bytes"] == 4
    found = [(row["collective"], row["size"]) for row in document["results"]]
    assert {name for name, _ in found} == {*NAMES, *WAYS}
    for row in document["results"]:
        if row["collective"] in ("reduce_scatter", "all_gather", "all_to_all") and not row["count"]:
            assert row["in_place"]["unavailable"] == "fewer elements than ranks"
        elif row["collective"] != "all_to_all":
            assert row["in_place"]["nwrong"] == 0
            assert row["in_place"]["bus_bw"] > 0
    codings = [row["coding"] for row in document["results"] if row["collective"] in WAYS]
    assert all({"enc_us", "comm_us", "dec_us", "wire_bytes", "rel_err"} <= {*c} for c in codings)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("-o", "all_redcue"), "all_redcue is no collective and no codec"),
        (("-b", "1Q"), "not a size like 8, 1K, 32M or 1G"),
        (("-n", "0"), "-n must be 1 or more"),
        (("-f", "1"), "-f 2 or more"),
        ((), "torchrun --nproc-per-node 2 bench/collectives.py"),
    ],
)
def test_what_it_does_not_know_it_refuses(
    args: tuple[str, ...],
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", *args])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert what in capsys.readouterr().err
