"""From the ranks' curves to rows: final losses against exact training, time, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import mean
from typing import Any

from rich.table import Table

from bench.convergence_tasks import is_exact
from commsched import codecs

__all__ = ["TARGETS", "Row", "find", "merge", "reach_s", "rows_of", "table", "target_of", "verdict"]

# How far above exact training's the final loss may be, by codec; of options, the defaults only.
TARGETS = dict.fromkeys(("fp16", "bf16", "int8", "fp8", "dynamic8"), 0.01)
TARGETS |= dict.fromkeys(("sign", "topk", "vote", "powersgd", "acpsgd"), 0.05)
CLOSE = 1.05  # the loss, of exact training's final one, whose time is told

Curves = dict[str, Any]  # a `convergence_rank.Curve`


@dataclass
class Row:
    """One way for gradients to travel, in one task: means over the seeds.

    Attributes:
        task: its name.
        how: a codec's text, or a plain DDP.
        reference: the exact run it is compared with.
        seeds: trained with.
        held_out: final loss on data held out.
        trained: mean loss of the batches after the curve's last point but one.
        ratios: of each seed: final loss over that of the reference with the same seed; None where
            either is not finite.
        ratio: their mean.
        target: the share by which it may be above 1; None: nothing is asked for.
        step_ms, sent_mb: of a step after the first ones; the largest over the ranks.
        close_s: seconds until the loss is within 5 % of the reference's final one, on the mean
            curve; None: never.
        steps, seconds, held_out_curve, trained_curve: the mean curve.
        finals: of each seed.
        agree: whether all ranks had the same models, as they must.
    """

    task: str
    how: str
    reference: str
    seeds: list[int]
    held_out: float
    trained: float
    step_ms: float
    sent_mb: float
    steps: list[int]
    seconds: list[float]
    held_out_curve: list[float]
    trained_curve: list[float]
    finals: list[float]
    agree: bool
    target: float | None = None
    ratios: list[float | None] = field(default_factory=list)
    ratio: float | None = None
    close_s: float | None = None


def target_of(how: str) -> float | None:
    """Of a codec's text; None for plain DDP."""
    return None if is_exact(how) else TARGETS.get(str(codecs.get(how)))


def verdict(row: Row) -> str:
    """The target and whether it is met, in words; nothing where there is none."""
    if row.target is None:
        return ""
    met = row.ratio is not None and row.ratio <= 1 + row.target
    return f"<= {1 + row.target:g}: {'met' if met else 'not met'}"


def merge(ranks: Sequence[Curves]) -> Curves:
    """One training's curves of all ranks in one: as slow as the slowest."""
    first = ranks[0]
    return first | {
        # As text: NaN is not NaN.
        "agree": all(repr(one["held_out"]) == repr(first["held_out"]) for one in ranks),
        "seconds": [max(points) for points in zip(*(one["seconds"] for one in ranks), strict=True)],
        "trained": _means([one["trained"] for one in ranks]),
        "step_ms": max(one["step_ms"] for one in ranks),
        "sent_bytes": max(one["sent_bytes"] for one in ranks),
    }


def rows_of(task: str, references: dict[str, str], curves: Sequence[Curves]) -> list[Row]:
    """A row for each way, in the order of `references`, with the seeds that all have.

    Args:
        task: its name.
        references: each way's.
        curves: merged over the ranks, of any ways and seeds.
    """
    done: dict[str, list[Curves]] = {
        how: [one for one in curves if one["how"] == how] for how in references
    }
    rows = [_row(task, how, references[how], each) for how, each in done.items() if each]
    for row in rows:
        _compare(row, find(rows, row.reference))
    return rows


def find(rows: Sequence[Row], how: str) -> Row | None:
    """The row of that way, if there is one."""
    return next((row for row in rows if row.how == how), None)


def _row(task: str, how: str, reference: str, each: Sequence[Curves]) -> Row:
    held_out = _means([one["held_out"] for one in each])
    trained = _means([one["trained"] for one in each])
    return Row(
        task=task,
        how=how,
        reference=reference,
        seeds=[one["seed"] for one in each],
        held_out=held_out[-1],
        trained=trained[-1],
        step_ms=mean(one["step_ms"] for one in each),
        sent_mb=mean(one["sent_bytes"] for one in each) / 1e6,
        steps=each[0]["steps"],
        seconds=_means([one["seconds"] for one in each]),
        held_out_curve=held_out,
        trained_curve=trained,
        finals=[one["held_out"][-1] for one in each],
        agree=all(one["agree"] for one in each),
        target=target_of(how),
    )


def _compare(row: Row, reference: Row | None) -> None:
    if reference is None:
        return
    exact = dict(zip(reference.seeds, reference.finals, strict=True))
    pairs = [(own, exact.get(seed, inf)) for seed, own in zip(row.seeds, row.finals, strict=True)]
    row.ratios = [
        own / other if isfinite(own) and isfinite(other) else None for own, other in pairs
    ]
    known = [ratio for ratio in row.ratios if ratio is not None]
    row.ratio = mean(known) if known and len(known) == len(row.ratios) else None
    row.close_s = reach_s(row.seconds, row.held_out_curve, CLOSE * reference.held_out)


def reach_s(seconds: Sequence[float], losses: Sequence[float], goal: float) -> float | None:
    """When a curve is first at or below `goal`, on straight lines between its points."""
    before: tuple[float, float] | None = None
    for at_s, loss in zip(seconds, losses, strict=True):
        if loss <= goal:
            if before is None or not isfinite(before[1]):
                return at_s
            return before[0] + (at_s - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = at_s, loss
    return None


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def table(rows: Sequence[Row], title: str) -> Table:
    """One task's rows."""
    result = Table(title=title, title_justify="left", caption_justify="left")
    result.add_column("gradients", no_wrap=True)
    heads = "held-out loss", "x exact", "of each seed", "training loss", "step ms", "sent MB"
    for head in (*heads, f"s to {CLOSE:g} x exact"):
        result.add_column(head, justify="right", no_wrap=True)
    result.add_column("target", no_wrap=True)
    for row in rows:
        result.add_row(
            row.how,
            _text(row.held_out, 4),
            _text(row.ratio, 4),
            " ".join(_text(ratio, 3) for ratio in row.ratios),
            _text(row.trained, 4),
            _text(row.step_ms, 1),
            _text(row.sent_mb, 4),
            _text(row.close_s, 1),
            verdict(row),
        )
    return result


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None or not isfinite(value) else f"{value:.{digits}f}"
