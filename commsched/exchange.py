"""Exchanges: how one encoded chunk is summed over ranks.

An exchange is a generator: it yields each collective it has started and is resumed, on the
engine's thread, with that collective's result. So an exchange with work to do after its collective
is a state machine that the engine drives, and nothing ever waits, or does anything, inside a future
callback: gloo runs those on few worker threads, and one that waits for the same group deadlocks.

Each starts one collective only. A second one would be started when the first is done on this rank,
so at another place among the lane's other tasks than on other ranks, and gloo pairs collectives by
the order in which they are started. What takes two is two tasks of the plan: `reduce_scatter`, and
`all_gather` later. Between them each rank has the sum of its *shard* of the chunk: shards lie in
rank order, and their sizes differ by one element at most.

Sums are not scaled here. Scaling inside the sum would save a pass, too little to measure, but
rounds once where scaling before it, as DDP does, rounds twice: other bits wherever a result is
subnormal, in fp16 below 6e-5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = [
    "Collectives",
    "Pool",
    "Stages",
    "Transfer",
    "all_gather",
    "reduce_scatter",
    "ring_all_reduce",
    "sent_share",
    "shard_sizes",
    "sparse_all_reduce",
    "spread",
    "summed",
    "swapped",
    "wire_bytes",
]

Stages = Generator[dist.Work, list[torch.Tensor], torch.Tensor]


class Collectives(Protocol):
    """The collectives of a lane's group. Each starts at once and returns its handle."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Sum over ranks, in place (dense) or into the handle's result (sparse)."""
        ...

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> dist.Work:
        """Send each rank its part of `inp`, fill `out` with theirs; sizes in elements, by rank."""
        ...


class Pool:
    """1-D CPU tensors to be used again. For one thread.

    A tensor may be given back only when no collective reads or writes it any more. One that is
    never given back, because a run was given up, is not missed.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._largest: dict[torch.dtype, int] = defaultdict(int)

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """An uninitialised tensor."""
        free = self._free[dtype]
        for index, tensor in enumerate(free):
            if tensor.numel() >= numel:
                return free.pop(index)[:numel]
        # As large as any of this dtype so far: then every tensor fits every request.
        self._largest[dtype] = max(self._largest[dtype], numel)
        return torch.empty(self._largest[dtype], dtype=dtype)[:numel]

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what `take` returned."""
        base = tensor._base
        self._free[tensor.dtype].append(tensor if base is None else base)


def ring_all_reduce(group: Collectives, wire: torch.Tensor) -> Stages:
    """One all-reduce of a tensor that may be summed as it is; the sum is `wire` itself.

    Bytes a rank sends: 2(n-1)/n x the encoded size (gloo: a ring for every size).
    """
    yield group.all_reduce(wire)
    return wire


def sparse_all_reduce(group: Collectives, wire: torch.Tensor) -> Stages:
    """Sum sparse COO tensors: gloo gathers all ranks' indices and values and adds them locally.

    Bytes a rank sends: (n-1) x its own entries. The result is a new tensor.
    """
    (total,) = yield group.all_reduce(wire)
    return total


def reduce_scatter(group: Collectives, wire: torch.Tensor, pool: Pool) -> Stages:
    """Sum every rank's values for this rank's shard, into the shard's place in `wire`.

    `wire` is 1-D contiguous and not complex; the rest of it keeps this rank's own values. Summed in
    rank order, so unlike in a ring an element's sum does not depend on where its chunk begins.
    gloo's own reduce_scatter is not used: it is a whole all-reduce.

    Bytes a rank sends: (n-1)/n x the encoded size.
    """
    own, sent, sizes, own_sizes = _split(group, wire)
    received = pool.take(wire.dtype, sum(own_sizes))
    yield group.all_to_all(received, sent, own_sizes, sizes)
    parts = list(torch.split(received, own_sizes))
    parts[group.rank] = own
    _sum(parts, own)
    pool.give(received)
    return wire


def all_gather(group: Collectives, wire: torch.Tensor, pool: Pool) -> Stages:
    """Send this rank's shard of `wire` to all; fill the rest of `wire` with the others' shards.

    Bytes a rank sends: (n-1)/n x the encoded size.
    """
    own, filled, sizes, own_sizes = _split(group, wire)
    if sum(own_sizes) == own.numel():  # one other rank
        yield group.all_to_all(filled, own, sizes, own_sizes)
        return wire
    copies = pool.take(wire.dtype, sum(own_sizes))
    for part in torch.split(copies, own_sizes):
        part.copy_(own[: part.numel()])
    yield group.all_to_all(filled, copies, sizes, own_sizes)
    pool.give(copies)
    return wire


def shard_sizes(numel: int, size: int) -> list[int]:
    """Elements in each rank's shard of a chunk."""
    least, more = divmod(numel, size)
    return [least + 1] * more + [least] * (size - more)


def _split(
    group: Collectives, wire: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
    """This rank's shard; what of `wire` travels; the sizes of its parts, and of the shard's copies.

    The own shard need not travel. Where it lies at an end of `wire` (on two ranks: always) it is
    left out; in the middle gloo copies it from this rank to itself.
    """
    rank, sizes = group.rank, shard_sizes(wire.numel(), group.size)
    start = sum(sizes[:rank])
    stop = start + sizes[rank]
    own = wire[start:stop]
    own_sizes = [own.numel()] * group.size
    if rank in (0, group.size - 1):
        sizes[rank] = own_sizes[rank] = 0
        wire = wire[stop:] if rank == 0 else wire[:start]
    return own, wire, sizes, own_sizes


def _sum(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Sum `parts`, in their order, into `out`, which is one of them. Destroys the first."""
    first, *middle, last = parts
    for part in middle:
        first.add_(part)
    torch.add(first, last, out=out)


@dataclass(frozen=True)
class Transfer:
    """One collective, ready to be started.

    Attributes:
        wire: what this rank sends, or sums in place; not to be written to until it is done.
        start: begins it.
        sent_bytes: what this rank sends, without protocol headers.
    """

    wire: torch.Tensor
    start: Callable[[Collectives], Stages]
    sent_bytes: int


def summed(wire: torch.Tensor, size: int) -> Transfer:
    """A ring all-reduce of `wire` over `size` ranks, in place; its result is `wire`."""
    return Transfer(wire, partial(ring_all_reduce, wire=wire), wire_bytes(wire, size))


def swapped(
    wire: torch.Tensor, received: torch.Tensor, sizes: Sequence[int], received_sizes: Sequence[int]
) -> Transfer:
    """An all-to-all: each rank gets its part of `wire`; theirs for us fill `received`.

    Args:
        wire: the parts, in rank order.
        received: the result.
        sizes: elements of each part of `wire`; 0 for this rank's own, which need not travel.
        received_sizes: elements of each part of `received`.
    """

    def start(group: Collectives) -> Stages:
        yield group.all_to_all(received, wire, received_sizes, sizes)
        return received

    return Transfer(wire, start, wire.nbytes)


def spread(own: torch.Tensor, filled: torch.Tensor, sizes: Sequence[int], rank: int) -> Transfer:
    """An all-gather of tensors whose sizes may differ, in rank order, into `filled`.

    Args:
        own: this rank's.
        filled: the result.
        sizes: elements of each rank's.
        rank: this one.
    """
    sizes, counts = list(sizes), [own.numel()] * len(sizes)
    before = sum(sizes[:rank])
    filled[before : before + own.numel()].copy_(own)
    out = filled
    if rank in (0, len(sizes) - 1):  # at an end: leave it out; else gloo copies it once more
        out = filled[own.numel() :] if rank == 0 else filled[:before]
        sizes[rank] = counts[rank] = 0

    def start(group: Collectives) -> Stages:
        copies = own if len(sizes) == 2 else own.repeat(len([c for c in counts if c]))
        yield group.all_to_all(out, copies, sizes, counts)
        return filled

    return Transfer(own, start, (len(sizes) - 1) * own.nbytes)


def sent_share(op: str, size: int) -> float:
    """Bytes a rank sends for one byte of its encoded chunk, on average over `size` ranks.

    Of n ranks, each sends 2(n-1)/n in a ring all-reduce, and half of that in a reduce-scatter or
    an all-gather of shards (Patarasuk and Yuan, 2009); n-1 where whole payloads go to all.
    """
    if op == "gather":
        return size - 1
    return (2 if op == "all_reduce" else 1) * (size - 1) / size


def wire_bytes(wire: torch.Tensor, size: int, op: str = "all_reduce") -> int:
    """Bytes that a rank sends for one task over `size` ranks, without protocol headers.

    Exact for sparse tensors; else the mean over ranks, whose shards may differ by one element.
    """
    if wire.is_sparse:
        entries = wire._values().nbytes + wire._indices().nbytes
        return (size - 1) * entries
    return int(sent_share(op, size) * wire.nbytes)
