"""The tables of docs/reproduction.md: published speed-ups beside what the simulator says.

    python bench/reproduction.py --table dear      prints one table
    python bench/reproduction.py --write           puts all of them into the page
    python bench/reproduction.py --check           exit 1 where the page is stale

Each way of communicating is simulated with one collective at a time, as on one NCCL stream; each
all-reduce by ring or tree, whichever gives the shorter step; halves of all-reduces by ring.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.make_profiles import Layer, built
from bench.workloads.shapes import ARCHITECTURES
from commsched import profiles
from commsched.advice import rebucketed
from commsched.profile import Link, Profile
from commsched.settings import MB, Settings
from commsched.simulate import ddp, ideal
from commsched.tuning.candidates import Candidate, predict
from commsched.whatif.alpha_beta import at_ranks, hops
from commsched.whatif.scenarios import base_line, choices, recomputed, serial

__all__ = ["PAGE", "TABLES", "main", "page_with", "table"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproduction.md"

# A hop's latency: what MG-WFBP's authors fitted for one all-reduce among 16 workers, over its hops
# (github.com/HKBU-HPML/MG-WFBP, distributed_optimizer.py), 10GbE and 56 Gbit/s InfiniBand.
ETHERNET_S = 908.1e-6 / hops(16)
RDMA_S = 235.8e-6 / hops(16)

# ResNet-50, fp32, images/s: lambdalabs.com/blog/2080-ti-deep-learning-benchmarks (2080 Ti, V100)
# and tensorflow.org/performance/benchmarks (P100, batch 64). Batch 64 for all.
RTX2080TI, V100, P100 = 294.0, 405.0, 219.0
STEPS_S = {  # one GPU's step; where no figure exists, scaled as ResNet-50's are
    ("resnet50", "2080 Ti"): 64 / RTX2080TI,
    ("resnet50", "V100"): 64 / V100,
    ("resnet50", "P100"): 64 / P100,
    ("vgg16", "P100"): 64 / 154,
    ("vgg16", "V100"): 64 / 154 * P100 / V100,
    ("bert_base", "V100"): 64 / 147.71,
    ("bert_base", "2080 Ti"): 64 / 147.71 * V100 / RTX2080TI,
    ("gpt2", "A100"): 0.562 / 5,
}
RATES = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
WHOLE_MB = 1024.0
FUSED_MB = 25  # DeAR's default
PARTITION_MB = 32  # ByteScheduler's advice for all-reduce: 8 M parameters


class Cluster(NamedTuple):
    """A model on a cluster: for all-reduces by ring, by tree, and for halves of them by ring."""

    ring: Profile
    tree: Profile
    halves: Profile


@cache
def cluster(model: str, gpu: str, ranks: int, gbps: float, hop_s: float) -> Cluster:
    """A model on so many GPUs, each with a link of that rate."""
    profile = recomputed(profiles.load(model).profile, STEPS_S[model, gpu])
    return Cluster(
        at_ranks(profile, ranks, gbps, hop_s),
        at_ranks(profile, ranks, gbps, hop_s, "tree"),
        at_ranks(profile, ranks, gbps, hop_s / 2),  # n - 1 hops instead of 2 (n - 1)
    )


def ddp_s(found: Cluster) -> float:
    """Plain DDP with its default buckets."""
    return min(_step_s(base_line(), profile) for profile in (found.ring, found.tree))


def wfbp_s(found: Cluster) -> float:
    """Wait-free backpropagation: one all-reduce a tensor, nothing fused."""
    return min(_step_s(base_line(), _capped(profile, 0)) for profile in (found.ring, found.tree))


def unoverlapped_s(found: Cluster) -> float:
    """All gradients in one all-reduce after backward."""
    layouts = (_capped(profile, WHOLE_MB) for profile in (found.ring, found.tree))
    return min(_step_s(base_line(), layout) for layout in layouts)


def bytescheduler_s(found: Cluster) -> float:
    """One all-reduce a tensor, large ones in partitions, ordered by priority."""
    settings = Settings(policy="priority", chunk_mb=PARTITION_MB, fusion_mb=0.0)
    candidate = Candidate("", settings, deferred=True)
    return min(_step_s(candidate, _capped(profile, 0)) for profile in (found.ring, found.tree))


def dear_s(found: Cluster) -> float:
    """Fused reduce-scatters in backward, all-gathers in forward."""
    settings = Settings(policy="rs_ag", chunk_mb=WHOLE_MB, fusion_mb=0.0)
    return _step_s(Candidate("", settings, deferred=True), _capped(found.halves, FUSED_MB))


def best_s(found: Cluster) -> float:
    """The best of our exact ways, over DDP's bucket sizes and chunk sizes."""
    steps_s = [ddp_s(found)]
    for chunk_mb in (0.0, 16.0):
        for candidate in choices(settings=Settings(chunk_mb=chunk_mb)):
            halved = candidate.settings.policy == "rs_ag"
            for profile in (found.halves,) if halved else (found.ring, found.tree):
                layouts = (profile, *(_capped(profile, cap_mb) for cap_mb in (4, 8, 25)))
                steps_s += [_step_s(candidate, layout) for layout in layouts]
    return min(steps_s)


def bound_s(found: Cluster) -> float:
    """What no exact schedule can beat."""
    return ideal(_capped(found.ring, 0))


def _step_s(candidate: Candidate, profile: Profile) -> float:
    # Without what deferring costs our own Python: others are simulated, too.
    return predict(serial(candidate), profile).exposed_s + profile.compute_s


@cache
def _capped(profile: Profile, cap_mb: float) -> Profile:
    """Other buckets, without the hooks' own time, which a GPU hides."""
    found = rebucketed(profile, max(1, int(cap_mb * MB)))
    own_s = {param.name: param.ready_s for param in profile.params}
    ready_s: list[float] = []
    for spec in found.layout.buckets:
        last_s = max(own_s[param.name] for param in spec.params)
        ready_s.append(max([last_s, *ready_s[-1:]]))
    return replace(found, ready_s=tuple(ready_s), backward_s=profile.backward_s)


def _gain(slow_s: float, fast_s: float) -> str:
    return f"{slow_s / fast_s - 1:+.0%}"


def _markdown(head: str, rows: Iterator[list[str]]) -> str:
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.strip() for cell in line) + " |" for line in lines)


def _dear() -> str:
    """64 GPUs, 10 Gbit/s Ethernet and 100 Gbit/s InfiniBand."""

    def rows() -> Iterator[list[str]]:
        for gbps, hop_s in ((10.0, ETHERNET_S), (100.0, RDMA_S)):
            for model in ("resnet50", "bert_base"):
                found = cluster(model, "2080 Ti", 64, gbps, hop_s)
                taken = [f(found) for f in (wfbp_s, ddp_s, bytescheduler_s, dear_s, best_s)]
                wfbp, plain, _, dear, best = taken
                yield [
                    f"{gbps:g}",
                    model,
                    f"{found.ring.compute_s * 1e3:.0f}",
                    *(f"{step_s * 1e3:.0f}" for step_s in taken),
                    _gain(wfbp, dear),
                    _gain(plain, dear),
                    _gain(plain, best),
                ]

    head = (
        "Gbit/s|model|compute ms|WFBP|DDP|ByteScheduler-like|DeAR-like|best exact|"
        "DeAR-like over WFBP|DeAR-like over DDP|best over DDP"
    )
    return _markdown(head, rows())


def _horovod() -> str:
    """P100s at 25 Gbit/s: how much of linear scaling is left."""

    def rows() -> Iterator[list[str]]:
        for model, ranks in (("resnet50", 128), ("resnet50", 512), ("vgg16", 128), ("vgg16", 512)):
            found = cluster(model, "P100", ranks, 25.0, RDMA_S)
            shares = [found.ring.compute_s / f(found) for f in (wfbp_s, ddp_s, dear_s, best_s)]
            yield [model, str(ranks), *(f"{share:.0%}" for share in shares)]

    return _markdown("model|GPUs|WFBP|fused as DDP does|DeAR-like|best exact", rows())


def _priority() -> str:
    """ByteScheduler's and P3's setting: priority and partitions, at every link speed."""

    def rows() -> Iterator[list[str]]:
        for model, gpu, ranks in (
            ("resnet50", "P100", 4),
            ("vgg16", "P100", 4),
            ("resnet50", "V100", 64),
            ("vgg16", "V100", 64),
        ):
            found = [(gbps, cluster(model, gpu, ranks, gbps, RDMA_S)) for gbps in RATES]
            yield [
                f"{model}, {ranks} x {gpu}",
                *_most(found, unoverlapped_s, bytescheduler_s),
                *_most(found, wfbp_s, bytescheduler_s),
                *_most(found, ddp_s, bytescheduler_s),
                *_most(found, ddp_s, best_s),
            ]

    head = (
        "setting|most over no overlap|at Gbit/s|most over WFBP|at Gbit/s|"
        "most over DDP|at Gbit/s|best exact over DDP|at Gbit/s"
    )
    return _markdown(head, rows())


def _most(
    found: list[tuple[float, Cluster]],
    slow: Callable[[Cluster], float],
    fast: Callable[[Cluster], float],
) -> list[str]:
    """The largest gain over all rates, and the rate."""
    gain, gbps = max((slow(one) / fast(one) - 1, gbps) for gbps, one in found)
    return [f"{gain:+.0%}", f"{gbps:g}"]


def _usbyte() -> str:
    """8 nodes: over WFBP and over ByteScheduler, at the link speed where it gains most."""

    def rows() -> Iterator[list[str]]:
        for model, gpu in (
            ("resnet50", "2080 Ti"),
            ("vgg16", "V100"),
            ("bert_base", "V100"),
            ("gpt2", "A100"),
        ):
            found = [(gbps, cluster(model, gpu, 8, gbps, ETHERNET_S)) for gbps in RATES]
            yield [
                f"{model}, 8 x {gpu}",
                *_most(found, wfbp_s, best_s),
                *_most(found, bytescheduler_s, best_s),
                *_most(found, wfbp_s, bound_s),
            ]

    head = (
        "setting|best exact over WFBP|at Gbit/s|over ByteScheduler-like|at Gbit/s|"
        "bound over WFBP|at Gbit/s"
    )
    return _markdown(head, rows())


def _measured() -> str:
    """Steps measured here, beside what the simulator says from the architecture alone."""

    def rows() -> Iterator[list[str]]:
        for file in ("1gbit", "gpt2_vgg16", "rates", "4ranks"):
            text = (ROOT / "bench" / "results" / f"step_time_{file}.json").read_text()
            for case in json.loads(text)["cases"]:
                if case["workload"] in ARCHITECTURES:
                    yield from _case(case)

    return _markdown("workload|ranks|Gbit/s|hook|measured ms|simulated ms|off by", rows())


def _case(case: dict[str, Any]) -> Iterator[list[str]]:
    profile = _emulated(case)
    settings = Settings(policy="priority")
    capped = rebucketed(profile, 4 * MB)
    simulated = {
        "ddp": ddp(profile).step_s,
        "commsched:optimizer=true,bucket_cap_mb=4": predict(
            Candidate("", settings, deferred=True), capped
        ).step_s,
    }
    for row in case["rows"]:
        if row["hook"] in simulated:
            step_ms, taken_ms = simulated[row["hook"]] * 1e3, row["steady_ms"]
            yield [
                case["workload"],
                str(case["ranks"]),
                f"{case['rate_mbit'] / 1e3:g}",
                f"`{row['hook']}`",
                f"{taken_ms:.0f}",
                f"{step_ms:.0f}",
                f"{step_ms / taken_ms - 1:+.1%}",
            ]


def _emulated(case: dict[str, Any]) -> Profile:
    """The bench's emulated model: 250 ms of forward, 500 of backward; the rest is its optimizer.

    The link is known from one all-reduce of all gradients among two ranks. For four ranks it comes
    from that formula, not from their own measurement.
    """
    known = ARCHITECTURES[case["workload"]]
    scale = (known.default_mb or known.true_mb()) / known.true_mb()
    layers = []
    for layer in known.layers():
        shapes = {
            f"{layer.name}.{name}": (max(1, round(shape[0] * scale)), *shape[1:])
            for name, shape in layer.shapes.items()
        }
        layers.append(Layer(shapes, layer.flops))
    numel = case["gradient_mb"] * 1e6 / 4
    steady_ms = next(row["steady_ms"] for row in case["rows"] if row["hook"] == "noop")
    element_s = max(0.0, steady_ms / 1e3 - 0.75) / numel
    whole = built(layers, 0.25, element_s, 2, Link(0.0, _beta_s(case)))
    return at_ranks(whole, case["ranks"])


def _beta_s(case: dict[str, Any]) -> float:
    if case["ranks"] != 2:
        text = (ROOT / "bench" / "results" / "step_time_1gbit.json").read_text()
        cases = json.loads(text)["cases"]
        case = next(one for one in cases if one["workload"] == case["workload"])
    return float(case["all_reduce_ms"]) / case["gradient_mb"] / 1e9


TABLES: dict[str, Callable[[], str]] = {
    "measured": _measured,
    "dear": _dear,
    "priority": _priority,
    "usbyte": _usbyte,
    "horovod": _horovod,
}


def table(name: str) -> str:
    """One table in Markdown."""
    return TABLES[name]()


def page_with(text: str, name: str, made: str) -> str:
    """The page with that table in its place."""
    begin, end = f"<!-- table {name} -->", "<!-- end of table -->"
    pattern = re.escape(begin) + r"\n.*?" + re.escape(end)
    if len(re.findall(pattern, text, re.DOTALL)) != 1:
        raise ValueError(f"the page has no single place for table {name}")
    return re.sub(pattern, lambda _: f"{begin}\n{made}\n{end}", text, flags=re.DOTALL)


def main() -> int:
    """Prints, writes or checks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--table", choices=TABLES)
    group.add_argument("--write", action="store_true")
    group.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return 0
    before = text = PAGE.read_text()
    for name in TABLES:
        text = page_with(text, name, table(name))
    if options.write:
        PAGE.write_text(text)
    elif text != before:
        print(f"{PAGE.name} is stale: run this with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
