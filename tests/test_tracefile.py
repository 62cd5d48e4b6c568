"""Trace files: whatever is left of one is read, and ranks come to lie on one time line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from commsched.cli import main
from commsched.errors import CommSchedError
from commsched.tracing.file import RankTrace, _Offset, merged, read, read_all
from commsched.tracing.tracer import Fixed, Tracer

COUNT, FEW = 12, 3


def write(
    folder: Path, rank: int, world_size: int = 2, more: Any = None, count: int = COUNT
) -> Path:
    """A small trace with `count` waits at 10, 11, ... seconds."""
    tracer = Tracer(str(folder), rank, world_size, "", model="abc")
    tracer.begin_step(0, "settled", "fifo", None, False, 9.0)
    for number in range(count):
        at_s = 10.0 + number
        tracer.span("wait", "training", at_s, at_s + 0.5, Fixed({"params": "wä"}), number=number)
    tracer.queued(10.0, 12.0, task=1)
    tracer.flight(12.0, 13.0, task=1)
    tracer.instant("ready", "buckets", 9.5, bucket=0)
    if more is not None:
        more(tracer)
    tracer.close()
    return Path(tracer.path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("whole"), 0, count=FEW).read_bytes()


# ---------------------------------------------------------------- what is left of a file


def test_a_file_cut_anywhere_loses_its_last_line_only(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace-rank0.json"
    head = whole.index(b"\n", 2) - 1  # so much is written before the file gets its name
    events = [line.strip(b",") for line in whole.split(b"\n")[1:-2]]
    for length in range(head, len(whole) + 1):
        trace = read(_with(path, whole[:length]))
        lines = [line.strip(b",") for line in whole[:length].split(b"\n")[1:]]
        there = [one for one, line in zip(events, lines, strict=False) if one == line]
        assert len(trace.events) == len(there), length
        assert trace.complete == (len(there) == len(events)), length


@given(st.integers(0, 40))
def test_without_its_first_event_it_is_no_trace(length: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Path, "read_bytes", lambda _: b'[\n{"ph":"M","name":"commsched","args'[:length]
        )
        with pytest.raises(CommSchedError, match="not a trace"):
            read("trace-rank0.json")


@given(data=st.data())
def test_damage_in_the_middle_is_said(whole: bytes, data: st.DataObject) -> None:
    lines = whole.split(b"\n")
    number = data.draw(st.integers(1, len(lines) - 4))
    cut = data.draw(st.integers(1, len(lines[number]) - 2))
    lines[number] = lines[number][:cut]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: b"\n".join(lines))
        with pytest.raises(CommSchedError, match=f"line {number + 1}"):
            read("trace-rank0.json")


def test_a_span_of_two_lines_is_lost_with_its_second(whole: bytes, tmp_path: Path) -> None:
    cut = whole[: whole.index(b'{"ph":"e"')]
    trace = read(_with(tmp_path / "trace-rank0.json", cut))
    assert "queued" not in [span.name for span in trace.spans]
    assert len(trace.spans) == FEW


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"traceEvents": []}',
        b"[\n]\n",
        b"[]",
        b"\x89PNG\r\n",
        b'[\n{"ph":"X","name":"other","ts":1,"dur":2},\n',
        b'[\n{"ph":"M","name":"commsched","args":{}},\n',
        b'[\n{"ph":"M","name":"commsched","args":{"rank":0,"world_size":1}},\n[1],\n{}]',
    ],
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CommSchedError, match="not a trace"):
        read(_with(tmp_path / "trace-rank0.json", content))


def test_missing_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(CommSchedError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(CommSchedError, match="COMMSCHED_TRACE"):
        read_all([tmp_path])
    with pytest.raises(CommSchedError, match="folder"):
        read_all([])


# ---------------------------------------------------------------- several ranks


def test_ranks_are_read_in_order_whatever_else_is_there(tmp_path: Path) -> None:
    for rank in (2, 0, 1):
        write(tmp_path, rank, 3)
    write(tmp_path, 0, 3)  # a second model
    (tmp_path / "merged.json").write_text("[]")
    (tmp_path / "trace-rank7.json.55.new").write_text("[")
    traces = read_all([tmp_path, tmp_path / "trace-rank1.json"])
    assert [(trace.rank, trace.model) for trace in traces] == [(0, 1), (1, 1), (2, 1), (0, 2)]


def test_files_of_several_jobs_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 2)
    write(tmp_path / "b", 1, 4)
    write(tmp_path / "c", 0, 2)
    for others in ("b", "c"):
        with pytest.raises(CommSchedError, match="several jobs"):
            read_all([tmp_path / "a", tmp_path / others])


def test_a_further_models_file_of_an_earlier_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    second = write(tmp_path, 0, 1)
    assert len(read_all([tmp_path])) == 2
    text = second.read_text()
    second.write_text(text.replace(f'"pid":{os.getpid()}', '"pid":1'))
    with pytest.raises(CommSchedError, match="several jobs"):
        read_all([tmp_path])


def test_missing_ranks_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1, 3)
    with caplog.at_level(logging.WARNING, "commsched"):
        read_all([tmp_path])
    assert "[1] only, of 3" in caplog.text


def clocks(*points: tuple[float, float]) -> Callable[[Tracer], None]:
    def note(tracer: Tracer) -> None:
        for at_s, offset_s in points:
            tracer.note("commsched_clock", at_s=at_s, offset_s=offset_s, error_s=1e-5)

    return note


def test_spans_are_put_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, more=clocks((12.0, 100.0), (16.0, 101.0)))
    zero, one = read_all([tmp_path])
    waits = [[span.begin_s for span in trace.spans if span.name == "wait"] for trace in (zero, one)]
    moved = [after - before for before, after in zip(*waits, strict=True)]
    expected = [100.0, 100.0, 100.0, 100.25, 100.5, 100.75, *[101.0] * 6]
    assert moved == pytest.approx(expected, abs=1e-6)
    assert read(one.path).spans[0].begin_s == 10.0  # as written


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(-5, 5)), min_size=1, unique_by=lambda p: p[0]
    ),
    st.floats(-10, 110),
)
def test_the_offset_lies_between_its_neighbours(
    points: list[tuple[int, float]], at_s: float
) -> None:
    notes = [("commsched_clock", {"at_s": float(at), "offset_s": off}) for at, off in points]
    offset_s = _Offset(RankTrace(1, 2, {}, (), notes)).at(at_s)
    points.sort()
    left = [off for at, off in points if at <= at_s][-1:]
    right = [off for at, off in points if at > at_s][:1]
    assert min(left + right) - 1e-9 <= offset_s <= max(left + right) + 1e-9


# ---------------------------------------------------------------- merging


def test_a_merged_file_has_all_ranks_on_one_clock(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, more=clocks((0.0, 50.0)))
    write(tmp_path, 1, more=clocks((0.0, 50.0)))
    out = tmp_path / "merged.json"
    result = CliRunner().invoke(main, ["trace", "merge", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 of 2 ranks" in result.output
    events = json.loads(out.read_text())
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    texts = [named[pid] for pid in sorted(named, key=lambda pid: order[pid])]
    assert [text.split(" (")[0] for text in texts] == ["rank 0", "rank 1", "rank 1"]
    assert texts[2].endswith("model 2")
    assert len(named) == 3
    for pid, name in named.items():
        waits = [e["ts"] for e in events if e["pid"] == pid and e["name"] == "wait"]
        assert waits[0] == (60e6 if name.startswith("rank 1") else 10e6)
        assert "training" in [
            e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"
        ]
    ids = [(e["ph"], e["id"]) for e in events if "id" in e]
    assert len(ids) == len(set(ids)) == 6


def test_a_cut_file_merges_too(whole: bytes, tmp_path: Path) -> None:
    _with(tmp_path / "trace-rank0.json", whole[:-200])
    lines = list(merged(read_all([tmp_path])))
    assert len(json.loads("".join(lines))) > FEW


@pytest.mark.parametrize(
    ("name", "content"), [("none", None), ("other.json", b'{"traceEvents": []}')]
)
def test_the_command_says_what_is_wrong(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    out = tmp_path / "merged.json"
    result = CliRunner().invoke(main, ["trace", "merge", str(path), "-o", str(out)])
    assert result.exit_code == 1
    assert name in result.output
    assert not out.exists()


def test_the_command_does_not_write_over_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path, 0)
    before = path.read_bytes()
    result = CliRunner().invoke(main, ["trace", "merge", str(path), "-o", str(path)])
    assert result.exit_code == 1
    assert "another file" in result.output
    assert path.read_bytes() == before


def _with(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
