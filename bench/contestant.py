"""One hook of a comparison, with the model it works for: warmed up, measured in rounds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bench.figures import HookFigures, RankConfig, Round
from bench.hooks import HookSpec, register
from bench.links import wire_bytes
from bench.workloads.base import Workload

__all__ = ["Contestant", "memory_mb"]


class Contestant:
    """One hook with the DDP model and the optimizer it works for.

    Made by all ranks together; it warms up at once. Where the hook is refused, `runs` is False and
    `figures.status` says why.
    """

    def __init__(self, spec: HookSpec, workload: Workload, config: RankConfig) -> None:
        self.spec = spec
        self.figures = HookFigures()
        self._workload = workload
        self._step_index = 0
        self._state: Any = None
        _trim()
        before_mb = memory_mb("VmRSS")
        self.ddp = _wrap(spec, workload, config)
        self._optimizer: Optimizer = workload.optimizer(self.ddp.parameters())
        if not self._register():
            return
        self.run(spec.warmup(config.warmup))
        _trim()
        self.figures.rss_mb = memory_mb("VmRSS") - before_mb

    @property
    def runs(self) -> bool:
        """False when the hook was refused."""
        return self.figures.status == "ok"

    def _register(self) -> bool:
        """Registers the hook; False, on every rank, if any rank's refused."""
        try:
            self._state = register(self.spec, self.ddp, self._optimizer)
        except Exception as error:  # one hook that is refused must not end the bench
            text = (str(error).strip().splitlines() or [""])[0]
            self.figures.status = f"refused: {type(error).__name__}: {text}"
        all_agree = _all_agree(self.runs)
        if self.runs and not all_agree:
            self.figures.status = "refused on another rank"
        return all_agree

    def run(self, steps: int) -> Round:
        """Some steps, and whatever communication they have left under way."""
        start_s = time.perf_counter()
        ends_s = []
        for _ in range(steps):
            self.figures.loss = self._workload.step(self.ddp, self._optimizer, self._step_index)
            self._step_index += 1
            ends_s.append(time.perf_counter())
        # Within the time: what is left would slow the next hook, and comes from these steps.
        _call_if_there(self._state, "flush", "synchronize")
        return Round(start_s, tuple(ends_s), time.perf_counter())

    def measure(self, steps: int) -> None:
        """One round: `steps` steps between two barriers."""
        dist.barrier()
        sent = wire_bytes()
        dist.barrier()  # on loopback all ranks share the counter: read before anyone goes on
        self.figures.add(self.run(steps))
        dist.barrier()
        self.figures.sent_bytes.append((wire_bytes() - sent) / steps)

    def finish(self) -> None:
        """Takes the hook's own report and lets go of it."""
        report = _call_if_there(self._state, "report") if self.spec.name == "commsched" else None
        if report is not None:
            as_dict = report if isinstance(report, dict) else _call_if_there(report, "to_dict")
            self.figures.report = as_dict or {"exposed_ms": getattr(report, "exposed_ms", None)}
        _call_if_there(self._state, "close", "shutdown")


def memory_mb(key: str) -> float:
    """One line of /proc/self/status, `VmRSS` or `VmHWM`, in MB (1e6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(key)


def _wrap(spec: HookSpec, workload: Workload, config: RankConfig) -> DistributedDataParallel:
    """DDP with the arguments of the hook's text, else those of the command line."""
    arguments = {
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        **spec.ddp,
    }
    # All ranks make the same parameters, so sending rank 0's around would only take time.
    return DistributedDataParallel(workload.model(), init_sync=False, **arguments)


def _call_if_there(thing: Any, *names: str) -> Any:
    """Calls the first of the methods that `thing` has."""
    for name in names:
        method = getattr(thing, name, None)
        if callable(method):
            return method()
    return None


def _trim() -> None:
    """Gives freed memory back, or the next model would seem to grow by less than it takes."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _all_agree(flag: bool) -> bool:
    votes = torch.tensor([int(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())
