"""Our own process group over the ranks of DDP's, and the board on which ranks say where they are.

Never DDP's own group: DDP broadcasts buffers and rebuilt buckets on it from the training thread,
and gloo matches collectives by the order in which each rank issues them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commsched.errors import CommSchedError
from commsched.layout import digest_of

__all__ = ["Board", "Group", "Membership", "abandon", "timeout_of"]

POLL_S = 0.005
WARN_S = 30.0  # ranks start together; later than this, something is probably wrong

logger = logging.getLogger("commsched")
_serials: dict[str, int] = {}


class Membership:
    """Which ranks take part, and a name for the group that no other group of theirs has.

    Made on the training thread at a model's first bucket. Models that are alike in group, names and
    shapes must come there in the same order on all ranks; their serial numbers then agree. torch
    cannot make a group again under a name used before.
    """

    def __init__(self, process_group: dist.ProcessGroup, model: str = "") -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(process_group))
        self.global_rank: int = dist.get_rank()
        self.rank: int = self.ranks.index(self.global_rank)
        # Its own group and its parameters are in the name: two models whose first backwards begin
        # in another order on another rank must not meet each other.
        key = digest_of([process_group.group_name, self.ranks, model])
        serial = _serials[key] = _serials.get(key, 0) + 1
        self.name = f"commsched/{key}/{serial}"


class Board:
    """Keys in the job's own store: who has come, how far each has got, who has failed.

    Read and written only while something is late, so a healthy job costs the store nothing.
    """

    def __init__(self, member: Membership) -> None:
        self.member = member
        store = c10d._get_default_store()
        # A connection of our own: a store serves one request at a time, and DDP may be waiting
        # in the shared one.
        self.store: Any = c10d.PrefixStore(member.name, store.clone())  # type: ignore[attr-defined]

    def join(self, deadline_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until every rank has come here.

        Raises:
            CommSchedError: not all came within `deadline_s` seconds; names those missing.
        """
        self.store.set(f"join/{self.member.rank}", "1")
        keys = [f"join/{rank}" for rank in range(len(self.member.ranks))]
        began_s = time.monotonic()
        warned = False
        while not self.store.check(keys):
            if cancelled():
                raise CommSchedError("closed before the other ranks had come")
            if (said := self.failure() or self._switched_off()) is not None:
                raise CommSchedError(said)
            waited_s = time.monotonic() - began_s
            if waited_s > deadline_s or (waited_s > WARN_S and not warned):
                missing = [r for r, key in enumerate(keys) if not self.store.check([key])]
                text = (
                    f"ranks {self._global(missing)} have not reached their first gradient bucket "
                    f"within {waited_s:.1f} s (timeout_s={deadline_s:g}); is the hook registered "
                    "on every rank, and does every rank run backward()?"
                )
                if waited_s > deadline_s:
                    raise CommSchedError(text)
                logger.warning("%s", text)
                warned = True
            time.sleep(POLL_S)

    def switch_off(self) -> None:
        """Tell ranks that come to `join` that this one leaves its gradients to torch."""
        self.store.set("off", str(self.member.global_rank))

    def _switched_off(self) -> str | None:
        if not self.store.check(["off"]):
            return None
        rank, own = self.store.get("off").decode(), self.member.global_rank
        return (
            f"ranks have different settings: enabled is False on rank {rank} and True on rank "
            f"{own}. Set it equally and restart the job"
        )

    def say(self, issued: int) -> None:
        """Publish how many tasks this rank has issued since it started."""
        self.store.set(f"at/{self.member.rank}", str(issued))

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one has failed, so they need not wait for the deadline."""
        self.store.set(f"failed/{self.member.rank}", reason)
        self.store.set("failed", str(self.member.rank))

    def failure(self) -> str | None:
        """What another rank has said of its failure."""
        if not self.store.check(["failed"]):
            return None
        rank = int(self.store.get("failed"))
        if rank == self.member.rank:
            return None
        reason = self.store.get(f"failed/{rank}").decode()
        return f"rank {self.member.ranks[rank]} failed: {reason}"

    def behind(self, issued: int) -> list[int]:
        """Global ranks that have not said that they issued more than `issued` tasks."""
        late = []
        for rank in range(len(self.member.ranks)):
            key = f"at/{rank}"
            said = int(self.store.get(key)) if self.store.check([key]) else 0
            if rank != self.member.rank and said <= issued:
                late.append(rank)
        return self._global(late)

    def _global(self, ranks: Sequence[int]) -> list[int]:
        return [self.member.ranks[rank] for rank in ranks]


class Group:
    """A gloo group of our own, with as many worker threads as tasks may be in flight."""

    def __init__(self, member: Membership, board: Board, threads: int, timeout_s: float) -> None:
        self.rank = member.rank
        self.size = len(member.ranks)
        gloo: Any = dist.ProcessGroupGloo  # its stub lacks most of what it has
        options = gloo._Options()
        options._threads = threads
        options._devices = _devices()
        options._timeout = timedelta(seconds=timeout_s)
        # Built by hand: new_group() ignores the number of threads and gives gloo two, so that a
        # third collective would queue behind them.
        store = c10d.PrefixStore("gloo", board.store)
        self._backend = gloo(store, self.rank, self.size, options)

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Start summing `tensor` over ranks (1-D contiguous, or sparse COO)."""
        work: dist.Work = self._backend.allreduce([tensor])
        return work

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> dist.Work:
        """Start sending the parts of `inp`, one to each rank, and filling `out` with theirs.

        Both are 1-D contiguous, of one dtype (not complex), and lie apart. The sizes are those of
        the parts, in elements, by rank; what this rank sends itself is copied. All parts travel at
        once, straight from `inp` and into `out`: gloo takes no memory of its own for it, unlike
        its all-gather, which gathers into a new tensor and copies.
        """
        work: dist.Work = self._backend.alltoall_base(out, inp, list(out_sizes), list(in_sizes))
        return work

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Start sending `tensor` (contiguous) to one rank, which receives it."""
        work: dist.Work = self._backend.send([tensor], to, 0)
        return work

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start filling `tensor` (contiguous) with what one rank sends."""
        work: dist.Work = self._backend.recv([tensor], source, 0)
        return work

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Rank 0's payload, on every rank. Blocks."""
        size = torch.tensor([len(payload)])
        self._broadcast(size)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data = _to_tensor(payload, len(payload))
        self._broadcast(data)
        return bytes(data.tolist())

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Blocks."""
        sizes = [int(size) for size in self.all_gather(torch.tensor([len(payload)]))]
        rows = self.all_gather(_to_tensor(payload, max(sizes)))
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]

    def abandon(self) -> None:
        """Give the group up without destroying it: see `abandon`."""
        abandon(self._backend)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([tensor], options).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, by rank; all of one shape. Blocks."""
        rows = [torch.zeros_like(tensor) for _ in range(self.size)]
        self._backend.allgather([rows], [tensor]).wait()
        return rows


def abandon(group: Any) -> None:
    """Keep torch's group alive until the process exits, so that it is never destroyed.

    Its destructor joins worker threads that may be stuck in a collective whose peer is gone; gloo
    has no abort.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def timeout_of(process_group: dist.ProcessGroup) -> float:
    """The seconds after which collectives of `process_group` fail; torch's default if unknown."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout.total_seconds()
    return float(dist.default_pg_timeout.total_seconds())


def _to_tensor(payload: bytes, size: int) -> torch.Tensor:
    return torch.tensor(list(payload.ljust(size, b"\0")), dtype=torch.uint8)


def _devices() -> list[dist.ProcessGroupGloo.Device]:
    # What torch does for its own groups: the interfaces named, else the host name's.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo.create_device
    if names:
        return [make(interface=name) for name in names]
    return [dist.ProcessGroupGloo.create_default_device()]
