"""The trace's file: a thread that turns events into lines, and writes them.

One event a line, so a file that ends anywhere loses its last line at most. The first line with
content is written before the file gets its name: every file says whose it is.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any

__all__ = ["END", "HEAD", "Event", "Fixed", "Writer"]

HEAD, END = "commsched", "commsched_end"  # the first and the last event
PERIOD_S = 0.25  # a kill loses so much
SLICE = 64  # events formatted at once: others wait for the interpreter so long
PAUSE_S = 1e-4  # and in between they get it
MOST = 100_000  # events that may wait for a slow disk
CLOSE_S = 5.0  # a disk that has not answered by then is given up
ROWS = {"steps": 1, "training": 2, "buckets": 3, "queued": 4, "engine": 5}
WIRE = 10  # the number of the first wire's row
OTHERS = 1000  # and of the first row that is not known

logger = logging.getLogger("commsched")


class Fixed:
    """Arguments that many spans share: put into text once. Not to be changed."""

    __slots__ = ("args", "text")

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.args = args
        self.text: str | None = None


# Kind, name, row, begin and end in seconds, arguments. Kinds are Chrome's, and "F" (a span on the
# wire) and "Q" (one that may overlap others). A plain tuple: nothing is made faster.
Event = tuple[str, str, str, float, float, Fixed | None, dict[str, Any]]


class _Lines:
    """Turns events into lines: numbers rows, finds wires that are free, names what is new."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._starts: dict[tuple[str, str, str], str] = {}  # of lines, up to the time
        self._wires: list[float] = []  # when the last span on each ends
        self._queued = 0

    def of(self, event: Event) -> str:
        """An event's lines."""
        kind, name, row, begin_s, end_s, fixed, args = event
        inner = _members(args) if fixed is None else _joined(fixed, args)
        if kind == "M":
            return self._note(name, 0, inner)
        if kind == "F":
            kind, row = "X", f"wire {self._wire(begin_s, end_s)}"
        new = "" if row in self._rows else self._named(row)
        at = f"{new}{self._start('b' if kind == 'Q' else kind, name, row)}{1e6 * begin_s:.3f}"
        if kind == "X":
            length_us = max(0.0, 1e6 * (end_s - begin_s))
            return f'{at},"dur":{length_us:.3f},"args":{{{inner}}}}},\n'
        if kind == "i":
            return f'{at},"s":"t","args":{{{inner}}}}},\n'
        self._queued += 1
        key, until = f'"id":{self._queued}', self._start("e", name, row)
        return f'{at},{key},"args":{{{inner}}}}},\n{until}{1e6 * end_s:.3f},{key}}},\n'

    def named(self) -> str:
        """The process's name."""
        return self._note("process_name", 0, f'"name":"rank {self._rank}"') + self._note(
            "process_sort_index", 0, f'"sort_index":{self._rank}'
        )

    def _named(self, row: str) -> str:
        wire = row.removeprefix("wire ")
        others = OTHERS + len(self._rows)
        tid = WIRE + int(wire) if row != wire and wire.isdigit() else ROWS.get(row, others)
        self._rows[row] = tid
        return self._note("thread_name", tid, f'"name":{_quoted(row)}') + self._note(
            "thread_sort_index", tid, f'"sort_index":{tid}'
        )

    def _wire(self, begin_s: float, end_s: float) -> int:
        # They come in the order of their ends, so the last one's end stands for all before it.
        for wire, busy_s in enumerate(self._wires):
            if busy_s <= begin_s:
                self._wires[wire] = end_s
                return wire
        self._wires.append(end_s)
        return len(self._wires) - 1

    def _start(self, kind: str, name: str, row: str) -> str:
        key = kind, name, row
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = self._head(kind, name, self._rows[row]) + '"ts":'
        return start

    def _note(self, name: str, tid: int, inner: str) -> str:
        return f'{self._head("M", name, tid)}"args":{{{inner}}}}},\n'

    def _head(self, kind: str, name: str, tid: int) -> str:
        quoted, rank = _quoted(name), self._rank
        return f'{{"ph":"{kind}","name":{quoted},"cat":"{HEAD}","pid":{rank},"tid":{tid},'


@lru_cache(maxsize=1024)
def _quoted(text: str) -> str:
    return encode_basestring_ascii(text)


def _joined(fixed: Fixed, args: dict[str, Any]) -> str:
    if fixed.text is None:
        fixed.text = _members(fixed.args)
    more = _members(args)
    return f"{more},{fixed.text}" if more and fixed.text else more or fixed.text


def _members(args: Mapping[str, Any]) -> str:
    return ",".join([f"{_quoted(key)}:{_value(value)}" for key, value in args.items()])


def _value(value: Any) -> str:
    kind = type(value)
    if kind is int:
        return str(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is float and not math.isfinite(value):
        return "null"  # JSON has no other word
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    return value.to_json() if hasattr(value, "to_json") else str(value)


class Writer:
    """Writes events to one file, on a thread of its own.

    Args:
        path: written over.
        rank: of this process.
        about: the arguments of the first event.

    Raises:
        OSError: the file cannot be written.

    Attributes:
        over: nothing is taken any more.
    """

    def __init__(self, path: str, rank: int, about: dict[str, Any]) -> None:
        self.path = path
        self.over = False
        self._expecting = False
        self._events: deque[Event] = deque()
        self._lost = 0
        self._lines = _Lines(rank)
        # Not a threading.Event: garbage collection may close us on a thread that holds its lock.
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: close
        head: Event = ("M", HEAD, "", 0.0, 0.0, None, about)
        text = "[\n" + self._lines.of(head) + self._lines.named()
        self._fd = _create(path, text.encode())
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="commsched-trace", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """One more event. From any thread."""
        if self.over:
            return
        if len(self._events) < MOST:
            self._events.append(event)
        else:
            self._lost += 1

    def expect(self, spans: bool) -> None:
        """Whether spans will come, so that the thread must look for them."""
        if spans != self._expecting:
            self._expecting = spans
            self.wake()

    def wake(self) -> None:
        """Write what there is soon."""
        self._calls.put(False)

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self.over:
            return
        self._calls.put(True)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the trace's end is lost: %s takes no data", self.path)

    def forget(self) -> None:
        """In a forked process: leave the file to the parent."""
        if not self.over:
            self.over = True
            self._events.clear()
            os.close(self._fd)

    def _run(self) -> None:
        closing = False
        try:
            while not closing:
                closing = self._called()
                self._write_events(hurry=closing)
            self._finish()
        except OSError as error:
            logger.warning(
                "tracing stops: %s cannot be written: %s; training goes on",
                self.path,
                error.strerror or error,
            )
        except Exception:
            logger.warning("tracing stops; training goes on", exc_info=True)
        self.over = True
        self._events.clear()
        os.close(self._fd)

    def _called(self) -> bool:
        try:
            return self._calls.get(timeout=PERIOD_S if self._expecting else None)
        except queue.Empty:
            return False

    def _write_events(self, hurry: bool) -> None:
        events, lines = self._events, self._lines
        while events:
            count = min(SLICE, len(events))
            text = "".join([lines.of(events.popleft()) for _ in range(count)])
            _write(self._fd, text.encode())
            if not hurry:
                time.sleep(PAUSE_S)

    def _finish(self) -> None:
        if self._lost:
            logger.warning(
                "%d spans are missing from %s: it is written too slowly", self._lost, self.path
            )
        end: Event = ("M", END, "", 0.0, 0.0, None, {"lost": self._lost})
        _write(self._fd, (self._lines.of(end).removesuffix(",\n") + "\n]\n").encode())


def _create(path: str, data: bytes) -> int:
    """A file of that name that begins with `data`. No file of that name ever lacks it."""
    new = f"{path}.{os.getpid()}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write(fd, data)
        os.replace(new, path)
    except OSError:
        os.close(fd)
        os.unlink(new)
        raise
    return fd


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _forget_all() -> None:
    for writer in list(_writers):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
