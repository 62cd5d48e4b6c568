"""What one rank of `bench/convergence.py` does: one training after another, each with its curve."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commsched
from bench.convergence_tasks import NUDGED, TASKS, Task, is_exact, rate_at
from bench.links import wire_bytes

__all__ = ["Config", "Curve", "main"]

SETTLED = 12  # steps after which buckets and plan are final, and codecs at work
NUDGE = 1e-6  # relative
SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Config:
    """What to train; the same on every rank.

    Attributes:
        task: a key of `TASKS`.
        hows: how gradients travel: codecs' texts, or a plain DDP of `convergence_tasks`.
        seeds: of initial parameters and of data, each with every one of `hows`.
        steps: of each training.
        points: of its curve.
        timeout_s: of a collective.
    """

    task: str
    hows: list[str]
    seeds: list[int]
    steps: int
    points: int
    timeout_s: float


@dataclass
class Curve:
    """One training on one rank.

    Attributes:
        how: how gradients travelled.
        seed: of parameters and data.
        steps: done at each point.
        seconds: since the first step began, without the time of evaluating.
        held_out: loss on data held out.
        trained: mean loss of this rank's batches since the point before.
        step_ms: median of the steps after the first `SETTLED`.
        sent_bytes: on the interface in one of those, mean.
    """

    how: str
    seed: int
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    trained: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    sent_bytes: float = 0.0


class Training:
    """One model, trained from its first step to its last. Made by all ranks together."""

    def __init__(self, task: Task, how: str, seed: int, steps: int) -> None:
        model = task.model(seed)
        if how == NUDGED:
            _nudge(model)
        self._task = task
        self._steps = steps
        self._seed = seed
        self._ddp = DistributedDataParallel(model)
        self._optimizer = task.optimizer(self._ddp.parameters(), how)
        self._top_rates = [group["lr"] for group in self._optimizer.param_groups]
        self._state: commsched.State | None = None
        if not is_exact(how):
            self._state = commsched.State(codec=how, codec_force=True)
            self._ddp.register_comm_hook(self._state, commsched.hook)
        self._losses: list[float] = []
        self._took_s: list[float] = []
        self.curve = Curve(how, seed)

    def run(self, points: int) -> Curve:
        """All steps; a point of the curve after every so many of them."""
        marks = {round(self._steps * (one + 1) / points) for one in range(points)}
        settled = min(SETTLED, self._steps // 2)
        dist.barrier()
        for step in range(self._steps):
            if step == settled:
                sent = _sent_bytes()
            self._took_s.append(self._timed_step(step))
            if step + 1 in marks:
                self._add_point(step + 1)
        self.curve.sent_bytes = (_sent_bytes() - sent) / (self._steps - settled)
        self.curve.step_ms = 1e3 * median(self._took_s[settled:])
        return self.curve

    def close(self) -> None:
        """Ends commsched's thread and lets go of the model."""
        if self._state is not None:
            self._state.close()
        del self._ddp
        gc.collect()

    def _timed_step(self, step: int) -> float:
        share = rate_at(step, self._steps)
        for group, rate in zip(self._optimizer.param_groups, self._top_rates, strict=True):
            group["lr"] = rate * share
        serial = self._seed * SEED_STRIDE + step * dist.get_world_size() + dist.get_rank()
        draw = torch.Generator().manual_seed(serial)
        began_s = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._task.loss(self._ddp, draw)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._losses.append(loss.item())
        return time.perf_counter() - began_s

    def _add_point(self, step: int) -> None:
        """Evaluates, by both ranks at once, so that the next step begins on both."""
        curve = self.curve
        before = curve.steps[-1] if curve.steps else 0
        curve.steps.append(step)
        curve.seconds.append(sum(self._took_s))
        curve.trained.append(sum(self._losses[before:]) / (step - before))
        module: nn.Module = self._ddp.module
        curve.held_out.append(self._task.held_out(module))
        dist.barrier()


def _nudge(model: nn.Module) -> None:
    """Change parameters by about a unit in their last place; the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + NUDGE * torch.randn(param.shape, generator=draw))


def _sent_bytes() -> int:
    """What the interface has sent so far; no rank goes on before all have looked."""
    dist.barrier()
    sent = wire_bytes()
    dist.barrier()  # on loopback all ranks share the counter
    return sent


def _train_all(config: Config, out: TextIO) -> None:
    task = TASKS[config.task]()
    warm = Training(task, "none", 0, 2 * SETTLED)  # or the first one pays for torch's imports
    warm.run(1)
    warm.close()
    for seed in config.seeds:  # outside: a drift of the machine's speed hits all alike
        for how in config.hows:
            training = Training(task, how, seed, config.steps)
            curve = training.run(config.points)
            training.close()
            # At once, so that a failure of a later one does not cost this one's figures.
            print(json.dumps(asdict(curve)), file=out, flush=True)
            if dist.get_rank() == 0:
                print(f"{config.task} {how} seed {seed}: {curve.held_out[-1]:.4f}", flush=True)


def main(config_path: str, out_folder: str) -> None:
    """Trains as the JSON file at `config_path` says; a line a training in `<rank>.jsonl`."""
    faulthandler.register(signal.SIGUSR1)  # the launcher asks a hung rank for its stacks
    config = Config(**json.loads(Path(config_path).read_text()))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.timeout_s))
    with Path(out_folder, f"{os.environ['RANK']}.jsonl").open("w") as out:
        _train_all(config, out)
    dist.barrier()
    dist.destroy_process_group()
