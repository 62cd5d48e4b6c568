"""Trace: what reaches the file, what it costs the reporter, and what must never happen."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from commsched.errors import CommSchedError, SettingsError
from commsched.tracing import ranges
from commsched.tracing.file import Span, read, read_all
from commsched.tracing.tracer import SILENT, Fixed, Silent, Tracer, parse_steps
from tests.deferring import Training
from tests.distributed import ranks, run_on_ranks

EVERYTHING = 2**62


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[Tracer]:
    made = Tracer(str(tmp_path), 1, 4, "", model="abc")
    begin(made, 0)
    yield made
    made.close()


def begin(tracer: Silent, step: int) -> None:
    tracer.begin_step(step, "settled", "priority", "d1", True, float(step))


def spans(tracer: Tracer) -> list[Span]:
    tracer.close()
    return list(read(tracer.path).spans)


# ---------------------------------------------------------------- which steps


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("10:20", 10, 19),
        ("10:", 10, EVERYTHING),
        (":20", 0, 19),
        ("", 0, EVERYTHING),
        (":", 0, EVERYTHING),
        (" 3 : 4 ", 3, 3),
    ],
)
def test_windows(text: str, first: int, last: int) -> None:
    steps = parse_steps(text)
    assert first in steps
    assert last in steps
    assert first - 1 not in steps
    assert last == EVERYTHING or last + 1 not in steps


@pytest.mark.parametrize(
    "text", ["5", "a:b", "20:10", "10:10", "-1:5", "1:2:3", "1.5:3", "²:³", "::"]
)
def test_windows_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="10:20"):
        parse_steps(text)
    assert issubclass(SettingsError, ValueError)


@given(st.text(alphabet="0123456789: -", max_size=8))
def test_any_text_is_a_window_or_an_error(text: str) -> None:
    try:
        steps = parse_steps(text)
    except SettingsError:
        return
    assert steps.step == 1
    assert len(steps) > 0


def test_only_steps_in_the_window_are_traced(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), 0, 2, "2:4")
    seen = []
    for step in range(6):
        begin(tracer, step)
        seen.append(tracer.on)
        tracer.span("wait", "training", step, step + 0.5, step=step)
        tracer.instant("ready", "buckets", step, step=step)
        tracer.queued(step, step + 0.5, step=step)
        tracer.flight(step, step + 0.5, step=step)
        with tracer.region("encode", "engine", step=step):
            pass
        tracer.note("commsched_plan", digest=f"d{step}", at_step=step)
    assert seen == [False, False, True, True, False, False]
    found = spans(tracer)
    assert {span.args["step"] for span in found} == {2, 3}
    assert len(found) == 12
    steps = [(s.args["step"], s.begin_s, s.end_s) for s in found if s.name == "step"]
    assert steps == [(2, 2.0, 3.0), (3, 3.0, 4.0)]
    notes = [args["at_step"] for name, args in read(tracer.path).notes if name == "commsched_plan"]
    assert notes == list(range(6))  # whatever the window


# ---------------------------------------------------------------- what is in the file


def test_what_is_reported_is_read_back(tracer: Tracer) -> None:
    shared = Fixed({"codec": "none", "bucket": [1, 2]})
    tracer.span("wait", "training", 5.0, 5.25, step=0, bucket=None, params='a"ä\n')
    tracer.span("encode", "engine", 6.0, 6.5, shared, step=0)
    tracer.instant("ready", "buckets", 7.0, bytes=12)
    tracer.queued(1.0, 4.0, shared, task=1)
    tracer.queued(2.0, 3.0, shared, task=2)
    tracer.note("commsched_tuning", outcome={"rows": [1.5, None, True]})
    begin(tracer, 1)
    found = spans(tracer)
    args = {"step": 0, "phase": "settled", "choice": "priority", "plan": "d1", "deferred": True}
    assert found == [
        Span("wait", "training", 5.0, 5.25, {"step": 0, "bucket": None, "params": 'a"ä\n'}),
        Span("encode", "engine", 6.0, 6.5, {"step": 0, "codec": "none", "bucket": [1, 2]}),
        Span("ready", "buckets", 7.0, 7.0, {"bytes": 12}),
        Span("queued", "queued", 1.0, 4.0, {"task": 1, "codec": "none", "bucket": [1, 2]}),
        Span("queued", "queued", 2.0, 3.0, {"task": 2, "codec": "none", "bucket": [1, 2]}),
        Span("step", "steps", 0.0, 1.0, args),
    ]
    trace = read(tracer.path)
    assert (trace.rank, trace.world_size, trace.about["model"]) == (1, 4, "abc")
    assert ("commsched_tuning", {"outcome": {"rows": [1.5, None, True]}}) in trace.notes
    assert trace.complete


def test_a_closed_file_is_plain_json(tracer: Tracer) -> None:
    tracer.span("wait", "training", 1.0, 2.0, ratio=float("inf"), odd=object)
    tracer.close()
    tracer.close()
    tracer.span("wait", "training", 1.0, 2.0)
    events = json.loads(Path(tracer.path).read_text())
    assert all(event["cat"] == "commsched" and event["pid"] == 1 for event in events)
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {"training"}
    (span,) = [event for event in events if event["ph"] == "X"]
    assert span["args"]["ratio"] is None  # JSON has no infinity
    assert (span["ts"], span["dur"]) == (1e6, 1e6)


def test_every_line_is_one_event(tracer: Tracer) -> None:
    for task in range(5):
        tracer.queued(1.0, 4.0, task=task)
    tracer.close()
    first, *lines, last, end = Path(tracer.path).read_text().splitlines()
    assert (first, end) == ("[", "]")
    assert all(line.endswith("},") for line in lines)
    assert len([json.loads(line[:-1]) for line in lines] + [json.loads(last)]) > 10


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=30))
def test_spans_on_a_wire_never_overlap(
    tmp_path_factory: pytest.TempPathFactory, flights: list[tuple[float, float]]
) -> None:
    tracer = Tracer(str(tmp_path_factory.mktemp("wires")), 0, 2, "")
    begin(tracer, 0)
    for end_s, begin_s in sorted((begin_s + length_s, begin_s) for begin_s, length_s in flights):
        tracer.flight(begin_s, end_s)
    wires: dict[str, list[Span]] = {}
    for span in spans(tracer):
        wires.setdefault(span.row, []).append(span)
    assert sum(map(len, wires.values())) == len(flights)
    assert set(wires) == {f"wire {number}" for number in range(len(wires))}
    for row in wires.values():
        row.sort(key=lambda span: (span.begin_s, span.end_s))
        for one, after in pairwise(row):
            assert one.end_s <= after.begin_s + 1e-8  # the file has nanoseconds


def test_rows_are_numbered_in_the_order_of_drawing(tracer: Tracer) -> None:
    for row in ("engine", "mine", "training"):
        tracer.span("x", row, 0.0, 1.0)
    tracer.flight(0.0, 1.0)
    begin(tracer, 1)
    tracer.close()
    events = json.loads(Path(tracer.path).read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    drawn = [names[tid] for tid in sorted(names, key=lambda tid: order[tid])]
    assert drawn == ["steps", "training", "engine", "wire 0", "mine"]


def test_shared_arguments_are_computed_only_where_they_are_wanted(tmp_path: Path) -> None:
    asked = []

    def about() -> Fixed:
        asked.append(1)
        return Fixed({"bucket": 3})

    tracer = Tracer(str(tmp_path), 0, 2, "1:2")
    for step in range(3):
        begin(tracer, step)
        with tracer.region("wait", "training", about, step=step):
            pass
    with SILENT.region("wait", "training", about):
        pass
    assert len(asked) == 1
    assert [span.args for span in spans(tracer) if span.name == "wait"] == [
        {"step": 1, "bucket": 3}
    ]


def test_a_region_that_raises_is_a_span(tracer: Tracer) -> None:
    with pytest.raises(KeyError), tracer.region("decode", "engine"):
        raise KeyError
    assert [span.name for span in spans(tracer)] == ["decode"]


def test_threads_report_at_once(tracer: Tracer) -> None:
    def report(thread: int) -> None:
        for number in range(2000):
            tracer.span("x", f"row {thread}", number, number + 0.5, number=number)
            if number % 100 == 0:
                tracer.note("commsched_x", thread=thread)  # wakes the writer

    threads = [threading.Thread(target=report, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = spans(tracer)
    for thread in range(4):
        numbers = [span.args["number"] for span in found if span.row == f"row {thread}"]
        assert numbers == list(range(2000))


def test_what_can_be_turned_into_json_is_so_by_the_writer(tracer: Tracer) -> None:
    class Plan:
        def to_json(self) -> str:
            return threading.current_thread().name

    tracer.note("commsched_plan", plan=Plan())
    tracer.close()
    assert ("commsched_plan", {"plan": "commsched-trace"}) in read(tracer.path).notes


def test_spans_are_on_the_disk_within_a_second(tracer: Tracer) -> None:
    tracer.span("wait", "training", 1.0, 2.0)
    until_s = time.monotonic() + 10.0
    while not read(tracer.path).spans and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [span.name for span in read(tracer.path).spans] == ["wait"]
    assert not read(tracer.path).complete


# ---------------------------------------------------------------- files


def test_models_and_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 0, 1):
        Tracer(str(tmp_path / "new" / "folder"), rank, 2).close()
    names = sorted(file.name for file in (tmp_path / "new" / "folder").iterdir())
    assert names == ["trace-rank0-2.json", "trace-rank0.json", "trace-rank1.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="folders that root cannot write to")
@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/null", "file"])
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("in the way")
    with pytest.raises(CommSchedError, match=r"COMMSCHED_TRACE"):
        Tracer(folder, 0, 2)
    assert not [one for one in threading.enumerate() if one.name == "commsched-trace"]


def test_a_window_that_means_nothing_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        Tracer(str(tmp_path), 0, 2, "5")


def test_a_full_disk_ends_the_trace_with_one_warning(
    tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tracer._writer._fd)
    os.close(full)
    with caplog.at_level(logging.WARNING, "commsched"):
        for step in range(1, 4):
            tracer.span("wait", "training", 1.0, 2.0)
            tracer.note("commsched_x")
            tracer._writer._thread.join(10.0)
            begin(tracer, step)
            assert not tracer.on
        tracer.close()
    (record,) = caplog.records
    assert "training goes on" in record.message
    assert "No space left" in record.message


def test_a_disk_too_slow_is_said_and_bounded(
    tracer: Tracer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commsched.tracing.writer.MOST", 10)
    for number in range(25):  # faster than the writer looks
        tracer.span("x", "training", number, number)
    with caplog.at_level(logging.WARNING, "commsched"):
        found = spans(tracer)
    assert 10 <= len(found) < 25
    assert f"{25 - len(found)} spans are missing" in caplog.text
    assert ("commsched_end", {"lost": 25 - len(found)}) in read(tracer.path).notes


def test_a_folder_that_vanishes_harms_nobody(tracer: Tracer, tmp_path: Path) -> None:
    Path(tracer.path).unlink()
    tmp_path.rmdir()
    tracer.span("wait", "training", 1.0, 2.0)
    tracer.close()


def test_dropping_it_writes_the_rest(tmp_path: Path) -> None:
    tracer = Tracer(str(tmp_path), 0, 2, "")
    begin(tracer, 0)
    tracer.span("wait", "training", 1.0, 2.0)
    path = tracer.path
    del tracer
    trace = read(path)
    assert trace.complete
    assert len(trace.spans) == 1
    assert not [one for one in threading.enumerate() if one.name == "commsched-trace"]


# ---------------------------------------------------------------- forks, kills and exits


def forked(work: Callable[[], None]) -> int:
    """The child that does `work`, and then ends with 0, or with 1 where it raises."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_forked_process_leaves_the_file_alone(tracer: Tracer) -> None:
    fd = tracer._writer._fd
    tracer.span("before", "training", 1.0, 2.0)

    def work() -> None:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
        tracer.span("in the child", "training", 1.0, 2.0)
        tracer.note("commsched_child")
        begin(tracer, 1)
        assert not tracer.on
        tracer.close()

    assert os.waitpid(forked(work), 0)[1] == 0
    tracer.span("after", "training", 1.0, 2.0)
    assert [span.name for span in spans(tracer)] == ["before", "after"]
    assert read(tracer.path).complete


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_leaves_a_readable_file(seed: int, tmp_path: Path) -> None:
    def write() -> None:
        tracer = Tracer(str(tmp_path), 0, 2, "")
        for step in range(10**6):
            begin(tracer, step)
            for number in range(50):
                tracer.span("wait", "training", step, step + 0.5, step=step, number=number)
            tracer.note("commsched_plan", text="long " * 1000)  # wakes the writer

    child = forked(write)
    path = tmp_path / "trace-rank0.json"
    try:
        until_s = time.monotonic() + 10.0
        while not path.exists() and time.monotonic() < until_s:
            time.sleep(0.001)
        assert read(path).about["rank"] == 0  # as soon as it has its name
        time.sleep(random.Random(seed).uniform(0.0, 0.1))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    trace = read(path)
    assert not trace.complete
    waits = [(s.args["step"], s.args["number"]) for s in trace.spans if s.name == "wait"]
    assert waits == [(n // 50, n % 50) for n in range(len(waits))]  # nothing missing in between
    assert read_all([tmp_path])[0].spans == trace.spans


def leave(rank: int, world_size: int, folder: str) -> None:
    """A program's end, without any close."""
    training = Training(trace=folder, trace_steps="")
    globals()["kept"] = training.run(rank)  # alive until the interpreter ends


def test_the_end_of_the_program_writes_the_rest(tmp_path: Path) -> None:
    verdicts = run_on_ranks(leave, str(tmp_path), fresh=True, check_threads=False)
    assert [verdict.status for verdict in verdicts] == ["ok", "ok"], verdicts
    for trace in read_all([tmp_path]):
        assert trace.complete
        # Those of the last backward, which run at the program's end.
        assert {s.args["step"] for s in trace.spans if s.name == "deferred step"} >= {7}


# ---------------------------------------------------------------- profilers


def test_profilers_see_regions_with_and_without_a_file(tracer: Tracer) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for one in (tracer, SILENT):
            with one.region("deferred step", "training"):
                torch.ones(3).sum()
    names = [event.name for event in profiled.events()]
    assert names.count("commsched.deferred step") == 2
    assert "aten::sum" in names


def test_without_a_profiler_nothing_is_made() -> None:
    assert ranges.profiled("wait") is ranges.profiled("encode")


def test_nvtx_ranges_come_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Nvtx:
        range_push = staticmethod(calls.append)
        range_pop = staticmethod(lambda: calls.append("pop"))

    monkeypatch.setattr(ranges, "_nvtx", Nvtx)
    with SILENT.region("encode", "engine"):
        pass
    assert calls == []
    monkeypatch.setattr(ranges._cuda, "is_initialized", lambda: True)
    with SILENT.region("encode", "engine"):
        pass
    assert calls == ["commsched.encode", "pop"]


# ---------------------------------------------------------------- training


@ranks(2)
def test_a_torch_profile_has_all_ranges(rank: int) -> None:
    training = Training()
    training.run(rank)
    everywhere: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as profiled:
        training.run(rank, 2)
        training.synchronize()
    names = {event.name for event in profiled.events()}
    wanted = {"encode", "comm", "decode", "wait", "deferred step"}
    assert {f"commsched.{name}" for name in wanted} <= names
    training.close()


def traced(rank: int, world_size: int, folder: str) -> None:
    """Trains with and without a trace."""
    results = []
    for settings in ({}, {"trace": folder, "trace_steps": "6:12"}):
        training = Training(**settings).run(rank, 14)
        results.append(training.values())
        training.close()
    for plain, with_trace in zip(*results, strict=True):
        assert torch.equal(plain, with_trace)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a traced training of two ranks, which was bit for bit what it is without a trace."""
    made = tmp_path_factory.mktemp("traced")
    verdicts = run_on_ranks(traced, str(made))
    assert [verdict.status for verdict in verdicts] == ["ok", "ok"], verdicts
    return made


def test_a_training_traces_all_there_is(folder: Path) -> None:
    for trace in read_all([folder]):
        assert trace.complete
        names = {span.name for span in trace.spans}
        assert names >= {"step", "forward", "backward", "wait", "deferred step"}
        assert names >= {"ready", "queued", "encode", "comm", "decode"}
        assert {span.args["step"] for span in trace.spans} == set(range(6, 12))
        notes = {name for name, _ in trace.notes}
        assert notes >= {"commsched_plan", "commsched_profile", "commsched_clock"}
        assert trace.about["settings"]


def test_a_task_goes_through_its_stages_in_order(folder: Path) -> None:
    for trace in read_all([folder]):
        stages: dict[tuple[int, int], dict[str, Span]] = {}
        for span in trace.spans:
            if span.name in ("queued", "encode", "comm", "decode"):
                key = span.args["step"], span.args["task"]
                assert span.name not in stages.setdefault(key, {})
                stages[key][span.name] = span
        whole = [one for one in stages.values() if len(one) == 4]
        assert len(whole) > 10
        for one in whole:
            queued, encode, comm, decode = (one[n] for n in ("queued", "encode", "comm", "decode"))
            assert queued.begin_s <= encode.begin_s <= encode.end_s <= comm.begin_s + 1e-6
            assert abs(queued.end_s - comm.begin_s) < 1e-6
            assert comm.begin_s < comm.end_s <= decode.begin_s + 1e-6
            assert comm.args["sent_bytes"] > 0
            assert comm.args["params"] == decode.args["params"]
            assert comm.args["chunk"].split(":")[0] == str(comm.args["bucket"][0])


def test_ranks_issue_the_same_tasks(folder: Path) -> None:
    rows = [
        [(s.args["step"], s.args["plan"], s.args["task"]) for s in trace.spans if s.name == "comm"]
        for trace in read_all([folder])
    ]
    assert sorted(rows[0]) == sorted(rows[1])
    assert rows[0]


def test_training_thread_spans_do_not_overlap(folder: Path) -> None:
    for trace in read_all([folder]):
        alone = [s for s in trace.spans if s.name in ("wait", "deferred step", "backward")]
        alone.sort(key=lambda span: span.begin_s)
        for one, after in pairwise(alone):
            inside = one.name == "backward" and after.end_s <= one.end_s + 1e-6
            assert inside or one.end_s <= after.begin_s + 1e-6, (one, after)


def other_window(rank: int, world_size: int, folder: str) -> None:
    training = Training(trace=folder, trace_steps=f"{rank}:9")
    with pytest.raises(CommSchedError, match="trace_steps"):
        training.step(rank)
    training.close()


def one_cannot_write(rank: int, world_size: int, folder: str) -> list[str]:
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("commsched").addHandler(Said(logging.WARNING))
    training = Training(trace=folder if rank == 0 else "/proc/nowhere", trace_steps="2:9")
    training.run(rank, 12).close()
    return [line for line in said if "no trace can be written" in line]


def test_a_rank_that_cannot_write_trains_on(tmp_path: Path) -> None:
    verdicts = run_on_ranks(one_cannot_write, str(tmp_path))
    assert [verdict.status for verdict in verdicts] == ["ok", "ok"], verdicts
    assert [len(verdict.value) for verdict in verdicts] == [0, 1]
    (trace,) = read_all([str(tmp_path)])
    assert {int(span.args["step"]) for span in trace.spans if span.name == "step"} >= {3, 4, 5}


def test_windows_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    verdicts = run_on_ranks(other_window, str(tmp_path))
    assert [verdict.status for verdict in verdicts] == ["ok", "ok"], verdicts
