"""Exchanges: how one encoded chunk is summed over ranks.

An exchange is a generator: it yields each collective it has started and is resumed, on the
engine's thread, with that collective's result. So an exchange of several stages is a state machine
that the engine drives, and nothing ever waits, or does anything, inside a future callback: gloo
runs those on its few worker threads, and one that waits for the same group deadlocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Collectives", "Exchange", "Stages", "get", "wire_bytes"]

Stages = Generator[dist.Work, list[torch.Tensor], torch.Tensor]


class Collectives(Protocol):
    """The collectives of a lane's group. Each starts at once and returns its handle."""

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Sum over ranks, in place (dense) or into the handle's result (sparse)."""
        ...


Exchange = Callable[[Collectives, torch.Tensor], Stages]


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


def wire_bytes(wire: torch.Tensor, size: int) -> int:
    """Bytes that this rank sends to sum `wire` over `size` ranks, without protocol headers."""
    if wire.is_sparse:
        entries = wire._values().nbytes + wire._indices().nbytes
        return (size - 1) * entries
    return 2 * (size - 1) * wire.nbytes // size


_EXCHANGES: dict[str, Exchange] = {
    "ring_all_reduce": ring_all_reduce,
    "sparse_all_reduce": sparse_all_reduce,
}


def get(name: str) -> Exchange:
    """The exchange of that name (a codec's `exchange`, or "sparse_all_reduce")."""
    return _EXCHANGES[name]
