"""The report on a terminal: `commsched.reporting.analysis` as rich tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commsched.layout import first_names
from commsched.reporting.analysis import Analysis
from commsched.reporting.costs import TensorFigures
from commsched.reporting.findings import causes, headline, ms, offers
from commsched.reporting.remedies import Outlook

__all__ = ["show"]

LAYERS = 10  # rows; the page and the JSON have all
BUCKETS = 24
HURT_MOST = 3
SEEN_MS = 0.05  # less is shown as 0.0


def show(analysis: Analysis, foreseen: Outlook | str) -> None:
    """Print all that a terminal has room for."""
    console = Console(highlight=False)
    if not console.is_terminal:  # piped: scripts read it, nothing may be folded
        console = Console(highlight=False, width=200)

    def say(text: str) -> None:  # a line is a line: scripts read it
        console.print(text, soft_wrap=True)

    say(f"[bold]{escape(headline(analysis))}[/bold]\n")
    for line in about(analysis):
        say(escape(line))
    console.print(_ranks(analysis))
    console.print(_buckets(analysis))
    if analysis.layers:
        console.print(_layers(analysis))
    console.print("[bold]What hurts most[/bold]")
    for row in analysis.tensors[:HURT_MOST]:
        say(f"  {escape(_tensor(row))}")
    console.print("[bold]Why[/bold]")
    for line in causes(analysis):
        say(f"  - {escape(line)}")
    console.print("[bold]What to do[/bold]")
    for line in offers(analysis, foreseen):
        say(f"  - {escape(line)}")


def about(analysis: Analysis) -> Iterator[str]:
    """What the figures are from, and how far they go."""
    ranks = len(analysis.ranks)
    of = "" if ranks == analysis.world_size else f" of {analysis.world_size}"
    yield (
        f"{analysis.steps} {'step' if analysis.steps == 1 else 'steps'} of {ranks}{of} "
        f"{'rank' if ranks == 1 else 'ranks'}"
        + (f", {analysis.choice}" if analysis.choice else "")
        + f": mean {ms(analysis.step_ms)} ms, median {ms(analysis.median_ms)}, "
        f"longest {ms(analysis.max_ms)}; exposed: mean {ms(analysis.exposed_ms)} ms, median "
        f"{ms(analysis.exposed_median_ms)}"
    )
    if analysis.unsettled:
        yield (
            f"{analysis.unsettled} of these steps measured or tried how to communicate: training "
            "had hardly settled, so trace more or later steps (COMMSCHED_TRACE_STEPS)"
        )
    for line in analysis.left_out:
        yield f"left out: {line}"
    overlap = "-" if analysis.overlap is None else f"{analysis.overlap:.0%}"
    yield f"overlap {overlap}, link busy {analysis.busy:.0%} of the step"


def _tensor(row: TensorFigures) -> str:
    size = f" ({row.nbytes / 1e6:.1f} MB)" if row.nbytes else ""
    return f"{row.name}{size}: {ms(row.exposed_ms)} ms a step"


def _numbers(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _ranks(analysis: Analysis) -> Table:
    table = _numbers(
        "Ranks (ms a step)",
        *("rank", "step", "exposed", "compute", "overlap", "link busy", "coding", "MB sent"),
        *("backward", "forward", "late by", "came last"),
    )
    for row in analysis.ranks:
        table.add_row(
            str(row.rank),
            *(ms(value) for value in (row.step_ms, row.exposed_ms, row.compute_ms)),
            "-" if row.overlap is None else f"{row.overlap:.0%}",
            f"{row.busy:.0%}",
            ms(row.engine_ms),
            f"{row.sent_mb:.1f}",
            *(ms(value) for value in (row.backward_ms, row.forward_ms, row.late_ms)),
            f"{row.last_share:.0%}",
        )
    return table


def _buckets(analysis: Analysis) -> Table:
    table = _numbers("Buckets (ms after the first)", "bucket", "MB", "ready", "done", "exposed")
    table.add_column("first parameters")
    for row in analysis.buckets[:BUCKETS]:
        table.add_row(
            str(row.index),
            f"{row.nbytes / 1e6:.2f}",
            *(ms(value) for value in (row.ready_ms, row.done_ms, row.exposed_ms)),
            escape(first_names(row.params, 2)),
        )
    if len(analysis.buckets) > BUCKETS:
        table.caption = f"and {len(analysis.buckets) - BUCKETS} more (--json, --html)"
    return table


def _layers(analysis: Analysis) -> Table:
    shown = [row for row in analysis.layers[:LAYERS] if row.exposed_ms >= SEEN_MS]
    table = Table(title="Layers (ms a step)")
    table.title_justify = "left"
    table.add_column("layer")
    for column in ("MB", "exposed"):
        table.add_column(column, justify="right")
    for row in shown:
        table.add_row(escape(row.name), f"{row.nbytes / 1e6:.2f}", ms(row.exposed_ms))
    return table
