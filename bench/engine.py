"""What commsched's engine costs a chunk, beside bare c10d that issues the same all-reduces.

    torchrun --nproc-per-node 2 bench/engine.py
    torchrun --nproc-per-node 2 bench/engine.py -s 4096 -n 2000 --in-flight 8 --json out.json

One iteration averages COUNT chunks of SIZE bytes (float32). The engine is driven as DDP's hook
drives it: some buckets become ready, it cuts them into chunks, issues them in plan order with a
credit of IN_FLIGHT chunks, averages and hands back. Bare c10d scales the whole buffer once, then
calls all_reduce on its slices, IN_FLIGHT at a time, and waits for the oldest: a gloo group of the
same kind, with as many threads. Both take turns; medians over the rounds of the slowest rank's
times, and for the ratio the median of the rounds' ratios. CPU times are those of all threads of
one rank, gloo's included, the largest over the ranks.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
import torch.distributed as dist

from bench.driven import TIMEOUT_S, Driven, described, join, member, over_ranks, timed
from commsched.group import Board, Group
from commsched.settings import MB, Settings

__all__ = ["Case", "Row", "cases", "main", "measure"]

SIZES = (1024, 16 * 1024, 256 * 1024, 4 * MB)
LINE_BYTES = 64  # chunks are cut on such bounds
MOST_BYTES, MOST_CHUNKS = 64 * MB, 500  # of one iteration, where no count is given
HEADS = (
    "chunk bytes", "count", "in flight", "engine/s", "c10d/s", "engine us", "c10d us", "more us",
    "ratio", "engine cpu us", "c10d cpu us",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What one iteration averages.

    Attributes:
        nbytes: of a chunk.
        count: of chunks.
        in_flight: chunks on the wire at once.
        buckets: what the engine gets them as.
    """

    nbytes: int
    count: int
    in_flight: int
    buckets: int

    @property
    def settings(self) -> Settings:
        """Settings under which the engine cuts just these chunks."""
        return Settings(
            policy="fifo",
            chunk_mb=self.nbytes / MB,
            fusion_mb=0.0,
            credit_mb=self.in_flight * self.nbytes / MB,
            timeout_s=TIMEOUT_S,
        )

    def bucket_numels(self) -> list[int]:
        """Elements of each bucket: whole chunks."""
        buckets = min(self.buckets, self.count)
        shares = [
            self.count * (i + 1) // buckets - self.count * i // buckets for i in range(buckets)
        ]
        return [share * self.nbytes // 4 for share in shares]


@dataclass(frozen=True)
class Row:
    """One case's result. Seconds are of whole iterations, one a round."""

    case: Case
    engine_s: list[float] = field(repr=False)
    c10d_s: list[float] = field(repr=False)
    engine_cpu_s: list[float] = field(repr=False)
    c10d_cpu_s: list[float] = field(repr=False)

    def us(self, times_s: Sequence[float]) -> float:
        """Microseconds a chunk, of the median."""
        return 1e6 * median(times_s) / self.case.count

    @property
    def ratio(self) -> float:
        """The engine's time over bare c10d's: the median of the rounds' ratios."""
        return median(a / b for a, b in zip(self.engine_s, self.c10d_s, strict=True))

    def figures(self) -> dict[str, float]:
        """What is printed."""
        engine_us, c10d_us = self.us(self.engine_s), self.us(self.c10d_s)
        case = self.case
        values = (
            case.nbytes, case.count, case.in_flight, 1e6 / engine_us, 1e6 / c10d_us, engine_us,
            c10d_us, engine_us - c10d_us, self.ratio, self.us(self.engine_cpu_s),
            self.us(self.c10d_cpu_s),
        )  # fmt: skip
        return dict(zip(HEADS, values, strict=True))


class Contestant(Protocol):
    """Averages one iteration's chunks."""

    def iteration(self) -> None:
        """All of them; returns when they are averaged."""


class OurEngine:
    """commsched's engine."""

    def __init__(self, case: Case, rank: int) -> None:
        self.flat = torch.full((case.count * case.nbytes // 4,), float(rank))
        numels = case.bucket_numels()
        self._buckets = torch.split(self.flat, numels)
        self.driven = Driven(case.settings, numels)

    def iteration(self) -> None:
        """All buckets are ready at once."""
        for bucket in self._buckets:
            self.driven.ready(bucket)
        self.driven.finish()


class Bare:
    """c10d alone."""

    def __init__(self, case: Case, rank: int) -> None:
        self.flat = torch.full((case.count * case.nbytes // 4,), float(rank))
        self._chunks = torch.split(self.flat, case.nbytes // 4)
        self._in_flight = case.in_flight
        ranks = member("bare")
        self._group = Group(ranks, Board(ranks), max(2, case.in_flight), TIMEOUT_S)

    def iteration(self) -> None:
        """In order, the oldest is waited for before another one goes."""
        self.flat.mul_(1 / self._group.size)
        works: deque[dist.Work] = deque()
        for chunk in self._chunks:
            if len(works) == self._in_flight:
                works.popleft().wait()
            works.append(self._group.all_reduce(chunk))
        while works:
            works.popleft().wait()


def cases(sizes: Sequence[int], counts: Sequence[int], in_flight: int, buckets: int) -> list[Case]:
    """A case for each size; one count is for all of them, none leaves it to the size.

    Raises:
        ValueError: counts for other sizes than there are.
    """
    if len(counts) == 1:
        counts = [*counts] * len(sizes)
    if not counts:
        counts = [max(8, min(MOST_CHUNKS, MOST_BYTES // size)) for size in sizes]
    if len(counts) != len(sizes):
        raise ValueError(f"{len(counts)} counts for {len(sizes)} sizes: give one, or one a size")
    rounded = [max(1, -(-size // LINE_BYTES)) * LINE_BYTES for size in sizes]
    return [Case(s, n, in_flight, buckets) for s, n in zip(rounded, counts, strict=True)]


def measure(case: Case, rounds: int, warmup: int) -> Row:
    """Both in turns. All ranks together.

    Raises:
        RuntimeError: a sum was wrong.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    engine, bare = OurEngine(case, rank), Bare(case, rank)
    row = Row(case, [], [], [], [])
    for index in range(warmup + rounds):
        times = [*timed(engine.iteration), *timed(bare.iteration)]
        _, largest = over_ranks(times)
        if index >= warmup:
            kept = row.engine_s, row.engine_cpu_s, row.c10d_s, row.c10d_cpu_s
            for into, took_s in zip(kept, largest, strict=True):
                into.append(took_s)
    engine.driven.close()
    for name, flat in (("engine", engine.flat), ("c10d", bare.flat)):
        if not bool((flat == (size - 1) / 2).all()):
            raise RuntimeError(f"{name} averaged {case} wrongly")
    return row


def _line(row: Row) -> str:
    return _joined([_cell(head, value) for head, value in row.figures().items()])


def _cell(head: str, value: float) -> str:
    if head == "ratio":
        return f"{value:.3f}"
    return f"{value:.0f}" if isinstance(value, int) or value >= 1e4 else f"{value:.1f}"


def _joined(cells: Sequence[str]) -> str:
    widths = [max(10, len(head) + 2) for head in HEADS]
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _to_json(row: Row) -> dict[str, object]:
    figures = {key.replace(" ", "_"): value for key, value in row.figures().items()}
    return (
        figures
        | {"buckets": row.case.buckets}
        | {key: value for key, value in asdict(row).items() if key != "case"}
    )


@click.command(help=__doc__.partition("\n")[0])
@click.option("-s", "--size", "sizes", type=int, multiple=True, default=SIZES, show_default=True,
              help="bytes of a chunk; again for more")  # fmt: skip
@click.option("-n", "--count", "counts", type=click.IntRange(1), multiple=True,
              help="chunks of one iteration: one for all sizes, or one a size")  # fmt: skip
@click.option("--in-flight", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option("--buckets", type=click.IntRange(1), default=8, show_default=True)
@click.option("-r", "--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("-x", "--warmup", type=click.IntRange(2), default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all figures")
def main(
    sizes: Sequence[int],
    counts: Sequence[int],
    in_flight: int,
    buckets: int,
    rounds: int,
    warmup: int,
    json_path: Path | None,
) -> None:
    """One rank of the measurement."""
    try:
        chosen = cases(sizes, counts, in_flight, buckets)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    rank, size = join()
    if rank == 0:
        print(f"# commsched's engine and bare c10d, {size} ranks over gloo, {buckets} buckets")
        print(f"# medians of {rounds} rounds of the slowest rank; us and cpu us are of one chunk")
        print("#" + _joined(HEADS)[1:], flush=True)
    rows = []
    for case in chosen:
        rows.append(measure(case, rounds, warmup))
        if rank == 0:
            print(_line(rows[-1]), flush=True)
    if rank == 0 and json_path is not None:
        content = described() | {"ranks": size, "rows": [_to_json(row) for row in rows]}
        json_path.write_text(json.dumps(content, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
