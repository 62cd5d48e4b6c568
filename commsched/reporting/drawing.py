"""Drawing: one step as boxes on rows, for whoever renders them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING

from commsched.reporting.findings import ms
from commsched.reporting.intervals import Interval, subtract
from commsched.reporting.traced import TracedStep

if TYPE_CHECKING:
    from commsched.tracing.file import Span

__all__ = ["LEGEND", "Box", "Picture", "Row", "draw"]

WIDTH = 1130.0  # of the whole picture, as is the rest in pixels
LEFT = 124.0  # where time begins; row names stand before it
ROW, WIRE, QUEUE = 24.0, 15.0, 5.0  # heights
GAP, RANK_GAP, TOP = 4.0, 16.0, 26.0
TICKS = 10  # on the time axis, about
LANES = 6  # of queued tasks; more are drawn over each other
# By kind: the name in the legend, in the order in which they are drawn over each other.
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "deferred": "deferred optimizer steps",
    "wait": "training waits (exposed)",
    "encode": "encode",
    "decode": "decode",
    "comm": "on the wire",
    "queued": "queued: ready, not issued",
    "ready": "bucket ready",
}
TRAINING = {"forward": "forward", "backward": "backward", "deferred step": "deferred"}


@dataclass(frozen=True)
class Box:
    """One span. Pixels; `title` is what a reader sees when pointing at it."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Row:
    """One line of boxes."""

    label: str
    y: float
    height: float


@dataclass(frozen=True)
class Picture:
    """A step's timeline. Pixels.

    Attributes:
        ranks: for each rank that is drawn, its name and where it begins.
        ticks: where on the time axis, and what stands there (milliseconds).
        borders: where the step begins and ends.
    """

    width: float
    height: float
    left: float
    top: float
    ranks: tuple[tuple[str, float], ...]
    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    ticks: tuple[tuple[float, str], ...]
    borders: tuple[float, float]

    @property
    def kinds(self) -> dict[str, str]:
        """The part of the legend that is needed."""
        seen = {box.kind for box in self.boxes}
        return {kind: text for kind, text in LEGEND.items() if kind in seen}


def draw(steps: Sequence[TracedStep]) -> Picture:
    """The timeline of one step on several ranks: training, engine, wire and queue of each.

    Args:
        steps: of each rank that shall be drawn, the same step.
    """
    begin_s = min(_begin(step) for step in steps)
    end_s = max(step.end_s for step in steps)
    pen = _Pen(begin_s, end_s)
    for step in steps:
        pen.rank(step)
    first = steps[0]
    return Picture(
        width=WIDTH,
        height=pen.y + 4,
        left=LEFT,
        top=TOP,
        ranks=tuple(pen.ranks),
        rows=tuple(pen.rows),
        boxes=tuple(pen.boxes),
        ticks=tuple(_ticks(pen)),
        borders=(pen.x(first.begin_s), pen.x(first.end_s)),
    )


def _begin(step: TracedStep) -> float:
    """Of the backward whose first bucket begins the step."""
    spans = (span for span in step.named("backward") if span.begin_s <= step.begin_s)
    return min((span.begin_s for span in spans), default=step.begin_s)


def _ticks(pen: _Pen) -> Iterator[tuple[float, str]]:
    length_ms = 1e3 * (pen.end_s - pen.begin_s)
    power = 10.0 ** floor(log10(length_ms / TICKS))
    every_ms = next(power * one for one in (1, 2, 5, 10) if power * one * TICKS >= length_ms)
    at = 0
    while at * every_ms <= length_ms:
        yield pen.x(pen.begin_s + at * every_ms / 1e3), f"{at * every_ms:g}"
        at += 1


class _Pen:
    """Puts boxes down, from the top to the bottom."""

    def __init__(self, begin_s: float, end_s: float) -> None:
        self.begin_s, self.end_s = begin_s, end_s
        self.y = TOP
        self.ranks: list[tuple[str, float]] = []
        self.rows: list[Row] = []
        self.boxes: list[Box] = []

    def x(self, at_s: float) -> float:
        """Where a time is."""
        share = (at_s - self.begin_s) / max(1e-9, self.end_s - self.begin_s)
        return round(LEFT + (WIDTH - LEFT - 8) * min(1.0, max(0.0, share)), 2)

    def rank(self, step: TracedStep) -> None:
        """All rows of one rank."""
        self.y += RANK_GAP
        self.ranks.append((f"rank {step.rank}", self.y))
        self._training(step)
        coding = [*step.named("encode"), *step.named("decode")]
        if coding:
            self._row("engine", ROW, ((span.name, span, 0.0, ROW) for span in coding))
        comms = step.named("comm")
        wires = sorted({span.row for span in comms}, key=lambda row: (len(row), row))
        boxes = [("comm", span, wires.index(span.row) * (WIRE + 1), WIRE) for span in comms]
        self._row("wire", max(1, len(wires)) * (WIRE + 1) - 1, boxes)
        self._queue(step)

    def _training(self, step: TracedStep) -> None:
        spans = [(kind, span) for name, kind in TRAINING.items() for span in step.named(name)]
        y = self._row("training", ROW, ((kind, span, 0.0, ROW) for kind, span in spans))
        for span in step.named("wait"):
            self._box("wait", (span.begin_s, span.end_s), y, ROW, _title(span, self.begin_s))
        for interval in subtract(step.exposed, step.times("wait")):
            length_ms = 1e3 * (interval[1] - interval[0])
            if length_ms > 0.1:
                self._box("wait", interval, y, ROW, f"in DDP's reducer, {ms(length_ms)} ms")

    def _queue(self, step: TracedStep) -> None:
        placed = list(_lanes(step.named("queued")))
        lanes = 1 + max((lane for lane, _ in placed), default=0)
        boxes = [("queued", span, lane * (QUEUE + 1), QUEUE) for lane, span in placed]
        y = self._row("queued", max(ROW, lanes * (QUEUE + 1)), boxes)
        for span in step.named("ready"):
            title = _title(span, self.begin_s)
            self.boxes.append(Box("ready", self.x(span.begin_s), y, 1.5, ROW, title))

    def _row(
        self, label: str, height: float, spans: Iterable[tuple[str, Span, float, float]]
    ) -> float:
        y = self.y
        self.rows.append(Row(label, y, height))
        for kind, span, down, tall in spans:
            title = _title(span, self.begin_s)
            self._box(kind, (span.begin_s, span.end_s), y + down, tall, title)
        self.y += height + GAP
        return y

    def _box(self, kind: str, times: Interval, y: float, height: float, title: str) -> None:
        x, end = self.x(times[0]), self.x(times[1])
        if times[1] >= self.begin_s and times[0] <= self.end_s:
            self.boxes.append(Box(kind, x, y, max(0.4, round(end - x, 2)), height, title))


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Overlapping spans below each other."""
    free_s = [0.0] * LANES
    for span in sorted(spans, key=lambda span: span.begin_s):
        if span.end_s > span.begin_s:
            at = next((at for at, end in enumerate(free_s) if end <= span.begin_s), LANES - 1)
            free_s[at] = max(free_s[at], span.end_s)
            yield at, span


def _title(span: Span, begin_s: float) -> str:
    args = span.args
    words = [span.name]
    if args.get("task") is not None:
        words.append(f"task {args['task']}")
    if args.get("op"):
        codec = args.get("codec") or "none"
        words.append(str(args["op"]) + (f" ({codec})" if codec != "none" else ""))
    buckets = args.get("bucket")
    if buckets is not None and buckets != []:
        numbers = buckets if isinstance(buckets, list) else [buckets]
        words.append(f"bucket {', '.join(map(str, numbers))}")
    if args.get("bytes"):
        words.append(f"{args['bytes'] / 1e6:.2f} MB")
    if args.get("params"):
        words.append(str(args["params"]))
    at_ms = 1e3 * (span.begin_s - begin_s)
    length_ms = 1e3 * (span.end_s - span.begin_s)
    words.append(f"{length_ms:.2f} ms, from {at_ms:.1f} ms" if length_ms else f"at {at_ms:.1f} ms")
    return ", ".join(words)
