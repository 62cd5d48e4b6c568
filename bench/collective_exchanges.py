"""Every exchange x codec of commsched on one chunk, for bench/collectives.py.

Driven by the engine's own packer and exchanges, one chunk at a time, as commsched averages it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from statistics import fmean

import torch

from bench.collective_checks import count_unequal, count_wrong, pattern
from bench.collective_rows import AGGREGATES, Coding, Row, result_of
from commsched import codecs
from commsched.exchange import Transfer, sent_share
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.linkprobe.collectives import Wires
from commsched.memory import Memory
from commsched.packer import Packer
from commsched.plan import Plan, Task

__all__ = ["RS_AG", "Averaging", "Exchanges", "Phases", "ways"]

RS_AG = "none/rs_ag"  # what policy rs_ag does
_LATE = 10**6  # a step after any codec's warm-up


@dataclass(frozen=True)
class Phases:
    """Seconds of one average on one rank.

    Attributes:
        enc_s: until the first collective begins.
        comm_s: while one is under way.
        dec_s: the rest: decoding, adding up, and encoding again between two collectives.
    """

    enc_s: float
    comm_s: float
    dec_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.enc_s + self.comm_s + self.dec_s

    @classmethod
    def mean(cls, rows: list[Phases]) -> Phases:
        """Of several."""
        columns = [(row.enc_s, row.comm_s, row.dec_s) for row in rows]
        return cls(*(fmean(column) for column in zip(*columns, strict=True)))


def ways() -> tuple[str, ...]:
    """All there are: each codec by its name, and exact gradients in two halves."""
    first, *others = codecs.names()
    return (first, RS_AG, *others)


class Averaging:
    """One chunk of gradients and the tasks that average it.

    Args:
        wires: the group.
        way: a codec's text, or `RS_AG`.
        numel: gradients.
        dtype: of the bucket.

    Raises:
        ValueError: no such codec, or it takes no such gradients.
    """

    def __init__(self, wires: Wires, way: str, numel: int, dtype: torch.dtype) -> None:
        self.codec = codecs.get("none" if way == RS_AG else way)
        if not self.codec.supports(dtype):
            raise ValueError(f"codec {way} leaves {dtype} gradients as they are")
        self.ops = ("reduce_scatter", "all_gather") if way == RS_AG else self.codec.ops
        self.grads = torch.zeros(numel, dtype=dtype)
        self.bucket = torch.zeros(numel, dtype=dtype)
        self.sent_bytes = 0
        self._wires = wires
        self._plan = _plan(self.codec, self.ops, numel, dtype)
        self.codec.prepare()
        self.forget()

    def forget(self) -> None:
        """Begin as in the first step: no errors kept."""
        self._packer = Packer(self._wires.rank, self._wires.size, Memory())
        self._step = _LATE

    @property
    def lossy(self) -> bool:
        """Whether the average may differ from the exact one."""
        return self.codec.lossy

    @property
    def exact_bytes(self) -> float:
        """What a rank would send without a codec."""
        return self.grads.nbytes * sent_share("all_reduce", self._wires.size)

    def once(self) -> Phases:
        """Average `grads` into `bucket`: in place, in a copy that is made before the clock runs."""
        self.bucket.copy_(self.grads)
        clock = _Clock()
        for transfer in self._transfers(clock):
            self.sent_bytes += transfer.sent_bytes
        self._step += 1
        return clock.phases()

    def _transfers(self, clock: _Clock) -> Iterator[Transfer]:
        job = Job(0, self._plan.layout.buckets[0], self.bucket, Progress())
        before: Run | None = None
        self.sent_bytes = 0
        for task in self._plan.tasks:
            run = Run(task, self._plan, set(), {0: job}, step=self._step, after=before)
            transfer = self._packer.pack(run)
            yield transfer
            result = self._exchanged(transfer, clock)
            self._packer.unpack(run, result)
            run.done = True
            before = run
        clock.lap("dec")

    def _exchanged(self, transfer: Transfer, clock: _Clock) -> torch.Tensor:
        stages = transfer.start(self._wires)
        work = next(stages)
        clock.lap("enc" if clock.fresh else "dec")
        work.wait()
        clock.lap("comm")
        try:
            stages.send([])
        except StopIteration as stop:
            result: torch.Tensor = stop.value
            return result
        raise AssertionError("an exchange starts one collective")


class _Clock:
    """Adds up what passes between laps, by name."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self._since_s = time.perf_counter()

    @property
    def fresh(self) -> bool:
        return not self.took_s

    def lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self.took_s[name] = self.took_s.get(name, 0.0) + now_s - self._since_s
        self._since_s = now_s

    def phases(self) -> Phases:
        return Phases(*(self.took_s[name] for name in ("enc", "comm", "dec")))


def _plan(codec: codecs.Codec, ops: tuple[str, ...], numel: int, dtype: torch.dtype) -> Plan:
    """One bucket of one parameter, a matrix as square as possible; one chunk of all of it."""
    rows = next(rows for rows in range(isqrt(numel), 0, -1) if numel % rows == 0)
    kind = str(dtype).removeprefix("torch.")
    spec = BucketSpec((ParamSpec("gradients", numel, (rows, numel // rows)),), kind)
    chunk = Chunk((Piece(0, 0, numel, rows if rows > 1 else 0),), kind)
    tasks = (Task(at, op, chunk, str(codec), at) for at, op in enumerate(ops))
    return Plan("bench", Layout((spec,)), tuple(tasks), max(1, chunk.nbytes))


class Exchanges:
    """Measures commsched's exchanges, over a group of its own."""

    def __init__(self, wires: Wires, options: argparse.Namespace, dtype: torch.dtype) -> None:
        self._wires = wires
        self._options = options
        self._dtype = dtype

    def row(self, way: str, size: int) -> Row:
        """One size."""
        options, dtype = self._options, self._dtype
        numel = size // dtype.itemsize
        head = way, numel * dtype.itemsize, numel, options.dtype, "avg", -1, "in place only"
        if not numel:
            return Row(*head, "fewer than one element")
        try:
            averaging = Averaging(self._wires, way, numel, dtype)
        except ValueError as error:
            return Row(*head, str(error))
        averaging.grads.copy_(self._gradients(averaging, self._wires.rank))
        for _ in range(max(1, options.w)):
            averaging.once()
        self._wires.barrier()
        own = Phases.mean([averaging.once() for _ in range(options.n)])
        rows = self._wires.gathered([own.enc_s, own.comm_s, own.dec_s, averaging.sent_bytes])
        pick = AGGREGATES[options.a]
        enc_s, comm_s, dec_s, sent = (pick(column) for column in zip(*rows, strict=True))
        wrong, rel_err = self.check(averaging) if options.c else (None, None)
        times_s = [sum(row[:3]) for row in rows]
        result = result_of(times_s, pick, averaging.grads.nbytes, "all_reduce", wrong)
        ratio = averaging.exact_bytes / sent if sent else 0.0
        times_us = 1e6 * enc_s, 1e6 * comm_s, 1e6 * dec_s
        return Row(*head, result, Coding(*times_us, round(sent), ratio, rel_err))

    def check(self, averaging: Averaging) -> tuple[int, float]:
        """Average once, as in the first step; wrong elements on all ranks, and the error."""
        averaging.forget()
        averaging.once()
        found, wires = averaging.bucket, self._wires
        rows = [self._gradients(averaging, rank).double() for rank in range(wires.size)]
        mean = torch.stack(rows).mean(0)
        if averaging.lossy:
            first = found.clone()
            wires.broadcast(first).wait()
            wrong = count_unequal(found, first)
        else:
            ulps = wires.size if found.is_floating_point() else 0
            wrong = count_wrong(found, mean.to(found.dtype), ulps)
        norm = float(mean.norm()) or 1.0
        rows_found = wires.gathered([wrong, float((found.double() - mean).norm()) / norm])
        return round(sum(row[0] for row in rows_found)), max(row[1] for row in rows_found)

    def _gradients(self, averaging: Averaging, rank: int) -> torch.Tensor:
        """Random for lossy codecs; else whole multiples of the number of ranks."""
        numel, dtype = averaging.grads.numel(), averaging.grads.dtype
        if averaging.lossy:
            return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        return self._wires.size * pattern("all_reduce", rank, numel, dtype, "sum")
