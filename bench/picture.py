"""The README's picture: compute and exposed communication by hook, from step-time results.

python bench/picture.py bench/results/step_time_1000mbit.json docs/step_time.svg
"""

from __future__ import annotations

import argparse
import json
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

NAMES = {
    "noop": "nothing sent",
    "ddp": "plain DDP",
    "fp16": "torch's fp16 hook",
    "commsched": "commsched",
}
TITLES = {
    "resnet50": "ResNet-50 profile",
    "vgg16": "VGG-16 profile",
    "gpt2": "GPT-2 profile",
    "gpt": "GPT, 22 M parameters",
}
COLUMNS = 2  # cases side by side
CASE_INCHES = (5.0, 2.6)
LEGEND_INCHES = 0.24


def _label(hook: str) -> str | None:
    """`commsched with optimizer` for `commsched:optimizer=true,bucket_cap_mb=8`; None: left out."""
    name, _, rest = hook.partition(":")
    if name not in NAMES:
        return None
    settings = dict(item.split("=", 1) for item in rest.split(",") if item)
    is_deferred = settings.get("optimizer", "").lower() == "true"
    codec = f", {settings['codec']}" if "codec" in settings else ""
    return NAMES[name] + (" with optimizer" if is_deferred else "") + codec


def _rows(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is drawn, by label, top down: of rows with the same label the first."""
    rows: dict[str, dict[str, Any]] = {}
    for row in case["rows"]:
        label = _label(row["hook"])
        if label and row["exposed_ms"] is not None:
            rows.setdefault(label, row)
    return rows


def _title(case: dict[str, Any]) -> str:
    rate = case["link"] if case["rate_mbit"] is None else f"{case['rate_mbit'] / 1000:g} Gbit/s"
    ranks = "" if case["ranks"] == 2 else f", {case['ranks']} ranks"
    return f"{TITLES.get(case['workload'], case['workload'])}, {rate}{ranks}"


def _draw(axes: Axes, case: dict[str, Any]) -> None:
    rows = _rows(case)
    exposed_ms = [max(0.0, row["exposed_ms"]) for row in rows.values()]
    step_ms = [row["step_ms"] for row in rows.values()]
    compute_ms = [step - exposed for step, exposed in zip(step_ms, exposed_ms, strict=True)]
    axes.barh([*rows], compute_ms, color="#4477aa", label="compute")
    axes.barh([*rows], exposed_ms, left=compute_ms, color="#ee6677", label="exposed communication")
    for index, step in enumerate(step_ms):
        axes.text(step, index, f" {step:.0f}", va="center")
    axes.axvline(case["bound_ms"], color="#555555", linestyle=":", label="bound for exact training")
    axes.invert_yaxis()
    axes.set_title(_title(case), fontsize=10)
    axes.set_xlabel("step, ms")
    axes.margins(x=0.18)


def main() -> None:
    """Draw every case of the result files, two to a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    cases = [case for path in options.results for case in json.loads(path.read_text())["cases"]]
    cases = [case for case in cases if case["bound_ms"] is not None]  # else it has failed
    # A fixed salt, and no date: the same result gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "commsched"
    columns, lines = min(COLUMNS, len(cases)), ceil(len(cases) / COLUMNS)
    size = (CASE_INCHES[0] * columns, CASE_INCHES[1] * lines)
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axes, case in zip(grid.flat, cases, strict=False):
        _draw(axes, case)
    for axes in grid.flat[len(cases) :]:
        axes.axis("off")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, LEGEND_INCHES / size[1], 1, 1))
    options.picture.parent.mkdir(exist_ok=True)
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
