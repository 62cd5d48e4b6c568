"""A measured link as tables, as JSON and as a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from commsched.linkprobe.collectives import NAMES
from commsched.linkprobe.run import Probed
from commsched.linkprobe.suggestions import Advice
from commsched.linkprobe.sweep import Point, Skip, Sweep
from commsched.version import __version__

__all__ = ["as_json", "draw", "skipped", "tables"]


def size_text(nbytes: int) -> str:
    """``64 KiB`` for 65536."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def tables(found: Sweep) -> Iterator[Table]:
    """One at a time; the lines; several at once."""
    yield _alone(found)
    yield _lines(found)
    if any(point.burst > 1 for point in found.points):
        yield _together(found)


def _table(title: str, heads: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    return table


def _alone(found: Sweep) -> Table:
    heads = (f"{name.replace('_', ' ')}\nus  GB/s" for name in NAMES)
    table = _table("One at a time (GB/s: 1e9 bytes that one rank sends)", ["buffer", *heads])
    for nbytes in sorted({point.nbytes for point in found.points if point.burst == 1}):
        points = {p.collective: p for p in found.points if (p.nbytes, p.burst) == (nbytes, 1)}
        table.add_row(size_text(nbytes), *(_cell(points.get(name)) for name in NAMES))
    return table


def _cell(point: Point | None) -> str:
    return "-" if point is None else f"{1e6 * point.seconds:.0f} {_speed(point.gb_s)}"


def _speed(gb_s: float) -> str:
    return f"{gb_s:5.3f}" if gb_s < 10 else f"{gb_s:5.1f}"


def _lines(found: Sweep) -> Table:
    table = _table(
        "Fitted: time = alpha + bytes sent / bandwidth",
        ("collective", "alpha us", "GB/s", "Gbit/s", "error: median", "largest", "points"),
    )
    for name in NAMES:
        if found.alone(name):
            line = found.line(name)
            speeds = f"{line.gb_s:.4g}", f"{8 * line.gb_s:.4g}"
            errors = f"{line.median_error:.1%}", f"{line.max_error:.1%}"
            table.add_row(name, f"{1e6 * line.alpha_s:.0f}", *speeds, *errors, str(line.points))
    return table


def _together(found: Sweep) -> Table:
    lanes = sorted({point.in_flight for point in found.points if point.burst > 1})
    table = _table("Several in flight: GB/s", ("collective", "buffer", *map(str, lanes)))
    cases = {(p.collective, p.nbytes) for p in found.points if p.burst > 1}
    for name, nbytes in sorted(cases, key=lambda case: (NAMES.index(case[0]), case[1])):
        speeds = {p.in_flight: _speed(p.gb_s) for p in found.together(name, nbytes)}
        table.add_row(name, size_text(nbytes), *(speeds.get(most, "-") for most in lanes))
    return table


def skipped(found: Sweep) -> list[str]:
    """What was not measured and why, in a few lines."""
    groups: dict[tuple[str, bool], list[Skip]] = defaultdict(list)
    for skip in found.skipped:
        groups[skip.why, skip.burst > 1].append(skip)
    lines = []
    for (why, together), skips in groups.items():
        sizes: dict[str, set[int]] = defaultdict(set)
        for skip in skips:
            sizes[skip.collective].add(skip.nbytes)
        said = ", ".join(f"{n} {'/'.join(map(size_text, sorted(s)))}" for n, s in sizes.items())
        how = "several in flight" if together else "one at a time"
        lines.append(f"Skipped, {how} ({why}; --seconds allows more): {said}")
    return lines


def as_json(probed: Probed, advice: Advice) -> dict[str, Any]:
    """Everything as JSON values. Infinite bandwidth is null."""
    found = probed.found
    lines = {name: found.line(name) for name in NAMES if found.alone(name)}
    return {
        "version": __version__,
        "torch": torch.__version__,
        "world_size": probed.world_size,
        "backend": probed.backend,
        "seconds": probed.seconds,
        "points": [{**asdict(point), "gb_s": point.gb_s} for point in found.points],
        "skipped": [asdict(skip) for skip in found.skipped],
        "lines": {
            name: {**asdict(line), "gb_s": line.gb_s if line.beta_s else None}
            for name, line in lines.items()
        },
        "short_probe": None if probed.short is None else asdict(probed.short),
        "suggestions": {**asdict(advice), "environment": list(advice.environment())},
    }


def draw(found: Sweep, path: Path, title: str) -> None:
    """Measured points and fitted lines, log-log; the format is that of the file's name.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
        ValueError: no such format.
    """
    from matplotlib.figure import Figure  # no window system, no global state

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for name in NAMES:
        points = found.alone(name)
        if not points:
            continue
        line = found.line(name)
        sent = [point.sent_bytes for point in points]
        (dots,) = axes.plot(sent, [1e6 * point.seconds for point in points], "o", markersize=4)
        low, high = math.log10(min(sent)), math.log10(max(sent))
        xs = [10 ** (low + (high - low) * at / 60) for at in range(61)]
        fitted = [1e6 * (line.alpha_s + x * line.beta_s) for x in xs]
        label = f"{name}: {1e6 * line.alpha_s:.0f} us, {line.gb_s:.3g} GB/s"
        axes.plot(xs, fitted, color=dots.get_color(), linewidth=1.2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes a rank sends", ylabel="us", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
