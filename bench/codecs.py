"""How fast the codecs' kernels are, on one thread, each beside plain torch in the same run.

    python bench/codecs.py --json out.json
    python bench/codecs.py --codecs int8 topk:ratio=0.001 --sizes 4194304

GB/s are bytes of fp32 gradients over time, whatever the operation also reads and writes. Plain
torch: for the sparse and the low-rank codecs what `bench/plain_codecs.py` has, with torch.topk and
matrix products; for the others their own version for where numba is missing. Both take turns, and
what an operation changes is put back before the next, outside the time. Medians over all calls.

Codecs with rounds of their own have no encode and decode apart from them. Their `rounds` are all
that a rank of two computes to average one chunk of 4 MiB with error feedback, as commsched prices
them (`commsched.pricing.coding_s`).

fp16 and bf16 have no kernels: torch against torch, so their ratio shows the noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from unittest import mock

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.plain_codecs import has_plain_rounds, plain_operations, plain_rounds
from commsched import codecs, pricing
from commsched.codecs import ByteCodec, Codec, Gathered, Sharded, Summed, kernels
from commsched.codecs.topk import TopK
from commsched.layout import Chunk, Piece

__all__ = ["TARGETS_GB_S", "Row", "main", "row_of", "verdict"]

SIZES = (2**22, 2**18)
LARGEST = max(SIZES)
RANKS = 2
MOST_CALLS = 16  # of a small operation in one round

# What the kernels are asked for: (codec, operation) -> GB/s.
TARGETS_GB_S = {
    ("int8", "encode_feedback"): 4.0,
    ("int8", "decode"): 10.0,
    ("sign", "encode_feedback"): 4.0,
    ("topk", "encode"): 1.0,
    ("topk", "encode_feedback"): 1.0,
}

Timer = Callable[[], list[float]]  # seconds of some calls


@dataclass(frozen=True)
class Contest:
    """One operation of one codec, twice: by commsched and in plain torch."""

    codec: str
    operation: str
    numel: int
    ours: Timer
    plain: Timer


@dataclass(frozen=True)
class Row:
    """One contest's result.

    Attributes:
        codec: its text.
        operation: "encode", "encode_feedback", "decode", "decode_add", or "rounds".
        numel: gradients, float32.
        gb_s, plain_gb_s: bytes of gradients over the median time.
        ratio: how many times as fast as plain torch.
        target_gb_s: what is asked for, where anything is.
        ours_s, plain_s: of each call.
    """

    codec: str
    operation: str
    numel: int
    gb_s: float
    plain_gb_s: float
    ratio: float
    target_gb_s: float | None
    ours_s: list[float] = field(repr=False)
    plain_s: list[float] = field(repr=False)


def row_of(
    codec: str, operation: str, numel: int, ours_s: list[float], plain_s: list[float]
) -> Row:
    """The row of the times of all calls."""
    gb = 4e-9 * numel
    own_s, other_s = median(ours_s), median(plain_s)
    target = TARGETS_GB_S.get((codec.partition(":")[0], operation))
    return Row(
        codec, operation, numel, gb / own_s, gb / other_s, other_s / own_s, target, ours_s, plain_s
    )


def verdict(row: Row) -> str:
    """The target and whether it is met, in words; nothing where there is none."""
    if row.target_gb_s is None:
        return ""
    return f">= {row.target_gb_s:g}: {'met' if row.gb_s >= row.target_gb_s else 'not met'}"


# ---------------------------------------------------------------- what is timed


class _Operations:
    """The operations of one codec on one chunk of random gradients."""

    def __init__(self, codec: ByteCodec | Summed, numel: int) -> None:
        self.codec = codec
        self.grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        self._kept_error = 0.1 * self.grad.roll(1)
        self.error = self._kept_error.clone()
        self.out = torch.zeros(numel)
        if isinstance(codec, ByteCodec):
            self.wire = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
        else:
            self.wire = codec.wire(Chunk((Piece(0, 0, numel),), "float32")).empty()
        codec.encode(self.grad, self.wire)

    def reset(self) -> None:
        """Errors as they were: encoding the same gradients over and over would pile them up."""
        self.error.copy_(self._kept_error)

    def actions(self) -> dict[str, Callable[[], object]]:
        codec, grad, wire, out = self.codec, self.grad, self.wire, self.out
        found: dict[str, Callable[[], object]] = {
            "encode": lambda: codec.encode(grad, wire),
            "encode_feedback": lambda: codec.encode_feedback(grad, self.error, wire),
            "decode": lambda: codec.decode(wire, out),
        }
        if isinstance(codec, ByteCodec):
            found["decode_add"] = lambda: codec.decode_add(wire, out)
        return found


def _missing(family: str) -> None:
    """As `kernels.load` without numba. Not a mock, which takes longer than some calls."""
    del family


def _timer(
    action: Callable[[], object], reset: Callable[[], None], calls: int, compiled: bool = True
) -> Timer:
    """Times single calls; with `compiled` False as if numba were missing."""

    def timed() -> list[float]:
        took_s = []
        for _ in range(calls):
            reset()
            began_s = time.perf_counter()
            action()
            took_s.append(time.perf_counter() - began_s)
        return took_s

    def without_kernels() -> list[float]:
        with mock.patch.object(kernels, "load", _missing):
            return timed()

    return timed if compiled else without_kernels


def _has_own_rounds(codec: Codec) -> bool:
    shared = Summed.rounds, Sharded.rounds, Gathered.rounds
    return type(codec).rounds not in shared


def _operation_contests(text: str, numel: int) -> Iterator[Contest]:
    codec = codecs.get(text)
    assert isinstance(codec, ByteCodec | Summed)
    operations = _Operations(codec, numel)
    plain = None
    if isinstance(codec, TopK):
        plain = plain_operations(codec, operations.grad, operations.error)
    calls = min(MOST_CALLS, max(1, LARGEST // numel))
    for name, action in operations.actions().items():
        other = action if plain is None else plain[name]
        yield Contest(
            text,
            name,
            numel,
            _timer(action, operations.reset, calls),
            _timer(other, operations.reset, calls, compiled=plain is not None),
        )


def _rounds_contest(text: str) -> Contest:
    codec = codecs.get(text)
    grads = torch.randn(pricing.NUMEL, generator=torch.Generator().manual_seed(0))
    grad = grads.clone()

    def ours() -> list[float]:
        return [4 * pricing.NUMEL * pricing.coding_s.__wrapped__(text, RANKS, True)]

    if has_plain_rounds(codec):
        action = plain_rounds(text, grad, pricing.ROWS, RANKS)
        plain = _timer(action, lambda: _restore(grad, grads), pricing.TIMES)
    else:

        def plain() -> list[float]:
            with mock.patch.object(kernels, "load", _missing):
                return ours()

    return Contest(text, "rounds", pricing.NUMEL, ours, plain)


def _restore(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    tensor.copy_(kept)


def contests(texts: Sequence[str], sizes: Sequence[int]) -> Iterator[Contest]:
    """All that is to be measured, one at a time: each holds some copies of the gradients."""
    for text in texts:
        if _has_own_rounds(codecs.get(text)):
            yield _rounds_contest(text)
            continue
        for numel in sizes:
            yield from _operation_contests(text, numel)


def measure(contest: Contest, rounds: int) -> Row:
    """Both in turns, after one turn each that does not count."""
    contest.ours()
    contest.plain()
    ours_s: list[float] = []
    plain_s: list[float] = []
    for _ in range(rounds):
        ours_s += contest.ours()
        plain_s += contest.plain()
    return row_of(contest.codec, contest.operation, contest.numel, ours_s, plain_s)


# ---------------------------------------------------------------- the command


def _table(rows: Sequence[Row], cpu: str) -> Table:
    table = Table(title=f"one thread of {cpu}; fp32 side", title_justify="left")
    for head in ("codec", "operation"):
        table.add_column(head, no_wrap=True)
    for head in ("gradients", "GB/s", "plain torch", "times as fast", "ms / MB"):
        table.add_column(head, justify="right")
    table.add_column("target GB/s", no_wrap=True)
    for row in rows:
        size = f"{row.numel / 2**20:g} Mi" if row.numel >= 2**20 else f"{row.numel / 2**10:g} Ki"
        figures = f"{row.gb_s:.2f}", f"{row.plain_gb_s:.2f}", f"{row.ratio:.2f}"
        ms_per_mb = f"{1 / row.gb_s:.3f}"  # 1 GB/s is 1 ms for a MB
        table.add_row(row.codec, row.operation, size, *figures, ms_per_mb, verdict(row))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [name for name in codecs.names() if codecs.get(name).lossy]
    parser.add_argument("--codecs", nargs="+", default=every, metavar="CODEC")
    parser.add_argument("--sizes", nargs="+", type=int, default=[*SIZES], metavar="NUMEL")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def _write(path: Path, rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        figures = asdict(row)
        for key in ("ours_s", "plain_s"):
            figures[key] = [float(f"{seconds:.4g}") for seconds in figures[key]]
        for key in ("gb_s", "plain_gb_s", "ratio"):
            figures[key] = round(figures[key], 3)
        lines.append(json.dumps(figures))
    head = json.dumps(machine.describe() | {"threads": 1}, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


def main() -> int:
    """Measures all; returns 2 for a codec or a size that does not exist."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    try:
        for text in options.codecs:
            if not codecs.get(text).lossy:
                raise ValueError(f"codec {text!r} encodes nothing")
        if min(options.sizes) < 1 or options.rounds < 1:
            raise ValueError("--sizes and --rounds must be 1 or more")
    except ValueError as error:
        print(f"codecs: {error}", file=sys.stderr)
        return 2
    for text in options.codecs:
        codecs.get(text).prepare()
    rows = [measure(one, options.rounds) for one in contests(options.codecs, options.sizes)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(rows, machine.describe()["machine"]["cpu"]))
    if options.json is not None:
        _write(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
