"""How fast dense chunks are averaged: all-reduce (ring), or reduce-scatter (rs) + all-gather (a2a).

    python bench/links.py --ranks 2 --rate-mbit 1000 -- python bench/exchanges.py --rate-mbit 1000

No model and no engine: chunks of one tensor go out in order, a fixed number in flight, driven as
commsched's engine and lane do. The exchanges take turns. Medians of the slowest rank's times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from commsched import exchange
from commsched.group import Board, Group, Membership

KIB = 2**10
CHUNKS_KIB = (128, 256, 512, 1024, 2048, 4096)
IN_FLIGHT = (1, 2, 4)
ALONE_KIB, ALONE_TIMES = (64, 256, 1024), 8  # one chunk on an idle link, so often a round
FIELDS = ("exchange", "chunk_kib", "in_flight", "seconds", "cpu_s")
Way = Callable[[Group, torch.Tensor, exchange.Pool], exchange.Stages]
Figures = dict[tuple[str, int, int], list[list[float]]]


def _ring(group: Group, wire: torch.Tensor, _pool: exchange.Pool) -> exchange.Stages:
    return exchange.ring_all_reduce(group, wire.mul_(1 / group.size))


def _rs(group: Group, wire: torch.Tensor, pool: exchange.Pool) -> exchange.Stages:
    return exchange.reduce_scatter(group, wire.mul_(1 / group.size), pool)


def _a2a(group: Group, wire: torch.Tensor, pool: exchange.Pool) -> exchange.Stages:
    # Both halves in one go only here, where all ranks resume chunks in the same order.
    yield from _rs(group, wire, pool)
    return (yield from exchange.all_gather(group, wire, pool))


WAYS: dict[str, Way] = {"ring": _ring, "a2a": _a2a, "rs": _rs}  # rs: half the bytes


def _drive(group: Group, way: Way, chunks: list[torch.Tensor], most: int) -> None:
    """Average `chunks`, at most `most` at once: one thread waits, in order, this one resumes."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[exchange.Stages] = queue.SimpleQueue()

    def wait() -> None:
        while (item := waiting.get()) is not None:
            item[1].wait()
            done.put(item[0])

    waiter = threading.Thread(target=wait)
    waiter.start()
    left, in_flight, pool = iter(chunks), 0, exchange.Pool()
    while True:
        for chunk in itertools.islice(left, most - in_flight):
            stages = way(group, chunk, pool)
            waiting.put((stages, next(stages)))
            in_flight += 1
        if not in_flight:
            break
        stages = done.get()
        try:
            waiting.put((stages, stages.send([])))
        except StopIteration:
            in_flight -= 1
    waiting.put(None)
    waiter.join()


def _timed(action: Callable[[], None]) -> list[float]:
    """Seconds and CPU seconds of all threads, the largest over the ranks."""
    dist.barrier()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    action()
    took = [time.perf_counter() - began_s, time.process_time() - began_cpu_s]
    worst = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return list(worst.tolist())


def _measure(group: Group, total_mb: float, rounds: int) -> Figures:
    grads = torch.randn(int(total_mb * 1e6) // 4)
    cases = list(itertools.product(CHUNKS_KIB, IN_FLIGHT)) + [(kib, 0) for kib in ALONE_KIB]
    figures: Figures = {}
    for kib, most in cases[-1:] + cases * rounds:  # a first one to warm up
        chunks = list(grads.split(kib * KIB // 4))
        for name, way in WAYS.items():
            for chosen in [chunks] if most else [chunks[:1]] * ALONE_TIMES:
                took = _timed(lambda: _drive(group, way, chosen, max(1, most)))  # noqa: B023
                figures.setdefault((name, kib, most), []).append(took)
    return figures


def _table(rows: list[dict[str, Any]], line_s: float) -> Table:
    table = Table()
    for head in ("chunk KiB", "in flight", "exchange", "ms", "of line rate", "CPU ms a rank"):
        table.add_column(head, justify="right")
    for row in sorted(rows, key=lambda row: (not row["in_flight"], row["chunk_kib"])):
        name, most = row["exchange"], row["in_flight"]
        seconds, cpu_s = row["seconds"], row["cpu_s"]
        share = f"{line_s / seconds / (2 if name == 'rs' else 1):.3f}" if most and line_s else ""
        times = f"{1e3 * seconds:.2f}", share, f"{1e3 * cpu_s:.2f}"
        table.add_row(str(row["chunk_kib"]), str(most or "alone"), name, *times)
    return table


def main() -> None:
    """One rank of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate-mbit", type=float, help="that of the link, to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total-mb", type=float, default=100.0, help="gradients, in 1e6 bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    member = Membership(dist.group.WORLD)
    group = Group(member, Board(member), max(IN_FLIGHT) + 2, 60.0)
    figures = _measure(group, options.total_mb, options.rounds)
    medians = [(*key, *map(median, zip(*took, strict=True))) for key, took in figures.items()]
    if group.rank == 0:
        rows = [dict(zip(FIELDS, row, strict=True)) for row in medians]
        sent_mb = 2 * (group.size - 1) / group.size * options.total_mb
        Console(width=88).print(_table(rows, sent_mb * 8 / (options.rate_mbit or float("inf"))))
        if options.json is not None:
            options.json.write_text(json.dumps({"arguments": sys.argv[1:], "rows": rows}) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
