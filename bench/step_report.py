"""From the ranks' figures to rows: step time against plain DDP and against the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Case", "Row", "print_case", "rows_of"]

STATUS_WIDTH = 20  # in the table; the whole text follows it

Figures = dict[str, Any]  # one rank's `RankFigures` as JSON


@dataclass
class Row:
    """One hook in one case. Times in ms, sizes in MB (1e6 bytes); None where not measured.

    Times are the median over the rounds and then the largest over the ranks.

    Attributes:
        hook: the hook's text.
        status: `ok`, or why there are no figures.
        step_ms, min_ms, max_ms: step time; the fastest and slowest round of any rank.
        vs_ddp: step time over plain DDP's; below 1 is faster.
        exposed_ms: exposed communication: step time over that with the no-op hook.
        of_bound: max(compute, all-reduce alone) over the step time; 1 is perfect for a hook
            that does not compress, and a compressing one may exceed it.
        sent_mb: sent per step and rank, counted on the interface.
        rss_mb: growth of resident memory by this hook's model, the largest over the ranks.
        peak_mb, peak_vs_ddp_mb: memory runs only: peak of the rank, and its excess over DDP's.
        loss: last loss on rank 0.
        reported_exposed_ms: what commsched says of itself.
        rounds_ms: per rank, the mean step time of each round.
    """

    hook: str
    status: str = "ok"
    step_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    vs_ddp: float | None = None
    exposed_ms: float | None = None
    of_bound: float | None = None
    sent_mb: float | None = None
    rss_mb: float | None = None
    peak_mb: float | None = None
    peak_vs_ddp_mb: float | None = None
    loss: float | None = None
    reported_exposed_ms: float | None = None
    report: dict[str, Any] | None = None
    rounds_ms: list[list[float]] = field(default_factory=list)


@dataclass
class Case:
    """All hooks of one workload on one link.

    Attributes:
        workload, ranks, rate_mbit: what was measured; rate None: not shaped.
        link: `shaped`, `unshaped` or `loopback`.
        gradient_mb: gradient of one step, MB (1e6 bytes).
        compute_ms: step time with the no-op hook.
        all_reduce_ms: one all-reduce of the whole gradient, nothing else going on.
        bound_ms: the larger of the two.
        rows: one per hook.
        launches: how the ranks of each launch ended, with the tail of stderr of failed ones.
    """

    workload: str
    ranks: int
    rate_mbit: float | None
    link: str
    gradient_mb: float | None = None
    compute_ms: float | None = None
    all_reduce_ms: float | None = None
    bound_ms: float | None = None
    all_reduce_rounds_ms: list[list[float]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)

    def finish(self) -> None:
        """Fills in everything that needs more than one row."""
        steps = {row.hook: row.step_ms for row in self.rows}
        peaks = {row.hook: row.peak_mb for row in self.rows}
        self.compute_ms = steps.get("noop")
        if self.all_reduce_rounds_ms:
            self.all_reduce_ms = max(median(rounds) for rounds in self.all_reduce_rounds_ms)
        if self.compute_ms is not None and self.all_reduce_ms is not None:
            self.bound_ms = max(self.compute_ms, self.all_reduce_ms)
        for row in self.rows:
            row.vs_ddp = _apply(lambda a, b: a / b, row.step_ms, steps.get("ddp"))
            row.exposed_ms = _apply(lambda a, b: a - b, row.step_ms, self.compute_ms)
            if row.hook != "noop":  # it is one of the two bounds itself
                row.of_bound = _apply(lambda a, b: a / b, self.bound_ms, row.step_ms)
            row.peak_vs_ddp_mb = _apply(lambda a, b: a - b, row.peak_mb, peaks.get("ddp"))


def _apply(function: Any, a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float(function(a, b))


def rows_of(ranks: Sequence[Figures], is_loopback: bool, memory: bool) -> list[Row]:
    """One row per hook from all ranks' figures of one launch."""
    rows = []
    for hook in ranks[0]["hooks"]:
        each = [figures["hooks"][hook] for figures in ranks]
        bad = [one["status"] for one in each if one["status"] != "ok"]
        if bad:
            rows.append(Row(hook, bad[0]))
            continue
        row = _row(hook, each)
        # On loopback every rank counts the bytes of all ranks.
        row.sent_mb = max(median(one["sent_bytes"]) for one in each) / 1e6
        row.sent_mb /= len(ranks) if is_loopback else 1
        row.peak_mb = max(figures["peak_mb"] for figures in ranks) if memory else None
        rows.append(row)
    return rows


def _row(hook: str, each: list[Figures]) -> Row:
    rounds_ms = [[1e3 * step_s for step_s in one["step_s"]] for one in each]
    reports = [one["report"] for one in each if one["report"]]
    exposed = [r["exposed_ms"] for r in reports if isinstance(r.get("exposed_ms"), int | float)]
    return Row(
        hook=hook,
        step_ms=max(median(rounds) for rounds in rounds_ms),
        min_ms=min(min(rounds) for rounds in rounds_ms),
        max_ms=max(max(rounds) for rounds in rounds_ms),
        rss_mb=max(one["rss_mb"] for one in each),
        loss=each[0]["loss"],
        reported_exposed_ms=max(exposed, default=None),
        report=reports[0] if reports else None,
        rounds_ms=rounds_ms,
    )


def print_case(console: Console, case: Case, memory: bool) -> None:
    """Prints one case as a table."""
    rate = f"{case.rate_mbit:g} Mbit/s" if case.rate_mbit else case.link
    table = Table(
        title=f"{case.workload}, {case.ranks} ranks, {rate}, gradient {_text(case.gradient_mb)} MB",
        caption=(
            f"compute {_text(case.compute_ms)} ms, all-reduce alone {_text(case.all_reduce_ms)} ms,"
            f" bound {_text(case.bound_ms)} ms"
        ),
        title_justify="left",
        caption_justify="left",
    )
    sent = "sent MB" if case.link != "loopback" else "sent MB (lo / ranks)"
    extra = ["peak MB", "- ddp's"] if memory else ["RSS + MB"]
    heads = ["step ms", "min..max", "x ddp", "exposed ms", "of bound", sent, *extra, "own exposed"]
    table.add_column("hook", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("status", no_wrap=True)
    for row in case.rows:
        spread = "" if row.min_ms is None else f"{row.min_ms:.1f}..{_text(row.max_ms)}"
        sizes = [row.peak_mb, row.peak_vs_ddp_mb] if memory else [row.rss_mb]
        table.add_row(
            row.hook,
            _text(row.step_ms),
            spread,
            _text(row.vs_ddp, 3),
            _text(row.exposed_ms),
            _text(row.of_bound, 3),
            _text(row.sent_mb, 2),
            *(_text(size) for size in sizes),
            _text(row.reported_exposed_ms),
            row.status.partition(":")[0][:STATUS_WIDTH],
        )
    console.print(table)
    for row in case.rows:
        if row.status != "ok":
            console.print(f"{row.hook}: {row.status}", markup=False, soft_wrap=True)


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
