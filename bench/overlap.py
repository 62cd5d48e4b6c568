"""How much of communication hides behind computing, in the columns of OSU's non-blocking tests.

    torchrun --nproc-per-node 2 bench/overlap.py -m 65536:16777216
    python bench/links.py --ranks 2 --rate-mbit 1000 -- python bench/overlap.py --sleep

For every way and message size, in microseconds a step:

    Compute     computing alone, nothing sent
    Pure Comm.  communication alone, nothing computed (minus a step that does neither)
    Overall     both
    Overlap(%)  max(0, 100 - 100 * (Overall - Compute) / Pure Comm.)

The formula is that of the OSU Micro-Benchmarks. Two things differ: OSU takes Compute from within
the overlapped run, here it is measured alone, so that computing slowed down by communication counts
as exposed; and hooks are measured in real training steps, so a step that does neither is not free.

Ways:

    c10d    a bare non-blocking all_reduce of the whole message, then computing, then the wait
    engine  commsched's engine: after each of --layers shares of computing a layer is ready
    a hook  a training step of a model of --layers equal layers under DDP, each layer a bucket:
            ddp, commsched:policy=fifo, commsched:optimizer=true, ... as in bench/step_time.py

Gradients come layer by layer, so the last layer of L has no backward left to hide behind: a hook
that waits at the end of backward reaches about 100 * (L - 1) / L, or less where backward is shorter
than communication. A deferred one can hide more in forward (--forward-share); the last of its steps
has no next forward, so give it many (-i). commsched sends layers smaller than `fusion_mb` (1 MB)
together: with small messages there is little to overlap, and few collectives to pay for.
Computing takes --compute-ratio times the bare all-reduce. Every figure is the median over the
rounds; the mean over the ranks, and for the last two columns the slowest rank's times.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch.distributed as dist

from bench.driven import described, join, over_ranks, timed
from bench.hooks import HookSpec
from bench.overlap_ways import Compute, Matmul, Sleep, Way, make

__all__ = [
    "Options",
    "Row",
    "Times",
    "best_percent",
    "main",
    "overlap_percent",
    "read_sizes",
    "sizes_between",
]

WAYS = ("c10d", "engine", "ddp", "commsched:policy=fifo")
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
WIDTH = 15
HEADS = ("Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)", "Max Overall", "Max Ovl.(%)")


def overlap_percent(overall_s: float, compute_s: float, comm_s: float) -> float:
    """OSU's overlap: the share of `comm_s` that did not lengthen the step; never below 0.

    Returns:
        Per cent; nan where there is no communication to hide.

    Source: OSU Micro-Benchmarks, `osu_util_mpi.c`, non-blocking collectives.
    """
    if comm_s <= 0:
        return math.nan
    return max(0.0, 100 - 100 * (overall_s - compute_s) / comm_s)


@dataclass(frozen=True)
class Times:
    """One way's seconds a step in one round, or their median."""

    overall_s: float
    compute_s: float
    comm_s: float
    nothing_s: float  # neither computing nor communicating

    @property
    def overlap_percent(self) -> float:
        """See the function."""
        return overlap_percent(self.overall_s, self.compute_s, self.comm_s - self.nothing_s)


@dataclass(frozen=True)
class Row:
    """One way at one size.

    Attributes:
        way: its text.
        nbytes: of the message: all gradients of a step.
        mean: of the ranks.
        largest: over the ranks.
    """

    way: str
    nbytes: int
    mean: Times
    largest: Times

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; an overlap that does not exist is None."""
        found: dict[str, Any] = {"way": self.way, "nbytes": self.nbytes}
        for key, times in (("mean", self.mean), ("largest", self.largest)):
            percent = times.overlap_percent
            found[key] = asdict(times) | {
                "overlap_percent": None if math.isnan(percent) else percent
            }
        return found


@dataclass(frozen=True)
class Options:
    """What is measured, beside ways and sizes; see the command's options."""

    iterations: int = 5
    warmup: int = 3
    rounds: int = 3
    layers: int = 8
    compute_ratio: float = 1.0
    forward_share: float = 0.0
    sleep: bool = False


def best_percent(options: Options) -> float:
    """What way `engine`, or a hook that waits at the end of backward, can reach on one serial link.

    With n layers ready one backward / n after the other, the last one's communication is exposed;
    where backward is shorter than communication, the link is busy from the first one on.
    """
    backward = (1 - options.forward_share) * options.compute_ratio  # over communication
    return 100 * (1 - 1 / options.layers) * min(1.0, backward)


def read_sizes(text: str) -> tuple[int, int]:
    """The least and the largest message of `MIN:MAX`, `:MAX` or `MAX`, in bytes; K, M, G are 2^10s.

    Raises:
        ValueError: not such a text, or no size between them.
    """
    low, colon, high = text.rpartition(":")
    least, most = _nbytes(low) if colon and low else 1, _nbytes(high)
    if least > most:
        raise ValueError(f"{text!r}: the least message is larger than the largest")
    return least, most


def _nbytes(text: str) -> int:
    digits, unit = (text[:-1], text[-1:].lower()) if text[-1:].isalpha() else (text, "")
    if not digits.isdecimal() or unit not in UNITS or int(digits) < 1:
        raise ValueError(f"{text!r} is no size: give bytes, as in 65536, 64K or 16M")
    return int(digits) * UNITS[unit]


def sizes_between(least: int, most: int, factor: int) -> Iterator[int]:
    """`least`, times `factor`, ... up to `most`; whole float32 numbers."""
    size = least
    while size <= most:
        yield max(4, size // 4 * 4)
        size *= factor


# ---------------------------------------------------------------- measuring


def _per_step_s(way: Way, count: int, computing: bool, communicating: bool) -> float:
    return timed(lambda: way.steps(count, computing, communicating))[0] / count


def _bare_s(nbytes: int, options: Options) -> float:
    """What the bare all-reduce takes: computing is made to match it. The same on all ranks."""
    way = make("c10d", nbytes, 1, Sleep(0.0), 0.0, options.warmup)
    took = [_per_step_s(way, options.iterations, False, True) for _ in range(options.rounds)]
    return over_ranks([median(took)])[0][0]


def _compute(duration_s: float, options: Options) -> Compute:
    if options.sleep:
        return Sleep(duration_s)
    return Matmul(duration_s, over_ranks([Matmul.product_seconds()])[0][0])


def measure(text: str, nbytes: int, compute: Compute, options: Options) -> Row:
    """One way at one size: the four kinds of steps take turns. All ranks together."""
    way = make(text, nbytes, options.layers, compute, options.forward_share, options.warmup)
    kinds = (True, True), (True, False), (False, True), (False, False)  # as in Times
    means, largests = [], []
    for _ in range(options.rounds):
        took = [_per_step_s(way, options.iterations, *kind) for kind in kinds]
        mean, largest = over_ranks(took)
        means.append(mean)
        largests.append(largest)
    way.close()
    return Row(text, nbytes, _medians(means), _medians(largests))


def _medians(rounds: Sequence[Sequence[float]]) -> Times:
    return Times(*map(median, zip(*rounds, strict=True)))


# ---------------------------------------------------------------- the command


def _head(ways: Sequence[str], options: Options, ranks: int) -> str:
    kind = "sleeping" if options.sleep else "matrix products"
    best = best_percent(options)
    lines = [
        f"# Overlap of {', '.join(ways)}; {ranks} ranks over gloo",
        f"# {options.layers} layers (a wait after backward can reach about {best:.1f} %), "
        f"computing: {kind}, "
        f"{options.compute_ratio:g} x the bare all-reduce, {options.forward_share:g} of it in "
        "forward",
        f"# medians of {options.rounds} rounds of {options.iterations} steps; "
        "Overlap = 100 - 100 * (Overall - Compute) / Pure Comm., at least 0",
    ]
    return "\n".join(lines)


def _line(row: Row) -> str:
    mean, largest = row.mean, row.largest
    values = (
        1e6 * mean.overall_s, 1e6 * mean.compute_s, 1e6 * (mean.comm_s - mean.nothing_s),
        mean.overlap_percent, 1e6 * largest.overall_s, largest.overlap_percent,
    )  # fmt: skip
    cells = "".join(f"{'-' if math.isnan(v) else format(v, '.2f'):>{WIDTH}}" for v in values)
    return f"{row.nbytes:<12}{cells}  {row.way}"


def _run(ways: Sequence[str], sizes: Sequence[int], options: Options, says: bool) -> list[Row]:
    rows = []
    for nbytes in sizes:
        compute = _compute(options.compute_ratio * _bare_s(nbytes, options), options)
        for text in ways:
            rows.append(measure(text, nbytes, compute, options))
            if says:
                print(_line(rows[-1]), flush=True)
    return rows


@click.command(help=(__doc__ or "").partition("\n")[0] + " More: the head of this file.")
@click.option("-m", "--message-size", default="65536:16777216", show_default=True,
              metavar="[MIN:]MAX", help="bytes of all gradients; 64K and 16M work too")  # fmt: skip
@click.option("-f", "--factor", type=click.IntRange(2), default=4, show_default=True,
              help="from one size to the next")  # fmt: skip
@click.option("-i", "--iterations", type=click.IntRange(1), default=5, show_default=True)
@click.option("-x", "--warmup", type=click.IntRange(0), default=3, show_default=True)
@click.option("-r", "--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("-w", "--way", "ways", multiple=True, default=WAYS, show_default=True,
              help="c10d, engine, or a hook; again for more")  # fmt: skip
@click.option("--layers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--compute-ratio", type=click.FloatRange(0), default=1.0, show_default=True,
              help="computing over the bare all-reduce")  # fmt: skip
@click.option("--forward-share", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="of a hook's computing")  # fmt: skip
@click.option("--sleep", is_flag=True, help="computing takes nothing from this machine")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all figures")
def main(
    message_size: str, factor: int, ways: Sequence[str], json_path: Path | None, **rest: Any
) -> None:
    """One rank of the measurement."""
    options = Options(**rest)
    try:
        sizes = [*sizes_between(*read_sizes(message_size), factor)]
        for text in ways:
            if text not in ("c10d", "engine"):
                HookSpec.parse(text)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    rank, ranks = join()
    if rank == 0:
        print(_head(ways, options, ranks))
        print(f"{'# Size':<12}{''.join(head.rjust(WIDTH) for head in HEADS)}  way", flush=True)
    rows = _run(ways, sizes, options, rank == 0)
    if rank == 0 and json_path is not None:
        about = described() | {"ranks": ranks, "options": asdict(options)}
        content = about | {"rows": [row.to_dict() for row in rows]}
        json_path.write_text(json.dumps(content, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
