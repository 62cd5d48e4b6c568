"""What one rank of `bench/step_time.py` does: several hooks side by side, measured in turns.

Turns, because a machine's speed drifts: in each round every hook has its go, so a drift hits all
of them alike and the medians over the rounds stay comparable.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bench import workloads
from bench.hooks import HookSpec, register
from bench.links import wire_bytes
from bench.workloads.base import Workload, gradient_bytes

__all__ = ["HookFigures", "RankConfig", "RankFigures", "main"]


@dataclass(frozen=True)
class RankConfig:
    """What to measure; the same on every rank. Times in seconds, sizes in MB (1e6 bytes).

    `memory` tells a run that is after memory peaks: no all-reduce alone, whose buffer counts.
    """

    workload: str
    hooks: list[str]
    rounds: int
    steps: int
    warmup: int
    gradient_mb: float | None
    forward_s: float
    backward_s: float
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    timeout_s: float
    memory: bool = False


@dataclass
class HookFigures:
    """What one rank measured of one hook.

    Attributes:
        status: `ok`, or why there are no figures.
        step_s: mean step time of each round, in seconds.
        sent_bytes: bytes sent per step on the rank's interface, for each round.
        rss_mb: growth of resident memory by making and warming up this hook's model, in MB.
        loss: the last loss.
        report: `State.report()` of commsched, where there is one.
    """

    status: str = "ok"
    step_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    loss: float | None = None
    report: dict[str, Any] | None = None


@dataclass
class RankFigures:
    """All figures of one rank; `peak_mb` is the peak of its resident memory (VmHWM) in MB."""

    rank: int
    gradient_mb: float = 0.0
    all_reduce_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    hooks: dict[str, HookFigures] = field(default_factory=dict)


def memory_mb(key: str) -> float:
    """One line of /proc/self/status, `VmRSS` or `VmHWM`, in MB (1e6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(key)


class _Contestant:
    """One hook with the DDP model and the optimizer it works for."""

    def __init__(self, spec: HookSpec, workload: Workload, config: RankConfig) -> None:
        self.spec = spec
        self.figures = HookFigures()
        self._workload = workload
        self._step_index = 0
        self._state: Any = None
        _trim()
        before_mb = memory_mb("VmRSS")
        # All ranks make the same parameters, so sending rank 0's around would only take time.
        self._ddp = DistributedDataParallel(
            workload.model(),
            init_sync=False,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
        )
        self._optimizer: Optimizer = workload.optimizer(self._ddp.parameters())
        try:
            self._state = register(spec, self._ddp, self._optimizer)
        except Exception as error:  # one hook that is refused must not end the bench
            self.figures.status = _first_line("refused", error)
        if not _all_agree(self.runs):
            if self.runs:
                self.figures.status = "refused on another rank"
            return
        self.run(config.warmup)
        _trim()
        self.figures.rss_mb = memory_mb("VmRSS") - before_mb

    @property
    def runs(self) -> bool:
        """False when the hook was refused."""
        return self.figures.status == "ok"

    def run(self, steps: int) -> None:
        """Some steps, and whatever communication they have left under way."""
        for _ in range(steps):
            loss = self._workload.step(self._ddp, self._optimizer, self._step_index)
            self.figures.loss = loss
            self._step_index += 1
        _call_if_there(self._state, "flush", "synchronize")

    def measure(self, steps: int) -> None:
        """One round: `steps` steps between two barriers."""
        dist.barrier()
        sent = wire_bytes()
        dist.barrier()  # on loopback all ranks share the counter: read before anyone goes on
        start_s = time.perf_counter()
        self.run(steps)
        self.figures.step_s.append((time.perf_counter() - start_s) / steps)
        dist.barrier()
        self.figures.sent_bytes.append((wire_bytes() - sent) / steps)

    def finish(self) -> None:
        """Takes the hook's own report and lets go of it."""
        report = _call_if_there(self._state, "report") if self.spec.name == "commsched" else None
        if report is not None:
            as_dict = report if isinstance(report, dict) else _call_if_there(report, "to_dict")
            self.figures.report = as_dict or {"exposed_ms": getattr(report, "exposed_ms", None)}
        _call_if_there(self._state, "close", "shutdown")


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


def _load_libraries() -> None:
    """One step of a throwaway model, so that the first hook is not charged for torch's imports."""
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def _first_line(verdict: str, error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{verdict}: {type(error).__name__}: {text}"


def _all_agree(flag: bool) -> bool:
    votes = torch.tensor([int(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def _phase(text: str) -> None:
    """Says on stderr where this rank is: the last such line of a hung rank is the place."""
    print(f"phase: {text}", file=sys.stderr, flush=True)


def _all_reduce_s(flat: Tensor) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(flat)
    return time.perf_counter() - start_s


def _measure(config: RankConfig, figures: RankFigures) -> None:
    workload = workloads.make(
        config.workload, figures.rank, config.gradient_mb, config.forward_s, config.backward_s
    )
    figures.gradient_mb = gradient_bytes(workload.model()) / 1e6
    _phase("loading libraries")
    _load_libraries()
    contestants: list[_Contestant] = []
    for text in config.hooks:
        _phase(f"registering and warming up {text}")
        contestants.append(_Contestant(HookSpec.parse(text), workload, config))
        figures.hooks[text] = contestants[-1].figures
    flat = torch.zeros(0 if config.memory else round(figures.gradient_mb * 1e6 / 4))
    for index in range(config.rounds):
        for contestant in contestants:
            if contestant.runs:
                _phase(f"round {index} of {contestant.spec.text}")
                contestant.measure(config.steps)
        if len(flat):
            _phase(f"round {index} of the all-reduce alone")
            figures.all_reduce_s.append(_all_reduce_s(flat))
    for contestant in contestants:
        _phase(f"closing {contestant.spec.text}")
        contestant.finish()


def main(config_path: str, out_folder: str) -> None:
    """Measures as the JSON file at `config_path` says; writes `<out_folder>/<rank>.json`."""
    faulthandler.register(signal.SIGUSR1)  # the launcher asks a hung rank for its stacks
    config = RankConfig(**json.loads(Path(config_path).read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_s))
    figures = RankFigures(int(os.environ["RANK"]))
    _measure(config, figures)
    figures.peak_mb = memory_mb("VmHWM")
    # Written before the teardown, so that a hang there does not cost the figures.
    Path(out_folder, f"{figures.rank}.json").write_text(json.dumps(asdict(figures), default=str))
    _phase("teardown")
    dist.barrier()
    dist.destroy_process_group()
