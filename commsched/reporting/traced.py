"""Traced steps: the spans of a trace sorted into steps, and which steps tell how training runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

from commsched.errors import CommSchedError
from commsched.reporting.intervals import Interval, length, union

if TYPE_CHECKING:
    from commsched.tracing.file import RankTrace, Span

__all__ = ["TracedStep", "steps_of", "usable"]

BY_NUMBER = ("ready", "queued", "encode", "comm", "decode")  # their arguments say whose they are
FEW = 5  # settled steps: fewer say little, so the others stay
WARM_UP = 2  # the model's first steps: DDP rebuilds its buckets after them
PAUSE = 3.0  # times the median of what a step computes: evaluation, or a checkpoint, came between


@dataclass(frozen=True)
class TracedStep:
    """One step of one rank: from the first bucket of one backward to that of the next.

    Times are seconds of rank 0's clock. `spans` holds, by name, its tasks' and buckets' spans, and
    what the training thread does while it lasts.
    """

    rank: int
    number: int
    begin_s: float
    end_s: float
    args: Mapping[str, Any]
    spans: dict[str, list[Span]] = field(default_factory=lambda: defaultdict(list))

    @property
    def step_s(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s

    @property
    def choice(self) -> str:
        """What was in effect, in words."""
        return str(self.args.get("choice") or "")

    @property
    def is_deferred(self) -> bool:
        """Whether its optimizer steps ran in the next forward."""
        return bool(self.args.get("deferred"))

    @property
    def is_settled(self) -> bool:
        """Whether nothing was being measured or tried in it."""
        return self.args.get("phase") == "settled"

    def named(self, name: str) -> Sequence[Span]:
        """Its spans of that name, by their begin."""
        return self.spans.get(name, ())

    def times(self, name: str) -> list[Interval]:
        """The time within the step that spans of that name cover."""
        return self.within((span.begin_s, span.end_s) for span in self.named(name))

    def within(self, intervals: Iterable[Interval]) -> list[Interval]:
        """The part of them that lies in the step; overlaps count once."""
        begin_s, end_s = self.begin_s, self.end_s
        return union((max(begin_s, begin), min(end_s, end)) for begin, end in intervals)

    @cached_property
    def wire(self) -> list[Interval]:
        """When at least one task was on the wire."""
        return self.times("comm")

    @cached_property
    def exposed(self) -> list[Interval]:
        """When the training thread stood still for communication.

        Waits may overlap (one within another, or of two threads): they count once. In a step that
        is not deferred DDP's reducer waits for what is left after our own wait, in C++, where we
        see nothing: from the end of ours, or of backward, until the last task is done.
        """
        waits = self.times("wait")
        return waits if self.is_deferred else self.within([*waits, *self._reducer(waits)])

    def _reducer(self, waits: Sequence[Interval]) -> Iterator[Interval]:
        mine = [one for name in ("comm", "decode") for one in self.named(name)]
        ends = [one.end_s for one in self.named("backward") if one.begin_s < self.begin_s]
        ends += [end for _, end in waits]
        if not mine or not ends:
            return
        until_s = max(one.end_s for one in mine)
        began = [one.begin_s for one in self.named("forward") if one.begin_s > self.begin_s]
        yield max(ends), min([until_s, *began])

    @property
    def exposed_s(self) -> float:
        """Exposed communication."""
        return length(self.exposed)

    @property
    def compute_s(self) -> float:
        """The rest of the step."""
        return self.step_s - self.exposed_s


def steps_of(trace: RankTrace) -> list[TracedStep]:
    """The complete steps of one rank, in their order."""
    spans = sorted(trace.spans, key=lambda span: span.begin_s)
    steps = [
        TracedStep(trace.rank, int(span.args["step"]), span.begin_s, span.end_s, span.args)
        for span in spans
        if span.name == "step"
    ]
    begins = [step.begin_s for step in steps]
    numbered = {step.number: step for step in steps}
    for span in spans:
        number = span.args.get("step")
        if span.name in BY_NUMBER and number is not None:
            if number in numbered:
                numbered[number].spans[span.name].append(span)
            continue
        at = max(0, bisect_right(begins, span.begin_s) - 1)
        while at < len(steps) and steps[at].begin_s < span.end_s and span.name != "step":
            if span.begin_s < steps[at].end_s:
                steps[at].spans[span.name].append(span)
            at += 1
    return steps


def usable(ranks: Sequence[Sequence[TracedStep]]) -> tuple[list[list[TracedStep]], list[str]]:
    """The steps that tell how training runs: the same ones of every rank.

    Args:
        ranks: each rank's steps.

    Returns:
        By step, the steps of all ranks; and how many were left out, and why, in words. Where
        training had hardly settled, steps in which it measured and tried are among them.

    Raises:
        CommSchedError: none is left.
    """
    by_number: dict[int, list[TracedStep]] = defaultdict(list)
    for step in (step for steps in ranks for step in steps):
        by_number[step.number].append(step)
    kept = [by_number[number] for number in sorted(by_number)]
    left_out: list[str] = []

    def keep(those: list[list[TracedStep]], why: str) -> None:
        nonlocal kept
        if gone := len(kept) - len(those):
            left_out.append(f"{gone} {'step' if gone == 1 else 'steps'}: {why}")
        kept = those

    keep([row for row in kept if len(row) == len(ranks)], "not complete on every rank")
    later = [row for row in kept if row[0].number >= WARM_UP]
    keep(later or kept, "the model's first, in which ranks connect and DDP's buckets are others")
    settled = [row for row in kept if all(step.is_settled for step in row)]
    if len(settled) >= FEW or (settled and len(settled) == len(kept)):
        keep(settled, "measuring, or trying how to communicate")
        last = settled[-1][0].choice
        keep([row for row in kept if row[0].choice == last], f"before the choice of {last!r}")
    elif not later:
        keep(kept[1:], "the first one, in which ranks connect")
    if kept:
        usual_s = median(step.compute_s for row in kept for step in row)
        short = [row for row in kept if all(step.compute_s <= PAUSE * usual_s for step in row)]
        keep(short, f"computing took over {PAUSE:g} x the median (evaluation, a checkpoint?)")
    if not kept:
        raise CommSchedError(
            "the traces hold no step to report on"
            + (f" ({'; '.join(left_out)})" if left_out else "")
            + ": trace more steps (COMMSCHED_TRACE_STEPS), and give the files of all ranks of one "
            "run"
        )
    return kept, left_out
