"""One run of the probe on all ranks: meeting, measuring, and saying who is missing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commsched.errors import CommSchedError
from commsched.group import Board, Group, Membership
from commsched.linkprobe.collectives import Wires
from commsched.linkprobe.sweep import LANES, Sweep, sweep
from commsched.probe import probe_link
from commsched.profile import Link

__all__ = ["Probed", "run"]


@dataclass(frozen=True)
class Probed:
    """What one run found; the same on all ranks but for `rank`.

    Attributes:
        rank: of this process.
        world_size: the number of ranks.
        backend: "gloo" or "nccl".
        found: the measurements.
        short: what the engine's own probe finds; None where there is no engine.
        seconds: how long all of it took.
    """

    rank: int
    world_size: int
    backend: str
    found: Sweep
    short: Link | None
    seconds: float

    @property
    def title(self) -> str:
        """Which link it was."""
        return f"{self.world_size} ranks over {self.backend}"


class _Watch:
    """Counts what this rank begins, on the board, so that others can tell who is missing."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._begun = 0
        self._doing = "connecting"

    def __call__(self, what: str) -> None:
        self._begun += 1
        self._doing = what
        self.board.say(self._begun)

    def lost(self, error: RuntimeError) -> CommSchedError:
        """The error to raise for one of a collective's."""
        try:
            time.sleep(0.5)  # ranks that wait as this one does have said so by then
            missing = self.board.behind(self._begun - 1)
            whom = f"ranks that did not come: {missing}" if missing else "all ranks had begun it"
        except RuntimeError:
            whom = "the store of the job, on rank 0, does not answer"
        return CommSchedError(
            f"the probe stopped at {self._doing}: {str(error).strip()}. {whom}. See what they "
            "printed, and start all ranks again"
        )


def run(budget_s: float, quick: bool, backend: str | None, timeout_s: float) -> Probed:
    """Measure. All ranks of the job call it; `torchrun` has set their environment.

    Args:
        budget_s: for measuring; see `commsched.linkprobe.sweep.sweep`.
        quick: likewise.
        backend: "gloo", "nccl", or None: nccl where there are GPUs.
        timeout_s: the longest that any wait may take.

    Raises:
        CommSchedError: the ranks did not meet, or one has gone.
    """
    has_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    backend = backend or ("nccl" if has_gpu else "gloo")
    began_s = time.monotonic()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise CommSchedError(
            f"the ranks did not meet within {timeout_s:g} s: {str(error).strip()}. Does every rank "
            "run this, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from None
    member = Membership(c10d._get_default_group())
    watch = _Watch(Board(member))
    group: Group | None = None
    try:
        if backend == "gloo":
            group = Group(member, watch.board, max(LANES), timeout_s)
            wires = Wires.of_group(group)
        else:
            wires = Wires.of_world(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            torch.cuda.set_device(wires.device)
        found = sweep(wires, budget_s, quick, said=watch)
        short = probe_link(group) if group is not None else None
        watch("leaving")
        wires.barrier()
    except CommSchedError:
        raise
    except RuntimeError as error:
        if group is not None:
            group.abandon()
        raise watch.lost(error) from None
    dist.destroy_process_group()
    seconds = time.monotonic() - began_s
    return Probed(member.rank, len(member.ranks), backend, found, short, seconds)
