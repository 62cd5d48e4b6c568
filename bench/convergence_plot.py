"""The picture of `bench/convergence.py`'s results: held-out loss against steps and seconds.

python bench/convergence_plot.py bench/results/convergence.json docs/convergence.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["draw"]

TITLES = {"digits": "CNN, digits", "gpt": "character GPT"}
AXES = (("steps", "steps"), ("seconds", "seconds"))
TASK_INCHES = (10.0, 3.6)
LEGEND_INCHES = 0.9
LEGEND_COLUMNS = 6
DRAWN_ABOVE = 0.03  # of the range of exact training's losses, in the picture above them all
# Curves lie close together: families in one colour, their members in different dashes.
FAMILIES: dict[str, tuple[str, str]] = {
    "ddp": ("black", "-"),
    "none": ("#888888", "--"),
    "fp16": ("#888888", "-."),
    "bf16": ("#888888", ":"),
    "int8": ("#4477aa", "-"),
    "int4": ("#4477aa", ":"),
    "fp8": ("#66ccee", "-"),
    "dynamic8": ("#66ccee", "--"),
    "qsgd": ("#aa3377", "-"),
    "ternary": ("#aa3377", ":"),
    "sign": ("#ee6677", "-"),
    "topk": ("#228833", "-"),
    "randomk": ("#228833", ":"),
    "vote": ("#228833", "--"),
    "dgc": ("#228833", "-."),
    "powersgd": ("#ccbb44", "-"),
    "acpsgd": ("#ccbb44", "--"),
}
HIDDEN = ("ddp:nudged",)  # lies on ddp


def _style(how: str) -> dict[str, Any]:
    colour, dash = FAMILIES.get(how.partition(":")[0], ("#000000", "-"))
    if how == "ddp:sgd":
        dash = "-."
    return {"color": colour, "linestyle": dash, "linewidth": 2.2 if how == "ddp" else 1.2}


def _draw(axes: Axes, rows: list[dict[str, Any]], key: str, label: str) -> None:
    for row in rows:
        if row["how"] not in HIDDEN:
            losses = [float("nan") if loss is None else loss for loss in row["held_out_curve"]]
            axes.plot(row[key], losses, label=row["how"], **_style(row["how"]))
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    _limit(axes, rows)


def _limit(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """From below the best final loss to the first points' of exact training: no waste on others."""
    exact = next((row for row in rows if row["how"] == "ddp"), rows[0])["held_out_curve"]
    known = [loss for loss in exact if loss is not None]
    finals = [row["held_out"] for row in rows if row["held_out"] is not None]
    if known and finals and max(known) > 0:
        low, high = min(*finals, *known), max(*known)
        margin = (high / low) ** DRAWN_ABOVE
        axes.set_ylim(low / margin, high * margin)


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a result file's contents to an SVG file: a line of panels a task."""
    tasks = list(dict.fromkeys(row["task"] for row in document["rows"]))
    # A fixed salt, and no date: the same result gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "commsched"
    size = (TASK_INCHES[0], TASK_INCHES[1] * len(tasks) + LEGEND_INCHES)
    figure, grid = plt.subplots(len(tasks), len(AXES), figsize=size, squeeze=False)
    handles: dict[str, Any] = {}
    for line, task in zip(grid, tasks, strict=True):
        rows = [row for row in document["rows"] if row["task"] == task]
        for axes, (key, label) in zip(line, AXES, strict=True):
            _draw(axes, rows, key, label)
            axes.set_title(TITLES.get(task, task), fontsize=10)
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="lower center",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, LEGEND_INCHES / size[1], 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
