"""One collective with its buffers, and timing it: for `linkprobe` and bench/collectives.py."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commsched import exchange
from commsched.exchange import Stages
from commsched.group import Group

__all__ = ["NAMES", "Call", "Start", "Wires", "drive", "sent_factor", "timed"]

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
IN_SHARDS = ("reduce_scatter", "all_gather", "all_to_all")  # the buffer has a part for each rank
ROOT = 0

Start = Callable[[], Stages]  # begins a collective; see `commsched.exchange`


def sent_factor(name: str, size: int) -> float:
    """Bytes that a rank sends for one byte of the whole buffer; nccl-tests' bus bandwidth factor.

    Args:
        name: one of `NAMES`. The whole buffer is that of all ranks together where they share it.
        size: the number of ranks. A broadcast's root sends at least the buffer.
    """
    return 1.0 if name == "broadcast" else exchange.sent_share(name, size)


class _Backend(Protocol):
    """What is used of torch's process groups and of their backends: both have all of it."""

    allreduce: Callable[..., dist.Work]
    alltoall_base: Callable[..., dist.Work]
    broadcast: Callable[..., dist.Work]
    _reduce_scatter_base: Callable[..., dist.Work]
    _allgather_base: Callable[..., dist.Work]


class Wires:
    """Starts torch's collectives on one process group, or on gloo's own object.

    Attributes:
        rank: of this process, among `size`.
        size: the number of ranks.
        device: where tensors must lie.
    """

    def __init__(self, backend: _Backend, rank: int, size: int, device: str = "cpu") -> None:
        self.rank, self.size = rank, size
        self.device = torch.device(device)
        self._backend = backend

    @classmethod
    def of_world(cls, device: str) -> Wires:
        """The default process group."""
        world: Any = dist.group.WORLD
        return cls(world, dist.get_rank(), dist.get_world_size(), device)

    @classmethod
    def of_group(cls, group: Group) -> Wires:
        """A group of our own."""
        return cls(group._backend, group.rank, group.size)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work:
        """Start reducing in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._backend.allreduce([tensor], options)

    def reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: Any = dist.ReduceOp.SUM
    ) -> dist.Work:
        """Start reducing `inp` over ranks; `out` gets this rank's part of it."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return self._backend._reduce_scatter_base(out, inp, options)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> dist.Work:
        """Start filling `out` with all ranks' `inp`, in rank order."""
        return self._backend._allgather_base(out, inp)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
    ) -> dist.Work:
        """Start sending each rank its part of `inp`; equal parts where no sizes are given."""
        return self._backend.alltoall_base(out, inp, list(out_sizes), list(in_sizes))

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start sending the root's tensor to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = ROOT
        return self._backend.broadcast([tensor], options)

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.all_reduce(torch.zeros(1, device=self.device)).wait()
        self.finish()

    def finish(self) -> None:
        """Wait for the accelerator, whose collectives are not done when `wait` returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, by rank: the same on all ranks. As many on each."""
        rows = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        rows[self.rank] = torch.tensor(values, dtype=torch.float64)
        self.all_reduce(rows.view(-1)).wait()
        self.finish()
        found: list[list[float]] = rows.tolist()
        return found


class Call:
    """One collective with its buffers.

    In place means what nccl-tests means by it. all_reduce, broadcast: `send` is `recv`.
    reduce_scatter: `recv` is this rank's part of `send`. all_gather: `send` is this rank's part of
    `recv`. all_to_all: `send` is `recv`, which no backend of torch's does.

    torch reduces and broadcasts in place only. Out of place these copy first, as a user must.

    Attributes:
        name: one of `NAMES`.
        numel: elements of the whole buffer; where it has parts, a multiple of the number of ranks.
        send: what this rank gives.
        recv: where the result lies.
    """

    def __init__(
        self,
        wires: Wires,
        name: str,
        numel: int,
        dtype: torch.dtype = torch.float32,
        in_place: bool = True,
        op: Any = dist.ReduceOp.SUM,
    ) -> None:
        part = numel // wires.size
        self.name, self.numel = name, part * wires.size if name in IN_SHARDS else numel
        self.in_place = in_place
        self._wires, self._op = wires, op
        whole = torch.zeros(self.numel, dtype=dtype, device=wires.device)
        own = whole[wires.rank * part : (wires.rank + 1) * part]
        if name == "reduce_scatter":
            self.send, self.recv = whole, own if in_place else torch.zeros_like(own)
        elif name == "all_gather":
            self.send, self.recv = own if in_place else torch.zeros_like(own), whole
        else:
            self.send, self.recv = whole if in_place else torch.zeros_like(whole), whole

    @property
    def nbytes(self) -> int:
        """Of the whole buffer."""
        return self.numel * self.send.element_size()

    def start(self) -> Stages:
        """Begin it by torch's own collective."""
        yield self._work()
        return self.recv

    def _work(self) -> dist.Work:
        wires = self._wires
        if self.name == "reduce_scatter":
            return wires.reduce_scatter(self.recv, self.send, self._op)
        if self.name == "all_gather":
            return wires.all_gather(self.recv, self.send)
        if self.name == "all_to_all":
            return wires.all_to_all(self.recv, self.send)
        if self.name == "broadcast":
            if not self.in_place and wires.rank == ROOT:
                self.recv.copy_(self.send)
            return wires.broadcast(self.recv)
        if not self.in_place:
            self.recv.copy_(self.send)
        return wires.all_reduce(self.recv, self._op)


def drive(starts: Iterable[Start], most: int) -> None:
    """Run collectives in order, at most `most` at once. Those begun first are waited for first."""
    waiting: deque[tuple[Stages, dist.Work]] = deque()
    for start in starts:
        if len(waiting) == most:
            _end(*waiting.popleft())
        stages = start()
        waiting.append((stages, next(stages)))
    while waiting:
        _end(*waiting.popleft())


def _end(stages: Stages, work: dist.Work) -> None:
    work.wait()
    for _ in stages:
        raise AssertionError("an exchange starts one collective")


def timed(
    wires: Wires, action: Callable[[], object], now: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds that `action` takes on this rank, after all ranks have come here. Collective."""
    wires.barrier()
    begin_s = now()
    action()
    wires.finish()
    return now() - begin_s
