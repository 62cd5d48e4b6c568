"""The pictures of docs/concepts.md: one training step as a timeline, and step time by link rate.

    python bench/doc_pictures.py docs                  # simulated, on a profile that was measured
    python bench/doc_pictures.py docs --trace traces   # one step of a real run, of rank 0

The profile is bench/results/profile_resnet50_1gbit.json: the ResNet-50 workload of this bench on
two ranks at 1 Gbit/s, with bucket_cap_mb=4, as commsched measured it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from commsched import policies
from commsched.advice import rebucketed
from commsched.plan import Plan
from commsched.profile import Profile
from commsched.settings import MB, Settings
from commsched.simulate import Timeline, ddp, ideal, simulate

PROFILE = Path(__file__).parent / "results" / "profile_resnet50_1gbit.json"
DDP_CAP_MB = 25  # DDP's default
COLORS = {
    "backward": "#4477aa",
    "forward": "#66ccee",
    "optimizer and the rest": "#bbbbbb",
    "exposed communication": "#ee6677",
}
WIRE = matplotlib.colormaps["YlGn"]  # pale: what the next forward reads first
RATES_GBPS = (0.25, 0.5, 1, 2, 4, 8)
GIGABIT_BYTES_S = 1e9 / 8
SHORT_S = 4e-4
ROW_INCHES, LEGEND_INCHES = 0.3, 0.5


@dataclass(frozen=True)
class Bar:
    """One stretch of time on a row; `kind` is a key of `COLORS`, or None for one with `shade`."""

    row: str
    begin_s: float
    end_s: float
    kind: str | None = None
    shade: float = 0.0


# ---- simulated ------------------------------------------------------------------------------


def _simulated(plan: Plan | None, profile: Profile, deferred: bool) -> list[Bar]:
    """One step; plain DDP where there is no plan."""
    timeline = ddp(profile) if plan is None else simulate(plan, profile, deferred)
    tasks = _done_by_param(plan, profile, timeline) if plan is not None and deferred else {}
    training = list(_in_forward(profile, tasks) if deferred else _after_backward(profile, timeline))
    waited_s = sum(b.end_s - b.begin_s for b in training if b.kind == "exposed communication")
    assert abs(waited_s - timeline.exposed_s) < 1e-6, "this is not what the simulator says"
    return [*training, *_on_the_wire(plan, profile, timeline)]


def _done_by_param(plan: Plan, profile: Profile, timeline: Timeline) -> Mapping[str, float]:
    done_s: dict[str, float] = {}
    for task, times in zip(plan.tasks, timeline.tasks, strict=True):
        for span in profile.layout.spans(task.chunk):
            done_s[span.param] = max(done_s.get(span.param, 0.0), times.end_s)
    return done_s


def _after_backward(profile: Profile, timeline: Timeline) -> Iterator[Bar]:
    yield Bar("training", 0.0, profile.backward_s, "backward")
    now_s = profile.backward_s + timeline.exposed_s
    yield Bar("training", profile.backward_s, now_s, "exposed communication")
    rest_s = now_s + profile.optimizer_s + profile.other_s
    yield Bar("training", now_s, rest_s, "optimizer and the rest")
    yield Bar("training", rest_s, rest_s + profile.forward_s, "forward")


def _in_forward(profile: Profile, done_s: Mapping[str, float]) -> Iterator[Bar]:
    """Forward stops where it reads a parameter whose sum has not come."""
    yield Bar("training", 0.0, profile.backward_s, "backward")
    now_s = profile.backward_s + profile.other_s
    yield Bar("training", profile.backward_s, now_s, "optimizer and the rest")
    used_s = 0.0
    for param in sorted(profile.params, key=lambda param: param.use_s):
        use_s = min(param.use_s, profile.forward_s)
        yield Bar("training", now_s, now_s + use_s - used_s, "forward")
        now_s, used_s = now_s + use_s - used_s, use_s
        until_s = max(now_s, done_s.get(param.name, 0.0))
        yield Bar("training", now_s, until_s, "exposed communication")
        now_s = until_s + param.optimizer_s
        yield Bar("training", until_s, now_s, "optimizer and the rest")
    yield Bar("training", now_s, now_s + profile.forward_s - used_s, "forward")


def _on_the_wire(plan: Plan | None, profile: Profile, timeline: Timeline) -> Iterator[Bar]:
    """A task's shade tells when the next forward first reads what it carries."""
    use_s = {param.name: param.use_s for param in profile.params}
    buckets = [[param.name for param in spec.params] for spec in profile.layout.buckets]
    if plan is None:  # as `ddp` plans: one task a bucket
        carried: Iterable[Iterable[str]] = buckets
    else:
        spans = plan.layout.spans
        carried = [[span.param for span in spans(task.chunk)] for task in plan.tasks]
    for times, names in zip(timeline.tasks, carried, strict=True):
        shade = min(use_s[name] for name in names) / max(profile.forward_s, 1e-9)
        yield Bar("wire", times.begin_s, times.end_s, None, min(1.0, shade))


def _panels(profile: Profile) -> Iterator[tuple[str, list[Bar]]]:
    default = rebucketed(profile, DDP_CAP_MB * MB)
    settings = Settings()
    yield "plain DDP, default buckets", _simulated(None, default, False)
    for policy, deferred in (("fifo", False), ("priority", True), ("rs_ag", True)):
        plan = policies.get(policy)(profile, settings)
        words = ", steps deferred" if deferred else ", no optimizer handed over"
        yield policy + words, _simulated(plan, profile, deferred)


# ---- from a trace ---------------------------------------------------------------------------


def _traced(folder: Path, step: int | None) -> tuple[str, list[Bar]]:
    """One step of rank 0, the middle one unless told: from one backward's first bucket on."""
    from commsched.tracing.file import read_all

    (trace,) = (one for one in read_all([str(folder)]) if one.rank == 0)
    steps = [span for span in trace.spans if span.name == "step"]
    chosen = steps[len(steps) // 2]
    if step is not None:
        (chosen,) = (span for span in steps if span.args["step"] == step)
    spans = [s for s in trace.spans if s.end_s > chosen.begin_s and s.begin_s < chosen.end_s]
    buckets = max((max(span.args["bucket"]) for span in spans if span.name == "comm"), default=0)
    bars = [bar for span in spans for bar in _bars_of(span, chosen, 1 / max(1, buckets))]
    return f"rank 0, step {chosen.args['step']}: {chosen.args.get('choice', '')}", bars


def _bars_of(span: Any, step: Any, shade: float) -> Iterator[Bar]:
    """What of a span is in the step. The last buckets hold what forward reads first."""
    kinds = {"wait": "exposed communication", "deferred step": "optimizer and the rest"}
    kind = kinds.get(span.name, span.name)
    begin_s = max(span.begin_s, step.begin_s) - step.begin_s
    end_s = min(span.end_s, step.end_s) - step.begin_s
    if span.row == "training" and kind in COLORS:
        yield Bar("training", begin_s, end_s, kind)
    elif span.name == "comm":
        yield Bar(span.row, begin_s, end_s, None, 1 - shade * max(span.args["bucket"]))


# ---- drawing --------------------------------------------------------------------------------


def _draw(axes: Axes, title: str, bars: Sequence[Bar]) -> None:
    rows = ["training", *sorted({bar.row for bar in bars} - {"training"})]
    below = sorted(bars, key=lambda bar: bar.kind != "forward")  # waits and steps are within it
    for bar in _visible(below):
        color = WIRE(0.15 + 0.8 * bar.shade) if bar.kind is None else COLORS[bar.kind]
        place, width_ms = rows.index(bar.row), 1e3 * (bar.end_s - bar.begin_s)
        edge = {"edgecolor": "white", "linewidth": 0.4} if bar.kind is None else {}
        axes.barh(place, width_ms, left=1e3 * bar.begin_s, height=0.7, color=color, **edge)
    end_ms = 1e3 * max(bar.end_s for bar in bars if bar.row == "training")
    axes.axvline(end_ms, color="#555555", linestyle=":")
    axes.text(end_ms, -0.55, f" {end_ms:.0f} ms", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left")


def _visible(bars: Iterable[Bar]) -> list[Bar]:
    """Without what is too short to be seen; neighbours of a kind as one."""
    found: list[Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        same = (
            last is not None
            and bar.kind is not None
            and (last.row, last.kind) == (bar.row, bar.kind)
        )
        if last is not None and same and abs(bar.begin_s - last.end_s) < SHORT_S:
            found[-1] = replace(last, end_s=bar.end_s)
        elif bar.end_s - bar.begin_s > SHORT_S:
            found.append(bar)
    return found


def _timelines(panels: Sequence[tuple[str, list[Bar]]], picture: Path) -> None:
    heights = [0.75 + ROW_INCHES * len({bar.row for bar in bars}) for _, bars in panels]
    size = 8.0, sum(heights) + LEGEND_INCHES
    figure, grid = plt.subplots(
        len(panels), 1, figsize=size, sharex=True, squeeze=False, height_ratios=heights
    )
    for axes, (title, bars) in zip(grid.flat, panels, strict=True):
        _draw(axes, title, bars)
    grid.flat[-1].set_xlabel("ms since the backward pass began")
    grid.flat[-1].margins(x=0.1)
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    handles.append(Patch(color=WIRE(0.3), label="on the wire, needed early"))
    handles.append(Patch(color=WIRE(0.95), label="needed late"))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8)
    _save(figure, picture, LEGEND_INCHES / size[1])


def _rates(profile: Profile, picture: Path) -> None:
    """Step time by link rate: the measured profile, with another bandwidth."""
    default = rebucketed(profile, DDP_CAP_MB * MB)
    plan_of, settings = policies.get("priority"), Settings()
    ours: dict[str, list[float]] = {"plain DDP": [], "priority, steps deferred": [], "bound": []}
    for rate in RATES_GBPS:
        link = replace(profile.link, beta_s=1 / (rate * GIGABIT_BYTES_S))
        here = replace(profile, link=link)
        deferred_s = simulate(plan_of(here, settings), here).step_s
        step_s = (ddp(replace(default, link=link)).step_s, deferred_s, ideal(here))
        for row, seconds in zip(ours.values(), step_s, strict=True):
            row.append(1e3 * seconds)
    figure, axes = plt.subplots(figsize=(6, 3.6))
    styles = (
        {"color": "#ee6677"},
        {"color": "#88cc99", "linewidth": 4},
        {"color": "#555555", "linestyle": ":"},
    )
    for (name, row), style in zip(ours.items(), styles, strict=True):
        axes.plot(RATES_GBPS, row, label=name, **style)
    axes.axhline(1e3 * profile.compute_s, color="#4477aa", linestyle="--", label="computing alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(RATES_GBPS, [f"{rate:g}" for rate in RATES_GBPS])
    ticks_ms = (700, 1000, 2000, 4000)
    axes.set_yticks(ticks_ms, [str(tick) for tick in ticks_ms])
    axes.minorticks_off()
    axes.set_xlabel("link rate, Gbit/s")
    axes.set_ylabel("step, ms")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, picture, 0.0)


def _save(figure: Any, picture: Path, legend_share: float) -> None:
    # A fixed salt, and no date: the same input gives the same file.
    matplotlib.rcParams["svg.hashsalt"] = "commsched"
    figure.tight_layout(rect=(0, legend_share, 1, 1))
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--trace", type=Path, help="draw a step of this run as trace_step.svg")
    parser.add_argument("--step", type=int, help="which one; the middle one unless told")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.trace is not None:
        title, bars = _traced(options.trace, options.step)
        _timelines([(title, bars)], options.folder / "trace_step.svg")
        return
    profile = Profile.from_json(options.profile.read_text())
    _timelines(list(_panels(profile)), options.folder / "timelines.svg")
    _rates(profile, options.folder / "rates.svg")


if __name__ == "__main__":
    main()
