"""Step time of workloads under DDP communication hooks, on links of a chosen rate.

    python bench/step_time.py --workload resnet50 --rate-mbit 1000 --ranks 2 --json out.json \
        --hooks noop ddp fp16 commsched commsched:optimizer=true,bucket_cap_mb=8

One launch per (workload, rate): each rank keeps one model per hook and they take turns. torch's
PowerSGD, which may abort or hang on gloo, gets a launch to itself, and with `--memory` so does
every hook, so that peaks of resident memory can be compared.

`step ms` is a round's time over its steps. With optimizer=true a round ends with communication
under way, which is waited for within it: `tail ms` of each step, less the more `--steps` a round
has. `steady ms` is the median time from step to step, without a round's first step and the tail.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

from bench.figures import RankConfig
from bench.hooks import HookSpec
from bench.launch import RankResult, launch_program, open_links, require_shaped
from bench.links import Links, LinksError
from bench.step_report import Case, Figures, Row, print_case, rows_of
from bench.workloads import NAMES

__all__ = ["main"]

_SHOWN_LINES = 8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workload", nargs="+", default=["resnet50"], choices=NAMES)
    add("--hooks", nargs="+", default=["noop", "ddp", "commsched"], metavar="HOOK",
        help="noop ddp allreduce fp16 bf16 powersgd commsched, each [:key=value,...]: settings of "
        "commsched (optimizer=true hands the optimizer over) and, for any hook, DDP's "
        "bucket_cap_mb, gradient_as_bucket_view, static_graph, find_unused_parameters")  # fmt: skip
    add("--rate-mbit", nargs="+", type=float, help="egress of each rank; unshaped when left out")
    add("--mtu-bytes", type=int, default=1500, help="1500 or, jumbo, 9000")
    add("--loopback", action="store_true", help="no namespaces: all ranks on lo")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=10, help="timed steps of each hook in a round")
    add("--warmup", type=int, default=4,
        help="steps of each hook before round one; at least 12 with optimizer=true")  # fmt: skip
    add("--gradient-mb", type=float, help="total gradient of an emulated model (1e6 bytes)")
    add("--forward-s", type=float, default=0.25, help="of an emulated model")
    add("--backward-s", type=float, default=0.5, help="of an emulated model")
    add("--bucket-cap-mb", type=float, help="of hooks that do not set it: MiB; else DDP's default")
    add("--gradient-as-bucket-view", action="store_true", help="of hooks that do not set it")
    add("--memory", action="store_true", help="each hook in its own launch; report memory peaks")
    add("--time-limit-s", type=float, default=600.0, help="of one launch")
    add("--powersgd-limit-s", type=float, default=60.0, help="of the launch of powersgd")
    add("--max-vs-ddp", type=float, help="exit 1 if a commsched row takes longer than so x ddp")
    add("--json", type=Path, help="write all figures to this file")
    return parser


def _run(
    links: Links, config: RankConfig, time_limit_s: float
) -> tuple[list[Figures], list[RankResult]]:
    """One launch: the figures of all ranks (none unless all have some), and how they ended."""
    with tempfile.TemporaryDirectory() as folder:
        results = launch_program(links, "bench.step_rank", config, folder, time_limit_s)
        files = [Path(folder, f"{rank}.json") for rank in range(links.ranks)]
        complete = all(file.exists() for file in files)
        return [json.loads(file.read_text()) for file in files] if complete else [], results


def _failure(results: Sequence[RankResult]) -> str:
    """Why a launch has no figures, in one line: each rank's end and the phase it was in."""
    parts = []
    for result in results:
        phases = [line for line in result.tail if line.startswith("phase: ")]
        place = f" in {phases[-1].removeprefix('phase: ')!r}" if phases else ""
        parts.append(f"rank {result.rank} {result.status} after {result.seconds:.0f} s{place}")
    return "; ".join(parts)


def _launches(options: argparse.Namespace) -> list[list[str]]:
    """Which hooks share a launch."""
    if options.memory:
        return [[hook] for hook in options.hooks]
    together = [hook for hook in options.hooks if not _is_powersgd([hook])]
    alone = [[hook] for hook in options.hooks if _is_powersgd([hook])]
    return [together, *alone] if together else alone


def _is_powersgd(hooks: list[str]) -> bool:
    return any(hook.partition(":")[0] == "powersgd" for hook in hooks)


def _case(options: argparse.Namespace, workload: str, rate_mbit: float | None) -> Case:
    link = "loopback" if options.loopback else "shaped" if rate_mbit else "unshaped"
    case = Case(workload, options.ranks, rate_mbit, link)
    with open_links(options.ranks, rate_mbit, options.loopback, options.mtu_bytes) as links:
        for hooks in _launches(options):
            limit_s = options.powersgd_limit_s if _is_powersgd(hooks) else options.time_limit_s
            config = RankConfig(
                workload=workload,
                hooks=hooks,
                rounds=options.rounds,
                steps=options.steps,
                warmup=options.warmup,
                gradient_mb=options.gradient_mb,
                forward_s=options.forward_s,
                backward_s=options.backward_s,
                bucket_cap_mb=options.bucket_cap_mb,
                gradient_as_bucket_view=options.gradient_as_bucket_view,
                timeout_s=limit_s,
                memory=options.memory,
            )
            figures, results = _run(links, config, limit_s)
            _add(case, hooks, figures, results, options.memory)
    case.rows.sort(key=lambda row: options.hooks.index(row.hook))
    case.finish()
    return case


def _add(
    case: Case,
    hooks: list[str],
    figures: list[Figures],
    results: list[RankResult],
    memory: bool,
) -> None:
    """Adds one launch to the case."""
    case.launches.append({"hooks": hooks, "ranks": [result.to_dict() for result in results]})
    if not figures:
        case.rows += [Row(hook, _failure(results)) for hook in hooks]
        return
    case.rows += rows_of(figures, case.link == "loopback", memory)
    case.gradient_mb = figures[0]["gradient_mb"]
    if not memory and not _is_powersgd(hooks):
        case.all_reduce_rounds_ms = [[1e3 * s for s in one["all_reduce_s"]] for one in figures]


def _print_failures(console: Console, case: Case) -> bool:
    """Prints the tail of every rank that did not end well; True if there was any but powersgd."""
    failed = False
    for entry in case.launches:
        for rank in entry["ranks"]:
            if rank["status"] == "ok":
                continue
            failed = failed or not _is_powersgd(entry["hooks"])
            console.print(f"{', '.join(entry['hooks'])}: rank {rank['rank']} {rank['status']}")
            for line in _telling(rank["tail"]):
                console.print(f"    {line}", markup=False, highlight=False)
    return failed


def _too_slow(console: Console, case: Case, limit: float | None) -> bool:
    """The guard: whether a commsched row is over the limit; says which."""
    slow = [
        row
        for row in case.rows
        if limit and row.hook.startswith("commsched") and row.vs_ddp and row.vs_ddp > limit
    ]
    for row in slow:
        console.print(f"{row.hook}: {row.vs_ddp:.3f} x ddp is over the limit of {limit:g}")
    return bool(slow)


def _telling(tail: list[str]) -> list[str]:
    """The lines worth showing: the innermost calls if there is a dump of stacks, else the last."""
    dumps = [index for index, line in enumerate(tail) if "most recent call first" in line]
    start = dumps[-1] if dumps else max(0, len(tail) - _SHOWN_LINES)  # the main thread is last
    return tail[start : start + _SHOWN_LINES]


def _write(path: Path, options: argparse.Namespace, cases: list[Case]) -> None:
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    document = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "settings": settings,
        "cases": [asdict(case) for case in cases],
    }
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


def main() -> int:
    """Runs the matrix; returns 1 if a launch (other than powersgd's) failed, 2 for bad usage."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 240)  # not folded when piped
    try:
        for hook in options.hooks:
            HookSpec.parse(hook)
        if not options.loopback:
            require_shaped()
    except ValueError as error:
        print(f"step_time: {error}", file=sys.stderr)
        return 2
    cases: list[Case] = []
    failed = False
    try:
        for workload in options.workload:
            for rate_mbit in [None] if options.loopback else options.rate_mbit or [None]:
                cases.append(_case(options, workload, rate_mbit))
                print_case(console, cases[-1])
                failed |= _print_failures(console, cases[-1])
                failed |= _too_slow(console, cases[-1], options.max_vs_ddp)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except LinksError as error:
        console.print(f"links: {error}", markup=False)
        return 1
    finally:
        if options.json and cases:
            _write(options.json, options, cases)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
