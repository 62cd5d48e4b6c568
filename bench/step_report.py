"""From the ranks' figures to rows: step time against plain DDP and against the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import sub, truediv
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.hooks import HookSpec

__all__ = ["Case", "Row", "print_case", "rows_of"]

STATUS_WIDTH = 20  # in the table; the whole text follows it

Figures = dict[str, Any]  # one rank's `RankFigures` as JSON


@dataclass
class Row:
    """One hook in one case. Times in ms, sizes in MB (1e6 bytes); None where not measured.

    Times are the median over the rounds and then the largest over the ranks. `step_ms` counts
    everything in a round, with what its last step leaves under way; `steady_ms` is what a step
    takes in a long training. With nothing left under way, as in plain DDP, they are the same.

    Attributes:
        hook: the hook's text.
        status: `ok`, or why there are no figures.
        step_ms, min_ms, max_ms: mean step time; the fastest and slowest round of any rank.
        steady_ms: median time from one step's end to the next's, within a round.
        tail_ms: the part of `step_ms` that is the wait after the last step of a round.
        vs_ddp, steady_vs_ddp: step time over plain DDP's; below 1 is faster.
        exposed_ms: exposed communication: `step_ms` less that of the no-op hook; of the one with
            the same `gradient_as_bucket_view` where both were measured.
        of_bound: max(compute, all-reduce alone) over the step time; 1 is perfect for a hook
            that does not compress, and a compressing one may exceed it.
        sent_mb: sent per step and rank, counted on the interface.
        rss_mb: growth of resident memory by this hook's model, the largest over the ranks.
        peak_mb, peak_vs_ddp_mb: memory runs only: peak of the rank, and its excess over DDP's.
        loss: last loss on rank 0.
        reported_exposed_ms: what commsched says of itself.
        predicted_ms, ideal_ms: step times that it foretells, for its plan and for an ideal one.
        predicted_vs_steady: 1 is a perfect prediction.
        rounds_ms, steady_rounds_ms: per rank, `step_ms` and `steady_ms` of each round.
    """

    hook: str
    status: str = "ok"
    step_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    steady_ms: float | None = None
    tail_ms: float | None = None
    vs_ddp: float | None = None
    steady_vs_ddp: float | None = None
    exposed_ms: float | None = None
    of_bound: float | None = None
    sent_mb: float | None = None
    rss_mb: float | None = None
    peak_mb: float | None = None
    peak_vs_ddp_mb: float | None = None
    loss: float | None = None
    reported_exposed_ms: float | None = None
    predicted_ms: float | None = None
    ideal_ms: float | None = None
    predicted_vs_steady: float | None = None
    report: dict[str, Any] | None = None
    rounds_ms: list[list[float]] = field(default_factory=list)
    steady_rounds_ms: list[list[float]] = field(default_factory=list)


@dataclass
class Case:
    """All hooks of one workload on one link.

    Attributes:
        workload, ranks, rate_mbit: what was measured; rate None: not shaped.
        link: `shaped`, `unshaped` or `loopback`.
        gradient_mb: gradient of one step, MB (1e6 bytes).
        compute_ms: step time with the no-op hook: of `noop`, or of the first hook of that name.
            `ddp`, with which the rows compare themselves, is chosen in the same way.
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
        noop, ddp = self._reference("noop"), self._reference("ddp")
        self.compute_ms = noop.step_ms
        if self.all_reduce_rounds_ms:
            self.all_reduce_ms = max(median(rounds) for rounds in self.all_reduce_rounds_ms)
        if self.compute_ms is not None and self.all_reduce_ms is not None:
            self.bound_ms = max(self.compute_ms, self.all_reduce_ms)
        for row in self.rows:
            row.vs_ddp = _apply(truediv, row.step_ms, ddp.step_ms)
            row.steady_vs_ddp = _apply(truediv, row.steady_ms, ddp.steady_ms)
            row.exposed_ms = _apply(sub, row.step_ms, self._noop_like(row, noop).step_ms)
            if row is not noop:  # it is one of the two bounds itself
                row.of_bound = _apply(truediv, self.bound_ms, row.step_ms)
            row.peak_vs_ddp_mb = _apply(sub, row.peak_mb, ddp.peak_mb)
            row.predicted_vs_steady = _apply(truediv, row.predicted_ms, row.steady_ms)

    def _reference(self, name: str) -> Row:
        """The row that the others compare themselves with: `name`, or its first with settings."""
        rows = {row.hook: row for row in self.rows if HookSpec.parse(row.hook).name == name}
        return rows.get(name) or next(iter(rows.values()), Row(name))

    def _noop_like(self, row: Row, default: Row) -> Row:
        """The no-op hook that is spared DDP's copy of all gradients if and only if `row` is."""
        noops = [default, *(one for one in self.rows if one.hook.startswith("noop:"))]
        return next((one for one in noops if _is_view(one) is _is_view(row)), default)


def _is_view(row: Row) -> bool:
    return bool(HookSpec.parse(row.hook).ddp.get("gradient_as_bucket_view"))


def _apply(
    function: Callable[[float, float], float], a: float | None, b: float | None
) -> float | None:
    return None if a is None or b is None else function(a, b)


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
    steady_rounds_ms = [[1e3 * steady_s for steady_s in one["steady_s"]] for one in each]
    reports = [one["report"] for one in each if one["report"]]
    return Row(
        hook=hook,
        step_ms=max(median(rounds) for rounds in rounds_ms),
        min_ms=min(min(rounds) for rounds in rounds_ms),
        max_ms=max(max(rounds) for rounds in rounds_ms),
        steady_ms=max((median(rounds) for rounds in steady_rounds_ms if rounds), default=None),
        tail_ms=max(1e3 * median(one["tail_s"]) for one in each),
        rss_mb=max(one["rss_mb"] for one in each),
        loss=each[0]["loss"],
        reported_exposed_ms=_reported(reports, "exposed_ms"),
        predicted_ms=_reported(reports, "predicted_ms"),
        ideal_ms=_reported(reports, "ideal_ms"),
        report=reports[0] if reports else None,
        rounds_ms=rounds_ms,
        steady_rounds_ms=steady_rounds_ms,
    )


def _reported(reports: list[dict[str, Any]], key: str) -> float | None:
    """The largest figure of that name in the ranks' reports; None where none has it."""
    found = [report[key] for report in reports if isinstance(report.get(key), int | float)]
    return max(found, default=None)


def _spread(row: Row) -> str:
    return "-" if row.min_ms is None else f"{row.min_ms:.1f}..{_text(row.max_ms)}"


# Heading and text of a row; a column in which no row has a figure is left out.
_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("step ms", lambda row: _text(row.step_ms)),
    ("min..max", _spread),
    ("steady ms", lambda row: _text(row.steady_ms)),
    ("tail ms", lambda row: _text(row.tail_ms)),
    ("x ddp", lambda row: _text(row.vs_ddp, 3)),
    ("exposed ms", lambda row: _text(row.exposed_ms)),
    ("of bound", lambda row: _text(row.of_bound, 3)),
    ("sent MB", lambda row: _text(row.sent_mb, 2)),  # on loopback: all that lo carried / ranks
    ("peak MB", lambda row: _text(row.peak_mb)),
    ("- ddp's", lambda row: _text(row.peak_vs_ddp_mb)),
    ("own exposed", lambda row: _text(row.reported_exposed_ms)),
    ("predicted ms", lambda row: _text(row.predicted_ms)),
    ("ideal ms", lambda row: _text(row.ideal_ms)),
    ("predicted / steady", lambda row: _text(row.predicted_vs_steady, 3)),
]


def print_case(console: Console, case: Case) -> None:
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
    columns = [(head, [text(row) for row in case.rows]) for head, text in _COLUMNS]
    columns = [(head, texts) for head, texts in columns if set(texts) != {"-"}]
    table.add_column("hook", no_wrap=True)
    for head, _ in columns:
        table.add_column(head, justify="right", overflow="fold")  # no figure is cut off
    table.add_column("status", no_wrap=True)
    for index, row in enumerate(case.rows):
        status = row.status.partition(":")[0][:STATUS_WIDTH]
        table.add_row(row.hook, *(texts[index] for _, texts in columns), status)
    console.print(table)
    for row in case.rows:
        if row.status != "ok":
            console.print(f"{row.hook}: {row.status}", markup=False, soft_wrap=True)


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
