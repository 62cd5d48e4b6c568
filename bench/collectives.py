"""Collectives of torch, and commsched's exchanges x codecs, in the columns of nccl-tests.

    torchrun --nproc-per-node 2 bench/collectives.py -b 1K -e 4M -f 4
    torchrun --nproc-per-node 2 bench/collectives.py -o all_reduce int8 topk:ratio=0.01
    python bench/links.py --ranks 2 --rate-mbit 1000 -- python bench/collectives.py -n 5

As in nccl-tests: `size` is the whole buffer (that of all ranks where they share it), in bytes;
`count` elements a rank gives or gets; algbw = size / time, busbw = algbw x what a rank sends of it
(2(n-1)/n for all_reduce; (n-1)/n for reduce_scatter, all_gather, all_to_all; 1 for broadcast);
GB/s are 1e9 bytes a second. Time is that of -n collectives one after another, over -n.

torch reduces and broadcasts in place only: out of place, a copy comes first and is in the time.

Exchanges average float gradients as commsched's engine does, one chunk alone: `enc` until the first
collective begins, `comm` while one is under way, `dec` the rest. busbw is that of an all-reduce of
the uncoded size. wire_bytes: what a rank sends; ratio: an exact all-reduce's bytes over that;
rel_err: |average - mean| / |mean| in the Euclidean norm, on random gradients, the largest over
ranks. #wrong counts, over all ranks, elements that are not what they must be; of a lossy codec
those that are not finite or are not the same on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from bench import machine
from bench.collective_checks import count_wrong, expected, pattern
from bench.collective_exchanges import Exchanges, ways
from bench.collective_rows import (
    AGGREGATES,
    HEADS,
    Result,
    Row,
    as_json,
    average_bus_bw,
    parse_size,
    result_of,
    sizes,
    text_of,
    wrong_in,
)
from commsched import codecs
from commsched.group import Board, Group, Membership
from commsched.linkprobe.collectives import IN_SHARDS, NAMES, ROOT, Call, Wires, drive, timed

DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
TIMEOUT_S = 120.0
NO_SWAP = "torch has none: what is sent would be overwritten"


class Raw:
    """Measures torch's collectives."""

    def __init__(self, wires: Wires, options: argparse.Namespace) -> None:
        self._wires = wires
        self._options = options
        self._dtype = DTYPES[options.dtype]

    def row(self, name: str, size: int) -> Row:
        """Both ways of one size."""
        reduces = name in ("all_reduce", "reduce_scatter")
        numel = size // self._dtype.itemsize
        part = numel // self._wires.size
        count = part if name in IN_SHARDS else numel
        whole = (part * self._wires.size if name in IN_SHARDS else numel) * self._dtype.itemsize
        results = [self._result(name, count and numel, in_place) for in_place in (False, True)]
        redop, root = self._options.op if reduces else "none", ROOT if name == "broadcast" else -1
        return Row(name, whole, count, self._options.dtype, redop, root, *results)

    def _result(self, name: str, numel: int, in_place: bool) -> Result | str:
        if not numel:
            return "fewer elements than ranks"
        if name == "all_to_all" and in_place:
            return NO_SWAP
        options, wires = self._options, self._wires
        call = Call(wires, name, numel, self._dtype, in_place, OPS[options.op])
        try:
            drive([call.start] * max(1, options.w), 1)
        except (RuntimeError, TypeError, ValueError) as error:
            wires.barrier()  # fails too where the reason is that a rank has gone
            return str(error).strip().splitlines()[0]
        own_s = timed(wires, lambda: drive([call.start] * options.n, 1)) / options.n
        times_s = [row[0] for row in wires.gathered([own_s])]
        wrong = sum(self.check(call) for _ in range(options.c)) if options.c else None
        return result_of(times_s, AGGREGATES[options.a], call.nbytes, name, wrong)

    def check(self, call: Call) -> int:
        """Run once on known data; the number of wrong elements on all ranks."""
        op, wires = self._options.op, self._wires
        call.recv.fill_(77)
        if call.name != "broadcast" or wires.rank == ROOT:
            own = pattern(call.name, wires.rank, call.send.numel(), self._dtype, op)
            call.send.copy_(own)
        drive([call.start], 1)
        wires.finish()
        right = expected(call, wires, self._dtype, op)
        ulps = wires.size if op == "avg" and self._dtype.is_floating_point else 0
        wrong = count_wrong(call.recv, right, ulps)
        return round(sum(row[0] for row in wires.gathered([wrong])))


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-b", type=parse_size, default="64K", metavar="SIZE", help="smallest size (64K)")
    add("-e", type=parse_size, default="4M", metavar="SIZE", help="largest size (4M)")
    add("-f", type=int, default=4, metavar="FACTOR", help="between sizes (4)")
    add("-n", type=int, default=20, metavar="ITERS", help="timed iterations (20)")
    add("-w", type=int, default=1, metavar="ITERS", help="iterations before them (1)")
    add("-c", type=int, default=1, metavar="TIMES", help="check results so many times (1)")
    add("-a", type=int, default=1, choices=range(4), help="time: 0 rank 0, 1 mean, 2 min, 3 max")
    add("-o", "--collective", nargs="+", default=[*NAMES, "exchanges"], metavar="NAME")
    add("--op", choices=[*OPS], default="sum", help="of all_reduce and reduce_scatter")
    add("-d", "--dtype", choices=[*DTYPES], default="float")
    add("--backend", choices=["gloo", "nccl"], default="gloo")
    add("--json", type=Path, help="write everything to this file")
    return parser


def _names(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    names: list[str] = []
    for name in options.collective:
        names += ways() if name == "exchanges" else [name]
    for name in names:
        if name not in NAMES and name not in ways():
            try:
                codecs.get(name)
            except ValueError as error:
                known = ", ".join((*NAMES, "exchanges", *ways()))
                parser.error(f"{name} is no collective and no codec ({error}): there are {known}")
    if min(options.n, options.f - 1) < 1 or min(options.w, options.c) < 0:
        parser.error("-n must be 1 or more, -f 2 or more, -w and -c 0 or more")
    if "RANK" not in os.environ:
        parser.error("start it on all ranks: torchrun --nproc-per-node 2 bench/collectives.py")
    return names


def _wires(backend: str) -> tuple[Wires, Wires | None]:
    """Torch's default group, and one of commsched's own, over gloo."""
    device = "cpu" if backend == "gloo" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    wires = Wires.of_world(device)
    if backend == "nccl":
        return wires, None
    member = Membership(dist.group.WORLD)
    return wires, Wires.of_group(Group(member, Board(member), 2, TIMEOUT_S))


def _measure(
    names: Sequence[str], options: argparse.Namespace, say: Callable[[str], None]
) -> list[Row]:
    wires, own = _wires(options.backend)
    raw, exchanges = (
        Raw(wires, options),
        None if own is None else Exchanges(own, options, DTYPES[options.dtype]),
    )
    say(f"# ranks: {wires.size}  backend: {options.backend}  iterations: {options.n}")
    whose = ("rank 0", "mean", "fastest", "slowest")[options.a]
    say(f"# warm-up: {options.w}  checks: {options.c}  ranks' time: {whose}")
    rows: list[Row] = []
    for name in names:
        is_exchange = name not in NAMES
        say(f"#\n# {'exchange: ' if is_exchange else ''}{name}")
        if is_exchange and exchanges is None:
            say("# N/A: commsched's exchanges are for gradients on the CPU: --backend gloo")
            continue
        for line in HEADS[is_exchange]:
            say(line)
        for size in sizes(options.b, options.e, options.f):
            row = exchanges.row(name, size) if is_exchange and exchanges else raw.row(name, size)
            rows.append(row)
            say(text_of(row, is_exchange))
    wires.barrier()
    return rows


def _document(rows: Sequence[Row], options: argparse.Namespace, began: datetime) -> dict[str, Any]:
    wrong = wrong_in(rows)
    return {
        **machine.describe(),
        "start_time": began.isoformat(timespec="seconds"),
        "end_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "args": sys.argv[1:],
        "config": {
            "minimum_bytes": options.b,
            "maximum_bytes": options.e,
            "step_factor": options.f,
            "warmup_iters": options.w,
            "iterations": options.n,
            "validation": options.c,
            "average": options.a,
            "backend": options.backend,
            "ranks": int(os.environ["WORLD_SIZE"]),
        },
        "results": [as_json(row) for row in rows],
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "average_bus_bandwidth": average_bus_bw(rows),
    }


def main() -> int:
    """One rank; returns 1 where results were wrong."""
    parser = _parser()
    options = parser.parse_args()
    names = _names(options, parser)
    began = datetime.now(UTC)
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    try:
        rows = _measure(names, options, lambda text: print(text, flush=True) if first else None)
    except RuntimeError as error:
        print(f"collectives: a rank has gone, or is late: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # gloo's threads may wait for it still
    wrong = wrong_in(rows)
    if first:
        checked = f"{wrong} {'OK' if not wrong else 'FAILED'}" if options.c else "not checked"
        print(f"#\n# Out of bounds values : {checked}")
        print(f"# Avg bus bandwidth    : {average_bus_bw(rows):.4f}")
        if options.json is not None:
            options.json.write_text(json.dumps(_document(rows, options, began), indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
