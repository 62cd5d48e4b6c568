"""How scenarios look: a table in the terminal, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from commsched.profiles import Loaded
from commsched.whatif.scenarios import DDP, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw", "print_rows"]

PANEL_INCHES = (6.0, 4.0)
LEAST = 0.0005  # of a step: less is shown as 0.0 %
Place = tuple[int, float | None]  # ranks, Gbit/s


def print_rows(loaded: Loaded, rows: Sequence[Row], remarks: Iterable[str]) -> None:
    """Print the table of one profile's rows, and what is fastest at each place."""
    console = Console()
    if not console.is_terminal:  # piped: a table must not be folded
        console = Console(width=200)
    varying, constant = _columns(rows)
    lines = [f"{loaded.name}: {loaded.source}", ", ".join(constant)]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(rows, varying))
    for line in [*_verdicts(rows), *remarks]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "ranks": lambda row: str(row.ranks),
    "Gbit/s": lambda row: _rate(row.gbps),
    "algorithm": lambda row: row.algorithm,
    "bucket MB": lambda row: (
        "as in the profile" if row.bucket_cap_mb is None else f"{row.bucket_cap_mb:g}"
    ),
}


def _columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The columns that tell rows apart, and what is the same for all, in words."""
    varying, constant = [], []
    for name, text in COLUMNS.items():
        values = dict.fromkeys(map(text, rows))
        if len(values) > 1:
            varying.append(name)
        else:
            constant += [f"{name} {value}" for value in values]
    for row in rows[:1]:
        constant += [f"{row.hop_us:.3g} us a hop", f"computing {row.compute_ms:.1f} ms a step"]
    return varying, constant


def _table(rows: Sequence[Row], varying: Sequence[str]) -> Table:
    table = Table()
    for name in varying:
        table.add_column(name, justify="right")
    table.add_column("candidate")
    for name in ("step ms", "exposed ms", "x DDP", "ideal ms"):
        table.add_column(name, justify="right")
    before = None
    for row in rows:
        if before not in (None, _place(row)):
            table.add_section()
        before = _place(row)
        times = (row.step_ms, row.exposed_ms)
        table.add_row(
            *(COLUMNS[name](row) for name in varying),
            row.candidate,
            *(f"{ms:.1f}" for ms in times),
            f"{row.vs_ddp:.3f}",
            f"{row.ideal_ms:.1f}",
        )
    return table


def _place(row: Row) -> Place:
    return row.ranks, row.gbps


def _rate(gbps: float | None) -> str:
    return "free" if gbps is None else f"{gbps:.4g}"


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    for place in dict.fromkeys(map(_place, rows)):
        here = [row for row in rows if _place(row) == place]
        best = min(here, key=lambda row: row.step_ms)
        lost_ms = here[0].step_ms - here[0].compute_ms
        yield (
            f"{place[0]} ranks, {_rate(place[1])} Gbit/s: plain DDP loses {lost_ms:.1f} ms of "
            f"{here[0].step_ms:.1f} to communication; {_fastest(best)}"
        )


def _fastest(best: Row) -> str:
    if best.vs_ddp > 1.0 - LEAST:
        return "nothing here is faster"
    cap = "" if best.bucket_cap_mb is None else f" with bucket_cap_mb={best.bucket_cap_mb:g}"
    return f"fastest: {best.candidate}{cap}, {best.step_ms:.1f} ms ({best.vs_ddp - 1:+.1%})"


def draw(path: Path, loaded: Loaded, rows: Sequence[Row]) -> None:
    """Draw the step time: against ranks, one panel a rate; or against rates where ranks are one.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file's ending names no format.
    """
    import matplotlib.figure

    counts = list(dict.fromkeys(row.ranks for row in rows))
    rates = list(dict.fromkeys(row.gbps for row in rows))
    by_ranks = len(counts) > 1
    panels = rates if by_ranks else [None]
    size = PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, rate in zip(axes, panels, strict=True):
        here = [row for row in rows if not by_ranks or row.gbps == rate]
        _lines(ax, here, by_ranks)
        ax.set_title(
            f"{loaded.name}, " + (f"{_rate(rate)} Gbit/s" if by_ranks else f"{counts[0]} ranks")
        )
    axes[0].set_ylabel("step, ms")
    axes[-1].legend(fontsize="small")
    figure.savefig(path)


def _lines(ax: Axes, rows: Sequence[Row], by_ranks: bool) -> None:
    """One line a candidate, the base line thick; what computing alone takes is dashed."""
    for name in dict.fromkeys(map(_label, rows)):
        points = [row for row in rows if _label(row) == name]
        xs = [float(row.ranks) if by_ranks else row.gbps or 0.0 for row in points]
        width = 3.0 if name == DDP else 1.5
        ax.plot(xs, [row.step_ms for row in points], marker="o", linewidth=width, label=name)
    bound_ms = min((row.compute_ms for row in rows), default=0.0)
    ax.axhline(bound_ms, color="black", linestyle="--", linewidth=1, label="computing alone")
    places = sorted({row.ranks if by_ranks else row.gbps or 0.0 for row in rows})
    if places and min(places) > 0:
        ax.set_xscale("log")
    ax.set_xticks(places, [f"{place:g}" for place in places])
    ax.minorticks_off()
    ax.set_xlabel("ranks" if by_ranks else "Gbit/s")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)


def _label(row: Row) -> str:
    return (
        row.candidate if row.bucket_cap_mb is None else f"{row.candidate}, {row.bucket_cap_mb:g} MB"
    )
