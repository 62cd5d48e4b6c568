"""How fast dense chunks are averaged: ring all-reduce, or all-to-all + local sum + all-gather.

    python bench/exchanges.py --rate-mbit 1000 --ranks 2 --json out.json

No model and no engine: chunks of one tensor go out in order, a fixed number in flight, driven as
commsched's engine and lane do. The exchanges take turns. Times are those of the slowest rank,
medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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

from bench.launch import launch, open_links
from commsched import exchange
from commsched.group import Board, Group, Membership

KIB = 2**10
CHUNKS_KIB = (128, 256, 512, 1024, 2048, 4096)
IN_FLIGHT = (1, 2, 4)
ALONE_KIB = (64, 256, 1024)  # one chunk on an idle link, `ALONE_TIMES` a round
ALONE_TIMES = 8
Way = Callable[[Group, torch.Tensor, exchange.Pool], exchange.Stages]
Figures = dict[tuple[str, int, int], list[list[float]]]


def _ring(group: Group, wire: torch.Tensor, _pool: exchange.Pool) -> exchange.Stages:
    return exchange.get("ring_all_reduce")(group, wire.mul_(1 / group.size))


def _a2a(group: Group, wire: torch.Tensor, pool: exchange.Pool) -> exchange.Stages:
    # Both halves in one go only here, where all ranks resume chunks in the same order.
    yield from exchange.reduce_scatter(group, wire.mul_(1 / group.size), pool)
    return (yield from exchange.all_gather(group, wire, pool))


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
        for name, way in {"ring": _ring, "a2a": _a2a}.items():
            for chosen in [chunks] if most else [chunks[:1]] * ALONE_TIMES:
                took = _timed(lambda: _drive(group, way, chosen, max(1, most)))  # noqa: B023
                figures.setdefault((name, kib, most), []).append(took)
    return figures


def _rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    member = Membership(dist.group.WORLD)
    group = Group(member, Board(member), max(IN_FLIGHT) + 2, 60.0)
    fields = ("exchange", "chunk_kib", "in_flight", "seconds", "cpu_s")
    figures = _measure(group, options.total_mb, options.rounds)
    rows = [(*key, *map(median, zip(*took, strict=True))) for key, took in figures.items()]
    if group.rank == 0:
        print(json.dumps([dict(zip(fields, row, strict=True)) for row in rows]), flush=True)
    dist.barrier()


def _print(rows: list[dict[str, Any]], line_s: float, title: str) -> None:
    table = Table(title=title)
    for head in ("chunk KiB", "in flight", "exchange", "ms", "of line rate", "CPU ms a rank"):
        table.add_column(head, justify="right")
    for row in sorted(rows, key=lambda row: (not row["in_flight"], row["chunk_kib"])):
        many = row["in_flight"] > 0
        ms = [f"{1e3 * row[name]:.{1 if many else 2}f}" for name in ("seconds", "cpu_s")]
        share = f"{line_s / row['seconds']:.3f}" if many and line_s else ""
        most = str(row["in_flight"] or "alone")
        table.add_row(str(row["chunk_kib"]), most, row["exchange"], ms[0], share, ms[1])
    Console().print(table)


def main() -> int:
    """The command line of `bench/exchanges.py`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, help="egress of each rank; unshaped if left out")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--total-mb", type=float, default=100.0, help="gradients, in 1e6 bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        _rank(options)
        return 0
    lines: list[str] = []
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    with open_links(options.ranks, options.rate_mbit, options.loopback) as links:
        results = launch(
            links, [sys.executable, *sys.argv], 600.0, env, lambda _, line, __: lines.append(line)
        )
    if any(result.status != "ok" for result in results):
        print(*lines, *results, sep="\n", file=sys.stderr)
        return 1
    rows = next(json.loads(line) for line in lines if line.startswith("["))
    sent_mb = 2 * (options.ranks - 1) / options.ranks * options.total_mb
    line_s = sent_mb * 8 / options.rate_mbit if options.rate_mbit else 0.0
    _print(rows, line_s, f"{options.ranks} ranks, {options.rate_mbit} Mbit/s, {sent_mb:g} MB sent")
    if options.json is not None:
        options.json.write_text(json.dumps({"arguments": sys.argv[1:], "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
