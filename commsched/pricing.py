"""Pricing: what a codec costs in computing, and whether that is less than it saves on the link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.distributed as dist

from commsched import codecs
from commsched.codecs import Codec
from commsched.exchange import Pool, Transfer, sent_share
from commsched.layout import Chunk, Piece, Span
from commsched.memory import Memory
from commsched.parcel import Parcel, resumed
from commsched.plan import Task
from commsched.profile import Link

__all__ = ["Price", "coding_s", "price"]

ROWS = 1024
NUMEL = ROWS * ROWS  # 4 MB of gradients: a usual chunk
TIMES = 5
LATE = 10**6  # a step after any warm-up


@dataclass(frozen=True)
class Price:
    """What a byte of gradients takes with a codec and without: seconds."""

    codec: str
    coding_s: float  # encoding and decoding, one thread
    link_s: float
    exact_link_s: float

    @property
    def worth_it(self) -> bool:
        """Whether less time goes into coding than is saved on the link."""
        return self.link_s + self.coding_s < self.exact_link_s

    def __str__(self) -> str:
        return (
            f"codec {self.codec} takes {1e9 * self.coding_s:.2f} ms to encode and decode 1 MB of "
            f"gradients, and saves {1e9 * (self.exact_link_s - self.link_s):.2f} ms of "
            f"{1e9 * self.exact_link_s:.2f} on this link"
        )


def price(codec: str, own_coding_s: float, link: Link, world_size: int) -> Price:
    """The price of a codec on a link.

    Args:
        codec: its text.
        own_coding_s: as `coding_s` measures it, agreed over ranks.
        link: measured.
        world_size: the number of ranks.
    """
    tasks = _tasks(codecs.get(codec))
    sent = sum(task.sent_bytes(world_size) for task in tasks) / tasks[0].chunk.nbytes
    exact = sent_share("all_reduce", world_size)
    return Price(codec, own_coding_s, sent * link.beta_s, exact * link.beta_s)


@cache
def coding_s(codec: str, world_size: int, feedback: bool) -> float:
    """Seconds of this machine's one thread for a byte of gradients: all a codec does to average.

    Measured once, on a chunk of random numbers, against a group that answers at once: as if all
    ranks had sent what this one sends.
    """
    # The least: what disturbs a measurement only ever makes it longer.
    return min(_timed(codecs.get(codec), world_size, feedback)) / (4 * NUMEL)


def _timed(codec: Codec, world_size: int, feedback: bool) -> Iterator[float]:
    codec.prepare()
    memory, pool, mirror = Memory(), Pool(), _Mirror(world_size)
    grads = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for step in range(LATE, LATE + TIMES + 1):
        parcel = Parcel(
            _CHUNK, _SPANS, [grads.clone()], 0, world_size, step, memory, feedback, pool
        )
        began_s, mirror.own_s = time.perf_counter(), 0.0
        rounds = codec.rounds(parcel)
        transfer: Transfer | None = next(rounds)
        while transfer is not None:
            transfer = resumed(rounds, _answer(transfer, mirror))
        if step > LATE:  # the first one makes the buffers
            yield time.perf_counter() - began_s - mirror.own_s


def _answer(transfer: Transfer, mirror: _Mirror) -> torch.Tensor:
    """What the exchange returns, by way of the mirror."""
    stages = transfer.start(mirror)
    next(stages)
    try:
        stages.send([transfer.wire])
    except StopIteration as stop:
        return cast(torch.Tensor, stop.value)
    raise AssertionError("an exchange starts one collective")


_CHUNK = Chunk((Piece(0, 0, NUMEL, ROWS),), "float32")
_SPANS = (Span("pricing", NUMEL, 0, 0, NUMEL),)


def _tasks(codec: Codec) -> list[Task]:
    return [Task(0, op, _CHUNK, str(codec), number) for number, op in enumerate(codec.ops)]


class _Mirror:
    """A group whose other ranks all send what this one sends."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.own_s = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """As if the others sent zeros."""
        del tensor
        return dist.Work()

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> dist.Work:
        """Fill each part of `out` with the first part of `inp`."""
        began_s = time.perf_counter()
        sent = inp[: next((size for size in in_sizes if size), 0)]
        for part in torch.split(out, list(out_sizes)):
            part.copy_(sent[: part.numel()])
        self.own_s += time.perf_counter() - began_s
        return dist.Work()
