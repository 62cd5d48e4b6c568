"""Metrics: flat numbers for loggers, and a file that Prometheus's own parser reads."""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Metric
from prometheus_client.parser import text_string_to_metric_families

from commsched import metrics
from commsched.errors import SettingsError
from commsched.metrics import EVERY_S, Facts, MetricsFile, metrics_of
from commsched.report import BucketReport, Report, inactive

# Ready at 0 and 4 ms, on their way until 6 and 10: 10 ms in all, of which training waited for 2.
BUCKETS = (
    BucketReport(("head.weight",), 6000, ready_ms=0.0, comm_ms=6.0, exposed_ms=0.5),
    BucketReport(("body.weight",), 2000, ready_ms=4.0, comm_ms=6.0, exposed_ms=1.5),
)
REPORT = Report(
    active=True,
    reason="",
    steps=50,
    exposed_ms=2.0,
    exposed_max_ms=3.0,
    wire_bytes_per_step=4000.0,
    codec="bf16",
    policy="priority",
    plan="0123456789abcdef",
    buckets=BUCKETS,
    deferred_steps=40,
    predicted_ms=20.0,
    ideal_ms=18.0,
    step_ms=21.0,
    choice="priority, deferred",
)
EMPTY = replace(
    REPORT,
    steps=0,
    exposed_ms=0.0,
    wire_bytes_per_step=0.0,
    buckets=(),
    predicted_ms=None,
    step_ms=None,
)
FACTS = Facts(world_size=2, steps=700, exposed_s=1.4, wire_bytes=2.8e6, tasks=1400, errors=0)


# ---------------------------------------------------------------- the flat numbers


def test_the_numbers_of_a_report() -> None:
    expected = {
        "active": 1.0,
        "window_steps": 50.0,
        "steps": 700.0,
        "errors": 0.0,
        "tasks": 1400.0,
        "wire_bytes": 2.8e6,
        "exposed_ms": 2.0,
        "exposed_max_ms": 3.0,
        "wire_bytes_per_step": 4000.0,
        "overlap_percent": 80.0,
        "deferred_share": 0.8,
        "compression_ratio": 2.0,  # of two ranks each sends as much as it has
        "step_ms": 21.0,
        "predicted_ms": 20.0,
        "ideal_ms": 18.0,
    }
    got = metrics_of(REPORT, FACTS)
    assert got == pytest.approx({f"commsched/{name}": value for name, value in expected.items()})


def test_where_commsched_does_nothing_there_is_one_number() -> None:
    assert metrics_of(inactive("world size 1"), FACTS) == {"commsched/active": 0.0}


def test_what_is_not_known_is_left_out() -> None:
    got = {name.removeprefix("commsched/") for name in metrics_of(EMPTY)}
    assert got == {"active", "window_steps", "errors", "ideal_ms"}
    known = {name.removeprefix("commsched/") for name in metrics_of(REPORT)}
    assert known.isdisjoint({"steps", "tasks", "wire_bytes", "compression_ratio"})
    assert "overlap_percent" in known


@pytest.mark.parametrize(
    ("rows", "exposed_ms", "percent"),
    [
        ([(0.0, 6.0), (4.0, 6.0)], 0.0, 100.0),
        ([(0.0, 6.0), (4.0, 6.0)], 10.0, 0.0),
        ([(0.0, 2.0), (8.0, 2.0)], 1.0, 75.0),  # the gap between them is nobody's
        ([(0.0, 10.0), (2.0, 3.0)], 5.0, 50.0),  # one within the other
        ([(4.0, 6.0), (0.0, 6.0)], 5.0, 50.0),  # in any order
        ([(0.0, 2.0)], 3.0, 0.0),  # never below
        ([(0.0, 0.0)], 0.0, None),  # nothing travelled
    ],
)
def test_overlap_is_what_training_did_not_wait_for(
    rows: list[tuple[float, float]], exposed_ms: float, percent: float | None
) -> None:
    buckets = tuple(BucketReport(("p",), 8, ready, comm, 0.0) for ready, comm in rows)
    got = metrics_of(replace(REPORT, buckets=buckets, exposed_ms=exposed_ms))
    assert got.get("commsched/overlap_percent") == pytest.approx(percent)


@pytest.mark.parametrize(("world_size", "ratio"), [(2, 2.0), (4, 3.0), (0, None), (1, None)])
def test_compression_is_against_what_a_ring_sends(world_size: int, ratio: float | None) -> None:
    got = metrics_of(REPORT, Facts(world_size=world_size))
    assert got.get("commsched/compression_ratio") == pytest.approx(ratio)


maybe = st.none() | st.floats()
anything = st.builds(
    Report,
    active=st.booleans(),
    reason=st.just(""),
    steps=st.integers(0, 100),
    exposed_ms=st.floats(),
    exposed_max_ms=st.floats(),
    wire_bytes_per_step=st.floats(),
    codec=st.just("none"),
    policy=st.just("fifo"),
    plan=st.none(),
    buckets=st.lists(
        st.builds(
            BucketReport,
            params=st.just(("p",)),
            nbytes=st.integers(0, 2**40),
            ready_ms=st.floats(),
            comm_ms=st.floats(),
            exposed_ms=st.floats(),
        ),
        max_size=3,
    ).map(tuple),
    predicted_ms=maybe,
    ideal_ms=maybe,
    step_ms=maybe,
)
facts = st.builds(Facts, world_size=st.integers(0, 1024), wire_bytes=maybe, exposed_s=maybe)


@given(anything, facts)
def test_whatever_was_measured_loggers_get_finite_floats(report: Report, known: Facts) -> None:
    got = metrics_of(report, known)
    assert got["commsched/active"] == report.active
    for name, value in got.items():
        assert type(value) is float, name
        assert math.isfinite(value), name


# ---------------------------------------------------------------- the file


class Clock:
    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> Iterator[MetricsFile]:
    made = MetricsFile(str(tmp_path / "a" / "b"), rank=1, world_size=2, now=clock)
    yield made
    made.close()


def parsed(path: str | Path) -> dict[str, Metric]:
    text = Path(path).read_text(encoding="utf-8")
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(path: str | Path) -> dict[str, float]:
    return {s.name: s.value for family in parsed(path).values() for s in family.samples}


def written(file: MetricsFile, report: Report = REPORT, known: Facts = FACTS) -> bool:
    return file.maybe_write(lambda: report, lambda: known)


def test_the_file_says_what_the_numbers_say_in_base_units(file: MetricsFile) -> None:
    assert written(file)
    assert values(file.path) == pytest.approx(
        {
            "commsched_active": 1,
            "commsched_step_exposed_seconds": 0.002,
            "commsched_step_exposed_max_seconds": 0.003,
            "commsched_step_seconds": 0.021,
            "commsched_step_predicted_seconds": 0.02,
            "commsched_step_ideal_seconds": 0.018,
            "commsched_step_wire_bytes": 4000,
            "commsched_overlap_ratio": 0.8,
            "commsched_deferred_ratio": 0.8,
            "commsched_compression_ratio": 2,
            "commsched_steps_total": 700,
            "commsched_exposed_seconds_total": 1.4,
            "commsched_wire_bytes_total": 2.8e6,
            "commsched_tasks_total": 1400,
            "commsched_errors_total": 0,
            "commsched_info": 1,
        }
    )


def test_every_sample_says_whose_it_is(file: MetricsFile) -> None:
    written(file)
    own = {"rank": "1", "world_size": "2", "state": "1"}
    for family in parsed(file.path).values():
        for sample in family.samples:
            assert own.items() <= sample.labels.items()
            if sample.name != "commsched_info":
                assert sample.labels == own
    (info,) = parsed(file.path)["commsched_info"].samples
    about = {"policy": "priority", "codec": "bf16", "plan": "0123456789abcdef", "reason": ""}
    about["choice"] = "priority, deferred"
    assert about.items() <= info.labels.items()


@pytest.mark.parametrize("report", [REPORT, EMPTY, inactive("world size 1")])
def test_names_are_as_prometheus_wants_them(file: MetricsFile, report: Report) -> None:
    """What `promtool check metrics` checks, but for the percentiles that we do not have."""
    written(file, report)
    text = Path(file.path).read_text(encoding="utf-8")
    assert text.endswith("\n")
    helps = re.findall(r"^# HELP (\S+) (.+)$", text, re.M)
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M))
    samples = re.findall(r"^([a-z_]+)\{", text, re.M)
    assert [name for name, _ in helps] == list(types) == samples
    for name, kind in types.items():
        assert re.fullmatch(r"commsched_[a-z_]+", name)
        assert (kind == "counter") == name.endswith("_total")
        assert kind in {"counter", "gauge"}
        assert not re.search(r"milli|micro|_ms\b|_mb\b|percent|counter|gauge", name)
        assert not name.endswith(("_count", "_sum", "_bucket", "_created"))
    for _, help_text in helps:
        assert help_text.endswith(".")


def test_an_inactive_state_says_only_that_and_why(file: MetricsFile) -> None:
    written(file, inactive("world size 1"), FACTS)
    assert values(file.path) == {"commsched_active": 0.0, "commsched_info": 1.0}
    assert parsed(file.path)["commsched_info"].samples[0].labels["reason"] == "world size 1"


def test_without_facts_there_are_no_counters_but_errors(file: MetricsFile) -> None:
    assert file.maybe_write(lambda: REPORT)
    counters = {name for name in values(file.path) if name.endswith("_total")}
    assert counters == {"commsched_errors_total"}


@given(st.text())
def test_any_text_in_a_label_can_be_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    made = MetricsFile(str(tmp_path_factory.getbasetemp()), 0, 2)
    made.close(inactive(text.replace("\r", "")))
    with open(made.path, encoding="utf-8", newline="\n") as stream:
        (info,) = [
            family
            for family in text_string_to_metric_families(stream.read())
            if family.name == "commsched_info"
        ]
    assert info.samples[0].labels["reason"] == text.replace("\r", "")


def test_it_is_written_at_the_first_step_and_every_ten_seconds(
    file: MetricsFile, clock: Clock
) -> None:
    asked: list[float] = []

    def report() -> Report:
        asked.append(clock.now_s)
        return REPORT

    for _ in range(1000):
        file.maybe_write(report)
        clock.now_s += 0.0625
    gaps = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert asked[0] == 5.0
    assert len(asked) == 7
    assert all(EVERY_S <= gap <= EVERY_S + 0.0625 for gap in gaps)


def test_close_writes_the_last_word_once(file: MetricsFile) -> None:
    written(file)
    file.close(replace(REPORT, steps=99, exposed_ms=7.0), FACTS)
    assert values(file.path)["commsched_step_exposed_seconds"] == pytest.approx(0.007)
    file.close(REPORT, FACTS)
    assert values(file.path)["commsched_step_exposed_seconds"] == pytest.approx(0.007)


def test_each_state_of_a_process_has_a_file_and_a_label(tmp_path: Path) -> None:
    """node_exporter refuses a sample that two files have."""
    one, two = MetricsFile(str(tmp_path), 0, 2), MetricsFile(str(tmp_path), 0, 2)
    names = [Path(made.path).name for made in (one, two)]
    assert names == ["commsched-rank0.prom", "commsched-rank0-2.prom"]
    for made in (one, two):
        written(made)
    labels = [parsed(made.path)["commsched_active"].samples[0].labels for made in (one, two)]
    assert [label["state"] for label in labels] == ["1", "2"]
    one.close()
    again = MetricsFile(str(tmp_path), 0, 2)  # as after load_state_dict
    assert again.path == one.path
    for made in (again, two):
        made.close()


def test_helps_do_not_depend_on_what_is_known(tmp_path: Path) -> None:
    """node_exporter refuses a name with two helps, in whichever files."""
    helps: dict[str, set[str]] = {}
    for rank, (report, known) in enumerate(
        [(REPORT, FACTS), (EMPTY, Facts()), (inactive(""), FACTS)]
    ):
        made = MetricsFile(str(tmp_path), rank, 3)
        written(made, report, known)
        for name, family in parsed(made.path).items():
            helps.setdefault(name, set()).add(family.documentation)
        made.close()
    assert all(len(texts) == 1 for texts in helps.values())


def test_a_reader_never_sees_half_a_file(file: MetricsFile, clock: Clock) -> None:
    written(file)
    ended = threading.Event()
    seen: list[set[str]] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(set(values(file.path)))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        clock.now_s += EVERY_S
        written(file)
    ended.set()
    reader.join()
    assert seen
    assert all(names == seen[0] for names in seen)
    assert os.listdir(Path(file.path).parent) == [Path(file.path).name]  # no temporary ones


# ---------------------------------------------------------------- what may go wrong


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]


def test_a_folder_that_is_gone_is_said_once(
    file: MetricsFile, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    written(file)
    os.remove(file.path)
    Path(file.path).parent.rmdir()
    for _ in range(3):
        clock.now_s += EVERY_S
        assert not written(file)
    file.close(REPORT)
    (text,) = warnings(caplog)
    assert file.path in text
    assert "No such file" in text


def test_a_full_disk_keeps_the_old_file_and_is_got_over(
    file: MetricsFile,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written(file)
    before = Path(file.path).read_bytes()

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    clock.now_s += EVERY_S
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        assert not written(file, EMPTY)
    assert Path(file.path).read_bytes() == before
    assert os.listdir(Path(file.path).parent) == [Path(file.path).name]
    assert len(warnings(caplog)) == 1
    clock.now_s += EVERY_S
    assert written(file, EMPTY)
    assert Path(file.path).read_bytes() != before


def test_a_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "taken"
    blocked.write_text("a file", encoding="utf-8")
    made = MetricsFile(str(blocked / "metrics"), 0, 2)
    assert not written(made)
    made.close(REPORT, FACTS)
    assert len(warnings(caplog)) == 1


def test_an_error_of_the_report_is_not_swallowed(file: MetricsFile) -> None:
    def broken() -> Report:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        file.maybe_write(broken)


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"pip install 'commsched\[metrics\]'"):
        MetricsFile(str(tmp_path / "new"), 0, 2)
    assert not (tmp_path / "new").exists()
    assert metrics_of(REPORT)  # loggers do not need it


def test_the_programs_own_metrics_are_left_alone(file: MetricsFile) -> None:
    before = {family.name for family in REGISTRY.collect()}
    written(file)
    assert {family.name for family in REGISTRY.collect()} == before
    assert before.isdisjoint(parsed(file.path))


def test_the_library_is_imported_only_for_a_file() -> None:
    code = "import sys, commsched.metrics; assert 'prometheus_client' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_fact_is_used() -> None:
    names = {row.source for row in metrics._ROWS}
    known = {"world_size": "compression_ratio"}
    assert {known.get(one.name, one.name) for one in fields(Facts)} <= names
