"""A commsched engine driven without DDP, and the means to measure it on all ranks of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench import machine
from commsched.engine import Engine
from commsched.group import Membership
from commsched.jobs import Job, Progress
from commsched.layout import BucketSpec, ParamSpec
from commsched.memory import Memory
from commsched.planner import Begin
from commsched.settings import Settings
from commsched.version import __version__

__all__ = ["TIMEOUT_S", "Driven", "described", "join", "member", "over_ranks", "timed"]

TIMEOUT_S = 60.0


class Driven:
    """An engine whose buckets are float32 tensors of given sizes. All ranks make it together.

    Args:
        settings: of the engine; `timeout_s` and `policy` must be chosen.
        numels: elements of each bucket, in the order in which they will be ready.
    """

    def __init__(self, settings: Settings, numels: Sequence[int]) -> None:
        self.engine = Engine(member(), settings, Memory())
        self._specs = [
            BucketSpec((ParamSpec(f"p{index}", numel),), "float32")
            for index, numel in enumerate(numels)
        ]
        self._progress, self._jobs = Progress(), list[Job]()

    def ready(self, buffer: torch.Tensor) -> None:
        """The next bucket's gradients are there: 1-D float32, averaged in place by `finish`."""
        index = len(self._jobs)
        self._jobs.append(Job(index, self._specs[index], buffer, self._progress))
        self.engine.submit(self._jobs[-1], None if index else Begin())

    def finish(self) -> None:
        """End the iteration: wait for every sum.

        Raises:
            CommSchedError: one failed.
        """
        self.engine.end(self._progress)
        self.engine.wait(self._progress.near.is_set)
        for job in self._jobs:
            job.raise_error()
        self._progress, self._jobs = Progress(), []

    def close(self) -> None:
        """End the engine's threads and its group."""
        self.engine.close()


def member(model: str = "") -> Membership:
    """All ranks of the job, for one more group of their own."""
    world = dist.group.WORLD
    assert world is not None
    return Membership(world, model)


def join() -> tuple[int, int]:
    """Join the job that torchrun or `bench/links.py` started, with one thread a rank.

    Returns:
        Rank and world size.

    Raises:
        SystemExit: no such job; says how to start one.
    """
    if "RANK" not in os.environ:
        raise SystemExit("start it on several ranks: torchrun --nproc-per-node 2 bench/....py")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return dist.get_rank(), dist.get_world_size()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all this rank's threads, of `action` after a barrier."""
    dist.barrier()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def over_ranks(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The mean and the largest over the ranks, value by value."""
    mean = torch.tensor(values, dtype=torch.float64)
    largest = mean.clone()
    dist.all_reduce(mean)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return list((mean / dist.get_world_size()).tolist()), list(largest.tolist())


def described() -> dict[str, Any]:
    """The head of a result file: `bench.machine.describe`, and commsched's own version."""
    head = machine.describe()
    return head | {"versions": head["versions"] | {"commsched": __version__}}
