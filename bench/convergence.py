"""Whether training still converges with each codec, and how fast, on a slow link.

    python bench/convergence.py --json out.json --picture out.svg
    python bench/convergence.py --tasks digits --codecs int8 topk:ratio=0.01 --seeds 1

Two ranks, each on a link of 200 Mbit/s, with different data, train two small models on real data:
a CNN on scikit-learn's digits, and a character GPT on the Python manual. First by plain DDP, then
with every codec, at its default settings but for codec_force=True, from the same initial
parameters and on the same batches. The final loss is that on data held out, after training.

SGD with momentum trains the CNN, AdamW the GPT. dgc brings its own momentum, so with it the
optimizer is SGD without, and it is compared with plain DDP under SGD with momentum (on the GPT that
is `ddp:sgd`). `ddp:nudged` is plain DDP from parameters that differ in their last bits: how far its
ratio is from 1 is what any change in rounding does, and smaller differences say nothing.

Learning rates fall to zero over the steps given; `s to 1.05 x exact` is when the mean curve comes
within 5 % of plain DDP's final loss. Seconds are without evaluation; the slower rank's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from bench import machine
from bench.convergence_plot import draw
from bench.convergence_rank import Config
from bench.convergence_report import Curves, Row, merge, rows_of, table
from bench.convergence_tasks import EXACT, EXACT_SGD, NUDGED, TASKS
from bench.launch import RankResult, launch_program, open_links, require_shaped
from bench.links import Links, LinksError
from commsched import codecs

__all__ = ["main"]

_SHOWN_LINES = 8
RANKS = 2
CODECS = (
    *("none", "fp16", "bf16", "int8", "int4", "fp8", "dynamic8", "sign", "ternary", "qsgd"),
    *("topk:ratio=0.01", "randomk:ratio=0.01", "vote:ratio=0.01"),
    *("powersgd:rank=4", "acpsgd:rank=4", "dgc:ratio=0.01"),
)


@dataclass(frozen=True)
class Launch:
    """What one task's launch gave: trainings, and how the ranks ended."""

    curves: list[Curves]
    results: list[RankResult]

    @property
    def is_whole(self) -> bool:
        """Whether every rank came to its end."""
        return all(result.status == "ok" for result in self.results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--codecs", nargs="+", default=[*CODECS], metavar="CODEC")
    add("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    add("--seeds", type=int, default=3, help="trainings of each, with seeds from 0")
    add("--steps", type=int, help="of each training; the task's own when left out")
    add("--points", type=int, default=16, help="of each curve")
    add("--rate-mbit", type=float, default=200.0, help="egress of each rank")
    add("--loopback", action="store_true", help="no namespaces, no shaping: all ranks on lo")
    add("--time-limit-s", type=float, default=1500.0, help="of one task")
    add("--json", type=Path, help="write all figures to this file")
    add("--picture", type=Path, help="draw the curves to this SVG file")
    return parser


def _ways(task: str, texts: Sequence[str]) -> dict[str, str]:
    """How gradients travel in each training of a task, and the exact one to compare with."""
    made = TASKS[task]()
    references = {how: made.reference(how) for how in texts}
    others = {EXACT_SGD: EXACT_SGD} if EXACT_SGD in references.values() else {}
    return {EXACT: EXACT, NUDGED: EXACT, **others, **references}


def _run(options: argparse.Namespace, task: str, hows: Sequence[str], links: Links) -> Launch:
    steps = options.steps or TASKS[task].steps
    points = min(options.points, steps)
    config = Config(
        task, [*hows], [*range(options.seeds)], steps, points, timeout_s=options.time_limit_s
    )
    with tempfile.TemporaryDirectory() as folder:
        results = launch_program(
            links, "bench.convergence_rank", config, folder, options.time_limit_s, _echo
        )
        ranks = [_lines(Path(folder, f"{rank}.jsonl")) for rank in range(links.ranks)]
    curves = [merge(each) for each in zip(*ranks, strict=False)]  # as many as all have
    if links.is_loopback:
        for curve in curves:
            curve["sent_bytes"] /= links.ranks  # every rank counts those of all
    return Launch(curves, results)


def _echo(rank: int, line: str, is_stderr: bool) -> None:
    if rank == 0 and not is_stderr:
        print(line, file=sys.stderr, flush=True)


def _lines(path: Path) -> list[Curves]:
    if not path.exists():
        return []
    # A rank that was killed may have left half a line.
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def _print_failures(console: Console, rows: Sequence[Row], results: Sequence[RankResult]) -> None:
    for row in rows:
        if not row.agree:
            console.print(f"{row.how}: the ranks' models differ")
    for result in results:
        if result.status != "ok":
            console.print(f"rank {result.rank}: {result.status} after {result.seconds:.0f} s")
            for line in result.tail[-_SHOWN_LINES:]:
                console.print(f"    {line}", markup=False, highlight=False)


def _plain(value: Any) -> Any:
    """As JSON: five digits, and null where a number is not finite."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if isfinite(value) else None
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _document(options: argparse.Namespace, rows: Sequence[Row]) -> dict[str, Any]:
    settings = {
        "ranks": RANKS,
        "rate_mbit": None if options.loopback else options.rate_mbit,
        "seeds": options.seeds,
        "points": options.points,
    }
    return machine.describe() | settings | {"rows": [_plain(asdict(row)) for row in rows]}


def _write(path: Path, document: dict[str, Any]) -> None:
    """One line a row: curves would take a line a number otherwise."""
    head = {key: value for key, value in document.items() if key != "rows"}
    lines = ",\n  ".join(json.dumps(row) for row in document["rows"])
    text = json.dumps(head, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


def _check(options: argparse.Namespace) -> None:
    for text in options.codecs:
        codecs.get(text)
    if min(options.seeds, options.points) < 1 or (options.steps or 2) < 2:
        raise ValueError("--seeds and --points must be 1 or more, --steps 2 or more")
    if not options.loopback:
        require_shaped()


def main() -> int:
    """Trains all; returns 1 if a launch failed, 2 for bad usage."""
    options = _parser().parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        _check(options)
    except ValueError as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    failed = False
    try:
        for task in options.tasks:
            ways = _ways(task, options.codecs)
            with open_links(RANKS, options.rate_mbit, options.loopback) as links:
                done = _run(options, task, [*ways], links)
            found = rows_of(task, ways, done.curves)
            rate = "loopback" if options.loopback else f"{options.rate_mbit:g} Mbit/s"
            console.print(table(found, f"{task}, {RANKS} ranks, {rate}"))
            _print_failures(console, found, done.results)
            failed |= not done.is_whole or not all(row.agree for row in found)
            rows += found
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except LinksError as error:
        console.print(f"convergence: {error}", markup=False)
        return 1
    finally:
        document = _document(options, rows)
        if options.json and rows:
            _write(options.json, document)
        if options.picture and rows:
            draw(document, options.picture)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
