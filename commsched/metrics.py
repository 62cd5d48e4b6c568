"""Metrics: a report as flat numbers for loggers, and as a file for Prometheus."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from commsched.errors import SettingsError
from commsched.exchange import sent_share
from commsched.report import BucketReport, Report
from commsched.version import __version__

__all__ = ["Facts", "MetricsFile", "metrics_of"]

logger = logging.getLogger("commsched")

PREFIX = "commsched/"
EVERY_S = 10.0  # node_exporter is usually scraped every 15 s
MISSING = (
    "metrics={folder!r} writes a file for Prometheus, which takes the prometheus-client package; "
    "install it with: pip install 'commsched[metrics]', or leave COMMSCHED_METRICS unset"
)


@dataclass(frozen=True)
class Facts:
    """What a session knows beside its `Report`. What is None, or unknown, is left out of metrics.

    Attributes:
        world_size: the number of ranks; 0 where it is not known.
        steps: counted since the State's first step, as are:
        exposed_s: seconds that training stood still for communication,
        wire_bytes: bytes sent by this rank,
        tasks: tasks issued,
        errors: failures.
    """

    world_size: int = 0
    steps: int | None = None
    exposed_s: float | None = None
    wire_bytes: float | None = None
    tasks: int | None = None
    errors: int = 0


def metrics_of(report: Report, facts: Facts | None = None) -> dict[str, float]:
    """A report as flat numbers, for TensorBoard's or W&B's loggers.

    Args:
        report: averages over the last steps.
        facts: what is known besides.

    Returns:
        Finite numbers by name; what is not known is left out, never NaN. "commsched/active" is
        always there; it is 0, and alone, where commsched does not do the communication. Names that
        end in "_ms" are milliseconds a step: means over the window, "exposed_max_ms" the longest.
        "overlap_percent" is the share of the time in which buckets were on their way that training
        did not wait; "deferred_share" is from 0 to 1; "compression_ratio" is what an all-reduce of
        the same gradients sends over what was sent.
    """
    if not report.active:
        return {PREFIX + "active": 0.0}
    facts = Facts() if facts is None else facts
    values = {
        "active": 1.0,
        "window_steps": report.steps,
        "steps": facts.steps,
        "errors": facts.errors,
        "tasks": facts.tasks,
        "wire_bytes": facts.wire_bytes,
        **(_averages(report, facts) if report.steps else {}),
        "step_ms": report.step_ms,
        "predicted_ms": report.predicted_ms,
        "ideal_ms": report.ideal_ms,
    }
    return {
        PREFIX + name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _averages(report: Report, facts: Facts) -> dict[str, float | None]:
    return {
        "exposed_ms": report.exposed_ms,
        "exposed_max_ms": report.exposed_max_ms,
        "wire_bytes_per_step": report.wire_bytes_per_step,
        "overlap_percent": _overlap_percent(report),
        "deferred_share": report.deferred_steps / report.steps,
        "compression_ratio": _compression(report, facts.world_size),
    }


def _overlap_percent(report: Report) -> float | None:
    travel_ms = _covered_ms(report.buckets)
    if travel_ms <= 0:
        return None
    return 100.0 * min(1.0, max(0.0, 1.0 - report.exposed_ms / travel_ms))


def _covered_ms(buckets: Iterable[BucketReport]) -> float:
    """How long at least one of the buckets was on its way."""
    total_ms, until_ms = 0.0, -math.inf
    for begin_ms, end_ms in sorted((row.ready_ms, row.ready_ms + row.comm_ms) for row in buckets):
        total_ms += max(0.0, end_ms - max(begin_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms


def _compression(report: Report, world_size: int) -> float | None:
    if report.wire_bytes_per_step <= 0 or world_size < 2:
        return None
    plain = sum(row.nbytes for row in report.buckets) * sent_share("all_reduce", world_size)
    return plain / report.wire_bytes_per_step if plain else None


@dataclass(frozen=True)
class _Row:
    """What Prometheus is told of one of `metrics_of`'s numbers, in base units.

    `help` must be the same in all files: node_exporter refuses a name with two.
    """

    source: str
    name: str
    help: str
    scale: float = 1.0
    counts: bool = False


_ROWS = (
    _Row("active", "active", "1 where commsched does the communication, 0 where torch does."),
    _Row("exposed_ms", "step_exposed_seconds", "Time a step that training waited, mean.", 1e-3),
    _Row("exposed_max_ms", "step_exposed_max_seconds", "The same, longest recent step.", 1e-3),
    _Row("step_ms", "step_seconds", "Length of a training step.", 1e-3),
    _Row("predicted_ms", "step_predicted_seconds", "Length that the plan lets expect.", 1e-3),
    _Row("ideal_ms", "step_ideal_seconds", "Length that no exact schedule can beat.", 1e-3),
    _Row("wire_bytes_per_step", "step_wire_bytes", "Bytes a step that this rank sent, mean."),
    _Row("overlap_percent", "overlap_ratio", "Share of communication that was hidden.", 1e-2),
    _Row("deferred_share", "deferred_ratio", "Share of steps that were deferred."),
    _Row("compression_ratio", "compression_ratio", "Bytes of a plain all-reduce over those sent."),
    _Row("steps", "steps", "Training steps.", counts=True),
    _Row("exposed_s", "exposed_seconds", "Time that training waited.", counts=True),
    _Row("wire_bytes", "wire_bytes", "Bytes that this rank sent.", counts=True),
    _Row("tasks", "tasks", "Collectives issued.", counts=True),
    _Row("errors", "errors", "Failures.", counts=True),
)


class _Families:
    """One moment's metric families, collected as from prometheus_client's own registries.

    Made anew each time: its global registry, and its switches for all, are the program's.
    """

    def __init__(self, report: Report, facts: Facts, labels: Mapping[str, str]) -> None:
        self._report, self._facts, self._labels = report, facts, labels

    def collect(self) -> Iterator[Any]:
        core = import_module("prometheus_client.core")
        names, own = list(self._labels), list(self._labels.values())
        values = self._values()
        for row in _ROWS:
            if PREFIX + row.source in values:
                make = core.CounterMetricFamily if row.counts else core.GaugeMetricFamily
                family = make(f"commsched_{row.name}", row.help, labels=names)
                family.add_metric(own, values[PREFIX + row.source] * row.scale)
                yield family
        info = core.InfoMetricFamily("commsched", "What is in effect.", labels=names)
        info.add_metric(own, self._about())
        yield info

    def _values(self) -> dict[str, float]:
        values = metrics_of(self._report, self._facts)
        if self._report.active and self._facts.exposed_s is not None:
            values[PREFIX + "exposed_s"] = self._facts.exposed_s  # loggers have it by the step
        return values

    def _about(self) -> dict[str, str]:
        report = self._report
        return {
            "version": __version__,
            "choice": report.choice,
            "policy": report.policy,
            "codec": report.codec,
            "plan": report.plan or "",
            "reason": report.reason,
        }


_taken: set[str] = set()  # by this process: a second State writes a second file


class MetricsFile:
    """One rank's metrics, in ``folder/commsched-rank{rank}.prom``; a second State's in ``-2.prom``.

    For node_exporter's textfile collector. Written whole or not at all. A full disk, or a folder
    that is gone, is said once and is never an error. After `close` the file stays as it is;
    ``node_textfile_mtime_seconds`` tells its age.

    Args:
        folder: made if missing.
        rank: this process's rank.
        world_size: the number of ranks.
        now: the clock, in seconds.

    Raises:
        SettingsError: prometheus_client is not installed.
    """

    def __init__(
        self, folder: str, rank: int, world_size: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.require(folder)
        self._library = import_module("prometheus_client")
        self._now = now
        self._due_s = -math.inf
        self._warned = False
        self.path, number = _free_path(os.path.join(folder, f"commsched-rank{rank}"))
        _taken.add(self.path)
        self._labels = {"rank": str(rank), "world_size": str(world_size), "state": str(number)}
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            self._warn(error)

    @staticmethod
    def require(folder: str) -> None:
        """Refuse where the library is missing; for State, before any other rank waits.

        Raises:
            SettingsError: prometheus_client is not installed.
        """
        try:
            import_module("prometheus_client")
        except ImportError:
            raise SettingsError(MISSING.format(folder=folder)) from None

    def maybe_write(
        self, report_maker: Callable[[], Report], facts_maker: Callable[[], Facts] = Facts
    ) -> bool:
        """Write, where the last time is `EVERY_S` seconds ago. Call it once a step.

        Args:
            report_maker: asked for the report if it is time.
            facts_maker: asked for what is known besides; without it there are no counters.

        Returns:
            Whether a file was written.
        """
        now_s = self._now()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + EVERY_S
        return self._write(report_maker(), facts_maker())

    def close(self, report: Report | None = None, facts: Facts | None = None) -> None:
        """The last word, if there is one. Safe to call again."""
        if report is not None and self.path in _taken:
            self._write(report, Facts() if facts is None else facts)
        _taken.discard(self.path)

    def _write(self, report: Report, facts: Facts) -> bool:
        try:
            self._library.write_to_textfile(self.path, _Families(report, facts, self._labels))
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("metrics are not written to %s: %s", self.path, error)


def _free_path(stem: str) -> tuple[str, int]:
    stem, number = os.path.abspath(stem), 1
    while (path := stem + (f"-{number}" if number > 1 else "") + ".prom") in _taken:
        number += 1
    return path, number
