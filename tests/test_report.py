"""Report: the averages over the window, and what it looks like printed and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.jobs import Timing
from commsched.layout import BucketSpec, ParamSpec
from commsched.report import WINDOW, Exposure, Report, inactive

FIRST = BucketSpec((ParamSpec("head.weight", 6), ParamSpec("head.bias", 2)), "float32")
SECOND = BucketSpec(tuple(ParamSpec(f"body.{i}", 4) for i in range(5)), "float64")
THIRD = BucketSpec((ParamSpec("head.weight", 6),), "float32")
BEGIN_S = -1e6  # on time.monotonic()'s scale: everything is long done when it is added


def timing(spec: BucketSpec, ready_s: float, done_s: float) -> Timing:
    return Timing(spec, BEGIN_S + ready_s, BEGIN_S + done_s)


def add(exposure: Exposure, free_s: float, *rows: tuple[float, float]) -> None:
    """A step of FIRST and SECOND: (communication, wait) in seconds; training is free at `free_s`.

    Training waits for one after the other, so the waits say when each is done.
    """
    timings, done_s = [], free_s
    for spec, (comm_s, wait_s) in zip((FIRST, SECOND), rows, strict=False):
        done_s += wait_s
        timings.append(timing(spec, done_s - comm_s, done_s))
    exposure.add(timings, BEGIN_S + free_s)


def report(exposure: Exposure, wire_bytes: float = 0.0) -> Report:
    return exposure.report(wire_bytes, "bf16", "fifo", "0123456789abcdef")


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------- averaging


def test_nothing_measured_yet() -> None:
    empty = report(Exposure())
    assert empty.active
    assert (empty.steps, empty.exposed_ms, empty.exposed_max_ms) == (0, 0.0, 0.0)
    assert empty.wire_bytes_per_step == 0.0
    assert empty.buckets == ()
    assert "0 steps" in str(empty)


def test_one_step() -> None:
    exposure = Exposure()
    # Ready at 0 and 20 ms; training is free at 22, the second bucket is done at 25.
    exposure.add([timing(FIRST, 0.0, 0.010), timing(SECOND, 0.020, 0.025)], BEGIN_S + 0.022)
    got = report(exposure, 5e6)
    assert got.steps == 1
    assert got.exposed_ms == near(3.0)
    assert got.exposed_max_ms == near(3.0)
    assert got.wire_bytes_per_step == 5e6
    assert (got.codec, got.policy, got.plan) == ("bf16", "fifo", "0123456789abcdef")
    first, second = got.buckets
    assert first.params == ("head.weight", "head.bias")
    assert (first.nbytes, second.nbytes) == (8 * 4, 20 * 8)
    assert (first.ready_ms, first.comm_ms, first.exposed_ms) == (near(0.0), near(10.0), near(0.0))
    assert (second.ready_ms, second.comm_ms) == (near(20.0), near(5.0))
    assert second.exposed_ms == near(3.0)


steps = st.lists(st.tuples(*[st.floats(0, 10) for _ in range(4)]), min_size=1, max_size=WINDOW)


@given(steps, st.floats(0, 1e12))
def test_averages_are_those_of_the_steps(rows: Sequence[tuple[float, ...]], wire: float) -> None:
    exposure = Exposure()
    for at, (comm1, wait1, comm2, wait2) in enumerate(rows):
        add(exposure, 100.0 * at, (comm1, wait1), (comm2, wait2))
    got = report(exposure, wire)
    count = len(rows)

    def mean_ms(column: int) -> object:
        return near(1e3 * math.fsum(row[column] for row in rows) / count)

    waits = [row[1] + row[3] for row in rows]
    assert got.steps == count
    assert got.exposed_ms == near(1e3 * math.fsum(waits) / count)
    assert got.exposed_max_ms == near(1e3 * max(waits))
    assert got.wire_bytes_per_step == near(wire / count)
    first, second = got.buckets
    assert (first.ready_ms, first.comm_ms, first.exposed_ms) == (0.0, mean_ms(0), mean_ms(1))
    assert (second.comm_ms, second.exposed_ms) == (mean_ms(2), mean_ms(3))
    assert got.exposed_ms == near(sum(row.exposed_ms for row in got.buckets))


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=2, max_size=2), st.floats(0, 9)
)
def test_a_wait_is_what_is_left_after_those_before(
    rows: Sequence[tuple[float, float]], free_s: float
) -> None:
    """In whatever order buckets are done, the waits add up to the end of the last one."""
    exposure = Exposure()
    specs = (FIRST, SECOND)
    timings = [timing(s, ready, ready + comm) for s, (ready, comm) in zip(specs, rows, strict=True)]
    exposure.add(timings, BEGIN_S + free_s)
    end_s = max(ready + comm for ready, comm in rows)
    assert report(exposure).exposed_ms == near(1e3 * max(0.0, end_s - free_s))


def test_only_the_last_steps_count_but_bytes_are_shared_by_all() -> None:
    exposure = Exposure()
    for _ in range(WINDOW):
        add(exposure, 0.0, (0.0, 9.0))
    for _ in range(WINDOW):
        add(exposure, 0.0, (0.001, 0.002))
    got = report(exposure, 2.0 * WINDOW * 700)
    assert got.steps == WINDOW
    assert got.exposed_ms == near(2.0)
    assert got.exposed_max_ms == near(2.0)
    assert got.buckets[0].comm_ms == near(1.0)
    assert got.wire_bytes_per_step == near(700.0)


def test_buckets_are_those_of_the_last_step() -> None:
    """DDP rebuilds its buckets: times of others must not be mixed in."""
    exposure = Exposure()
    add(exposure, 0.0, (0.5, 0.5))
    add(exposure, 0.0, (0.001, 0.002), (0.004, 0.005))
    add(exposure, 0.0, (0.003, 0.004), (0.006, 0.007))
    got = report(exposure)
    assert [row.params for row in got.buckets] == [
        tuple(param.name for param in spec.params) for spec in (FIRST, SECOND)
    ]
    assert [row.comm_ms for row in got.buckets] == [near(2.0), near(5.0)]
    assert got.steps == 3
    assert got.exposed_max_ms == near(500.0)


def test_a_bucket_done_after_training_went_on_is_counted_once() -> None:
    """The reducer waits for it; it is not done yet when the step is added."""
    exposure = Exposure()
    late = timing(SECOND, 0.0, -math.inf)
    exposure.add([timing(FIRST, 0.0, 0.001), late], BEGIN_S + 0.010)
    late.done_s = BEGIN_S + 0.014
    for _ in range(2):
        assert report(exposure).exposed_ms == near(4.0)


def test_times_of_other_buckets_are_not_mixed_in() -> None:
    exposure = Exposure()
    exposure.add([timing(THIRD, 0.0, 0.5)], BEGIN_S)
    exposure.add([timing(FIRST, 0.0, 0.002)], BEGIN_S + 0.001)
    (row,) = report(exposure).buckets
    assert row.params == ("head.weight", "head.bias")
    assert (row.comm_ms, row.exposed_ms) == (near(2.0), near(1.0))


def test_a_report_does_not_change_afterwards() -> None:
    exposure = Exposure()
    add(exposure, 0.0, (0.001, 0.002))
    before = report(exposure)
    text = str(before)
    add(exposure, 0.0, (0.5, 0.5))
    assert str(before) == text
    assert report(exposure) != before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.steps = 7  # type: ignore[misc]


# ---------------------------------------------------------------- printed, and as JSON


def test_the_text_holds_the_numbers_and_names() -> None:
    exposure = Exposure()
    add(exposure, 0.0, (0.0123, 0.00125), (0.0789, 0.0305))
    got = report(exposure, 12.34e6)
    head, columns, first, second = str(got).splitlines()
    for part in ("last 1 steps", "31.75 ms", "12.34 MB", "fifo", "bf16", "0123456789abcdef"):
        assert part in head
    assert "exposed ms" in columns
    assert first.split()[0] == "0"
    assert {"0.00", "12.30", "1.25", "head.weight,", "head.bias"} <= set(first.split())
    assert {"78.90", "30.50", "body.0,", "body.2,", "..."} <= set(second.split())
    assert "body.3" not in second
    assert "..." not in first


@pytest.mark.parametrize("count", [0, 1, 3])
def test_to_dict_is_json(count: int) -> None:
    exposure = Exposure()
    for _ in range(count):
        add(exposure, 0.0, (0.001, 0.002), (0.004, 0.005))
    got = report(exposure, 5e6)
    data = json.loads(json.dumps(got.to_dict(), allow_nan=False))
    assert set(data) == {item.name for item in dataclasses.fields(Report)}
    assert data["steps"] == count
    assert data["exposed_ms"] == got.exposed_ms
    assert [row["params"] for row in data["buckets"]] == [list(row.params) for row in got.buckets]
    assert all(isinstance(row["comm_ms"], float) for row in data["buckets"])


def test_an_inactive_report_says_why() -> None:
    got = inactive("world size 1")
    assert not got.active
    assert got.reason == "world size 1"
    assert "not active" in str(got)
    assert "world size 1" in str(got)
    assert (got.exposed_ms, got.exposed_max_ms, got.wire_bytes_per_step) == (0.0, 0.0, 0.0)
    data = json.loads(json.dumps(got.to_dict()))
    assert data["reason"] == "world size 1"
    assert data["active"] is False
    assert data["plan"] is None


# ---------------------------------------------------------------- a State before its first bucket


def test_a_state_that_has_not_begun_reports_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    import commsched

    for name in ("COMMSCHED_ENABLED", "COMMSCHED_CODEC"):
        monkeypatch.delenv(name, raising=False)
    got = commsched.State().report()
    assert not got.active
    assert "no gradient bucket" in str(got)
