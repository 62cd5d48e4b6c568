"""Trace files: reading what `trace.Tracer` wrote, and putting all ranks' into one file."""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from commsched.errors import CommSchedError
from commsched.tracing.writer import END, HEAD

__all__ = ["RankTrace", "Span", "merged", "read", "read_all"]

NAME = re.compile(r"trace-rank(\d+)(?:-(\d+))?\.json")  # model 2 and on have a number
MODELS = 1_000_000  # in a merged file: between process numbers of a rank's models

logger = logging.getLogger("commsched")


@dataclass(frozen=True)
class Span:
    """One span; an instant where it ends as it begins. Seconds."""

    name: str
    row: str
    begin_s: float
    end_s: float
    args: dict[str, Any]


@dataclass(frozen=True)
class RankTrace:
    """One file: what one rank did with one model.

    Attributes:
        rank: whose it is, in the whole job.
        world_size: how many ranks trained the model.
        about: the arguments of its first event.
        spans: in the order in which they were written, about that of their ends.
        notes: the other metadata events of ours: names and arguments.
        path: where it was read from.
        model: 1, 2, ... where one process trained several models.
        complete: whether the file was closed, so that nothing is missing at its end.
        events: all lines, as they are.
        aligned: spans are on rank 0's clock.
    """

    rank: int
    world_size: int
    about: dict[str, Any]
    spans: tuple[Span, ...]
    notes: list[tuple[str, dict[str, Any]]]
    path: str = ""
    model: int = 1
    complete: bool = False
    events: tuple[dict[str, Any], ...] = ()
    aligned: bool = False


def read(path: str | Path) -> RankTrace:
    """One rank's file, on its own clock. Its last line may be cut: then it is left out.

    Raises:
        CommSchedError: no such file, or it is something else.
    """
    path = Path(path)
    events = _events(path)
    head = events[0] if events else {}
    if head.get("name") != HEAD or "rank" not in head.get("args", {}):
        raise _not_ours(path, "its first event is not commsched's")
    about = head["args"]
    notes = [
        (event["name"], event.get("args", {}))
        for event in events[1:]
        if event["ph"] == "M" and event.get("cat") == HEAD and event["name"].startswith(HEAD)
    ]
    name = NAME.fullmatch(path.name)
    return RankTrace(
        rank=about["rank"],
        world_size=about["world_size"],
        about=about,
        spans=tuple(_spans(events)),
        notes=notes,
        path=str(path),
        model=int(name[2] or 1) if name else 1,
        complete=any(name == END for name, _ in notes),
        events=tuple(events),
    )


def read_all(paths: Iterable[str | Path]) -> list[RankTrace]:
    """All ranks' files of one job, by rank, with all spans on rank 0's clock.

    Args:
        paths: files, or folders with ``trace-rank*.json`` files.

    Raises:
        CommSchedError: a path has no trace, or the files are not of one job.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    if not files:
        raise CommSchedError("name a trace file, or a folder that COMMSCHED_TRACE was set to")
    traces = sorted((read(file) for file in files), key=lambda trace: (trace.model, trace.rank))
    _refuse_strangers(traces)
    return [_aligned(trace) for trace in traces]


def merged(traces: Iterable[RankTrace]) -> Iterator[str]:
    """The lines of one Chrome / Perfetto file with all ranks, one below the other.

    Args:
        traces: as `read_all` gives them.
    """
    yield "[\n"
    before = ""
    for trace in traces:
        offset = _Offset(trace)
        for event in _renamed(trace):
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + 1e6 * offset.at(1e-6 * event["ts"]), 3)
            yield before + json.dumps(event, separators=(",", ":"))
            before = ",\n"
    yield "\n]\n"


def _renamed(trace: RankTrace) -> Iterator[dict[str, Any]]:
    """Its events, with a process number and name that no other trace has."""
    pid = trace.rank + (trace.model - 1) * MODELS
    model = f", model {trace.model}" if trace.model > 1 else ""
    for event in trace.events:
        args = event.get("args", {})
        if event["name"] == "process_name":
            args = {"name": f"rank {trace.rank} ({trace.about.get('host', 'unknown')}){model}"}
        elif event["name"] == "process_sort_index":
            args = {"sort_index": pid}
        ids = {"id": f"{pid}.{event['id']}"} if "id" in event else {}
        yield {**event, **ids, "pid": pid, **({"args": args} if args else {})}


class _Offset:
    """What to add to a rank's times: between two comparisons of clocks on the line between them.

    Before the first and after the last it stands still. A line further on would follow their
    errors more than the clocks.
    """

    def __init__(self, trace: RankTrace) -> None:
        rows = [args for name, args in trace.notes if name == "commsched_clock"]
        points = sorted((row["at_s"], row["offset_s"]) for row in rows)
        self._at: list[float] = [at_s for at_s, _ in points]
        self._offset: list[float] = [offset_s for _, offset_s in points]

    def at(self, at_s: float) -> float:
        """Seconds, at this rank's time `at_s`."""
        if not self._at:
            return 0.0
        after = bisect_right(self._at, at_s)
        if after in (0, len(self._at)):
            return self._offset[min(after, len(self._at) - 1)]
        left, right = self._at[after - 1], self._at[after]
        share: float = (at_s - left) / (right - left)
        return self._offset[after - 1] * (1 - share) + self._offset[after] * share


def _aligned(trace: RankTrace) -> RankTrace:
    offset = _Offset(trace)
    spans = tuple(
        replace(
            span,
            begin_s=span.begin_s + offset.at(span.begin_s),
            end_s=span.end_s + offset.at(span.end_s),
        )
        for span in trace.spans
    )
    return replace(trace, spans=spans, aligned=True)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if NAME.fullmatch(file.name))
    if not found:
        raise CommSchedError(
            f"{path} holds no trace-rank*.json; run the job with COMMSCHED_TRACE={path}"
        )
    return found


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        hint = ": COMMSCHED_TRACE=folder makes a job write traces there" * (not path.exists())
        raise CommSchedError(f"{path} cannot be read: {error.strerror or error}{hint}") from None
    first, *lines = data.split(b"\n")
    if first.strip() != b"[":
        raise _not_ours(path, "it does not begin as one")
    events = []
    for number, line in enumerate(lines, 2):
        text = line.strip().removesuffix(b",")
        if not text or text == b"]":
            continue
        try:
            event = json.loads(text)
        except ValueError:
            if any(map(bytes.strip, lines[number - 1 :])):
                raise CommSchedError(f"{path} is damaged in line {number}") from None
            break  # the writer was killed here
        if not isinstance(event, dict) or not {"ph", "name"} <= event.keys():
            raise _not_ours(path, f"line {number} is not an event")
        events.append(event)
    return events


def _spans(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    begun: dict[Any, dict[str, Any]] = {}
    for event in events:
        kind = event["ph"]
        if event.get("cat") != HEAD or kind == "M":
            continue
        row, end_us = rows.get(event["tid"], str(event["tid"])), event["ts"]
        if kind == "b":
            begun[event["id"]] = event
            continue
        if kind == "e":  # it has the end only
            event = begun.pop(event["id"], {})
            if not event:
                continue
        args = event.get("args", {})
        end_us += event.get("dur", 0.0)
        yield Span(event["name"], row, 1e-6 * event["ts"], 1e-6 * end_us, args)


def _refuse_strangers(traces: list[RankTrace]) -> None:
    """Raise unless they may be of one job."""
    sizes = sorted({trace.world_size for trace in traces})
    twice = [key for key, n in Counter((t.rank, t.model) for t in traces).items() if n > 1]
    processes = {(trace.rank, trace.about.get("pid")) for trace in traces}
    left_over = len(processes) > len({trace.rank for trace in traces})  # a further model's file
    if len(sizes) > 1 or twice or left_over:
        raise CommSchedError(
            f"the files are of several jobs, of {sizes} ranks: "
            f"{', '.join(trace.path for trace in traces)}. Name those of one, or give each job a "
            "folder of its own"
        )
    ranks = sorted({trace.rank for trace in traces})  # those of a subgroup need not begin with 0
    if len(ranks) < sizes[0]:
        logger.warning("traces of ranks %s only, of %d ranks", ranks, sizes[0])


def _not_ours(path: Path, why: str) -> CommSchedError:
    return CommSchedError(
        f"{path} is not a trace that commsched wrote ({why}). Name a trace-rank*.json file, or the "
        "folder that COMMSCHED_TRACE was set to"
    )
