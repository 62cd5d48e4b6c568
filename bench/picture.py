"""The README's picture: compute and exposed communication by hook, from a step-time result.

python bench/picture.py bench/results/step_time_1000mbit.json docs/step_time.svg
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

HOOKS = {
    "ddp": "plain DDP",
    "commsched": "commsched",
    "fp16": "torch's fp16 hook",
    "commsched:codec=bf16": "commsched, bf16",
}
TITLES = {"resnet50": "ResNet-50 profile", "gpt": "GPT, 22 M parameters"}


def _draw(axes: Axes, case: dict[str, Any]) -> None:
    rows = {row["hook"]: row for row in case["rows"] if row["hook"] in HOOKS}
    hooks = [hook for hook in HOOKS if hook in rows][::-1]
    labels = [HOOKS[hook] for hook in hooks]
    exposed_ms = [rows[hook]["exposed_ms"] for hook in hooks]
    compute_ms = case["compute_ms"]
    axes.barh(labels, [compute_ms] * len(hooks), color="#4477aa", label="compute")
    axes.barh(labels, exposed_ms, left=compute_ms, color="#ee6677", label="exposed communication")
    for index, hook in enumerate(hooks):
        axes.text(rows[hook]["step_ms"], index, f" {rows[hook]['step_ms']:.0f}", va="center")
    axes.axvline(case["bound_ms"], color="#555555", linestyle=":", label="bound for exact training")
    rate = "loopback" if case["rate_mbit"] is None else f"{case['rate_mbit'] / 1000:g} Gbit/s"
    axes.set_title(f"{TITLES.get(case['workload'], case['workload'])}, {rate}", fontsize=10)
    axes.set_xlabel("step, ms")
    axes.margins(x=0.18)


def main() -> None:
    """Draw every case of a result file side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    cases = json.loads(options.result.read_text())["cases"]
    # A fixed salt, and no date: the same result gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "commsched"
    figure, all_axes = plt.subplots(1, len(cases), figsize=(5 * len(cases), 2.6), squeeze=False)
    for axes, case in zip(all_axes[0], cases, strict=True):
        _draw(axes, case)
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    options.picture.parent.mkdir(exist_ok=True)
    figure.savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
