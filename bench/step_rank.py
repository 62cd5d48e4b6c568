"""What one rank of `bench/step_time.py` does: several hooks side by side, measured in turns.

Turns, because a machine's speed drifts: in each round every hook has its go, so a drift hits all
of them alike and the medians over the rounds stay comparable.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench import workloads
from bench.contestant import Contestant, memory_mb
from bench.figures import RankConfig, RankFigures
from bench.hooks import HookSpec
from bench.workloads.base import gradient_bytes

__all__ = ["main"]


def _load_libraries() -> None:
    """One step of a throwaway model, so that the first hook is not charged for torch's imports."""
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()


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
    contestants: list[Contestant] = []
    for text in config.hooks:
        _phase(f"registering and warming up {text}")
        contestants.append(Contestant(HookSpec.parse(text), workload, config))
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
