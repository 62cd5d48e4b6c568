"""Trace: what a rank did when, as spans in a Chrome / Perfetto file, and as ranges in profilers.

Whoever does something reports it here, from any thread. A span costs its reporter a tuple; the
file is another thread's work (`tracewriter`). Spans are kept for a window of steps only.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from commsched.errors import CommSchedError, SettingsError
from commsched.tracing.ranges import profiled
from commsched.tracing.writer import Event, Fixed, Writer
from commsched.version import __version__

__all__ = ["ALL_STEPS", "SILENT", "Blind", "Fixed", "Silent", "Tracer", "parse_steps"]

ALL_STEPS = range(sys.maxsize)
CLOCK_STEPS = 100  # clocks drift apart by some microseconds a second; so often they are compared

_files: dict[tuple[str, int], int] = {}  # how many this process has made, by folder and rank

About = Fixed | Callable[[], Fixed] | None


def parse_steps(text: str) -> range:
    """The steps that are traced: "10:20" (half-open), "10:", ":20", or "" (all).

    Raises:
        SettingsError: anything else, or no step at all.
    """
    first, colon, last = (part.strip() for part in text.partition(":"))
    numbers = [part for part in (first, last) if part]
    if all(part.isascii() and part.isdigit() for part in numbers) and (colon or not numbers):
        steps = range(int(first or 0), min(int(last or sys.maxsize), sys.maxsize))
        if steps.start < steps.stop:
            return steps
    raise SettingsError(
        f"steps {text!r} are not allowed: write the first one and the one after the last, as in "
        "10:20, 10: or :20; the model's first step is 0"
    )


class Silent:
    """Traces nothing: what a `Tracer` can, without a file. Profilers still see its regions.

    Attributes:
        on: whether spans are wanted at the moment. Ask before computing what a span says.
        step: the present step.
        steps: those that are traced, as text; "" where none ever is.
    """

    on = False
    step = 0
    steps = ""

    def begin_step(
        self, step: int, phase: str, choice: str, plan: str | None, deferred: bool, at_s: float
    ) -> None:
        """The first bucket of a backward has come; the step before ends. Training thread only.

        Args:
            step: counted from 0, the model's first one in this process.
            phase: "measuring", "trying" or "settled".
            choice: what is in effect, in words.
            plan: its digest; None before there is one.
            deferred: whether sums are waited for in the next forward.
            at_s: when (time.monotonic), like all times here.
        """

    def clock_due(self, step: int) -> bool:  # noqa: ARG002
        """Whether ranks shall compare their clocks before this step. The same on all of them."""
        return False

    def span(
        self,
        name: str,
        row: str,
        begin_s: float,
        end_s: float,
        fixed: Fixed | None = None,
        **args: Any,
    ) -> None:
        """Something took from `begin_s` to `end_s`.

        Args:
            name: what.
            row: where it is drawn.
            begin_s: when it began.
            end_s: when it had ended.
            fixed: arguments that many spans share.
            **args: further ones, JSON values.
        """

    def flight(self, begin_s: float, end_s: float, fixed: Fixed | None = None, **args: Any) -> None:
        """A task was on the wire. It gets the lowest row on which it overlaps no other.

        Reported in the order in which tasks end.
        """

    def queued(self, begin_s: float, end_s: float, fixed: Fixed | None = None, **args: Any) -> None:
        """A task had its gradients and was not issued."""

    def instant(
        self, name: str, row: str, at_s: float, fixed: Fixed | None = None, **args: Any
    ) -> None:
        """Something happened at `at_s`."""

    def note(self, name: str, **args: Any) -> None:
        """A metadata event, kept whatever the window: JSON values, or what has a `to_json`."""

    def region(
        self, name: str, row: str, fixed: About = None, **args: Any
    ) -> AbstractContextManager[object]:
        """A span around a block, and a range ``commsched.<name>`` in a running profiler.

        Args:
            name: what.
            row: where it is drawn.
            fixed: arguments; a function is called at the block's end, if a span is wanted at all.
            **args: further ones.
        """
        del row, fixed, args
        return profiled(name)

    def close(self) -> None:
        """Write what is left. Safe to call again."""


SILENT = Silent()


class Blind(Silent):
    """A tracer without a file: this rank cannot write one, but takes part in what concerns others.

    Args:
        steps: see `parse_steps`.

    Raises:
        SettingsError: `steps`.
    """

    def __init__(self, steps: str = "0:200") -> None:
        self.steps = steps
        self._window = parse_steps(steps)

    def clock_due(self, step: int) -> bool:
        """See `Silent.clock_due`: at both ends of the window, and now and then between."""
        start, stop = self._window.start, self._window.stop
        return step == stop or (step in self._window and (step - start) % CLOCK_STEPS == 0)


class _Region:
    __slots__ = ("_about", "_args", "_begin_s", "_name", "_put", "_range", "_row")

    def __init__(
        self, put: Callable[[Event], None], name: str, row: str, about: About, args: dict[str, Any]
    ) -> None:
        self._put, self._name, self._row, self._about, self._args = put, name, row, about, args
        self._range = profiled(name)

    def __enter__(self) -> None:
        self._range.__enter__()
        self._begin_s = time.monotonic()

    def __exit__(self, *error: Any) -> None:
        end_s = time.monotonic()
        self._range.__exit__(*error)
        fixed = self._about() if callable(self._about) else self._about
        self._put(("X", self._name, self._row, self._begin_s, end_s, fixed, self._args))


class Tracer(Blind):
    """One rank's trace of one model.

    The file is ``trace-rank{R}.json`` in the folder; further models of this process get
    ``trace-rank{R}-2.json`` and so on. Files of an earlier run are written over.

    Args:
        folder: made if it is not there.
        rank: of this process, in the whole job: names the file.
        world_size: how many ranks train the model.
        steps: see `parse_steps`.
        **about: for the file's first line: JSON values.

    Raises:
        SettingsError: `steps`.
        CommSchedError: no file can be written there.

    Dropping the last reference, or the end of the program, writes what is left. A disk that fills
    up later ends the tracing, with one warning, and nothing else. A forked process traces nothing.
    """

    def __init__(
        self, folder: str, rank: int, world_size: int, steps: str = "0:200", **about: Any
    ) -> None:
        super().__init__(steps)
        self._began: tuple[float, dict[str, Any]] | None = None  # the present step, if traced
        ours = {"version": __version__, "rank": rank, "world_size": world_size}
        ours |= {"host": socket.gethostname(), "pid": os.getpid(), "steps": steps}
        try:
            os.makedirs(folder, exist_ok=True)
            path = _path(folder, rank)
            self._writer = Writer(path, rank, {**ours, **about})
        except OSError as error:
            raise CommSchedError(
                f"no trace can be written to {folder!r}: {error.strerror or error}. Set trace= (or "
                "COMMSCHED_TRACE) to a folder that this process may write to, or leave it out"
            ) from None
        self.path = path
        self._put = self._writer.put
        # Not its own method: that would keep this object alive. It also runs at the program's end,
        # after the finalizers of those who came later and may still have something to report.
        self._finalizer = weakref.finalize(self, self._writer.close)

    def begin_step(
        self, step: int, phase: str, choice: str, plan: str | None, deferred: bool, at_s: float
    ) -> None:
        """See `Silent.begin_step`."""
        if self._began is not None:
            self._put(("X", "step", "steps", self._began[0], at_s, None, self._began[1]))
        self.step = step
        self.on = step in self._window and not self._writer.over
        self._began = None
        if self.on:
            args = {"step": step, "phase": phase, "choice": choice, "plan": plan}
            self._began = at_s, {**args, "deferred": deferred}
        self._writer.expect(self.on)

    def span(
        self,
        name: str,
        row: str,
        begin_s: float,
        end_s: float,
        fixed: Fixed | None = None,
        **args: Any,
    ) -> None:
        """See `Silent.span`."""
        if self.on:
            self._put(("X", name, row, begin_s, end_s, fixed, args))

    def flight(self, begin_s: float, end_s: float, fixed: Fixed | None = None, **args: Any) -> None:
        """See `Silent.flight`."""
        if self.on:
            self._put(("F", "comm", "", begin_s, end_s, fixed, args))

    def queued(self, begin_s: float, end_s: float, fixed: Fixed | None = None, **args: Any) -> None:
        """See `Silent.queued`."""
        if self.on:
            self._put(("Q", "queued", "queued", begin_s, end_s, fixed, args))

    def instant(
        self, name: str, row: str, at_s: float, fixed: Fixed | None = None, **args: Any
    ) -> None:
        """See `Silent.instant`."""
        if self.on:
            self._put(("i", name, row, at_s, at_s, fixed, args))

    def note(self, name: str, **args: Any) -> None:
        """See `Silent.note`."""
        self._put(("M", name, "", 0.0, 0.0, None, args))
        self._writer.wake()

    def region(
        self, name: str, row: str, fixed: About = None, **args: Any
    ) -> AbstractContextManager[object]:
        """See `Silent.region`."""
        return _Region(self._put, name, row, fixed, args) if self.on else profiled(name)

    def close(self) -> None:
        """See `Silent.close`."""
        self.on = False
        self._finalizer()


def _path(folder: str, rank: int) -> str:
    key = os.path.realpath(folder), rank
    number = _files[key] = _files.get(key, 0) + 1
    return os.path.join(folder, f"trace-rank{rank}{f'-{number}' if number > 1 else ''}.json")
