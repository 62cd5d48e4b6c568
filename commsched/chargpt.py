"""A small character GPT, and its data-parallel training on one rank: the job that the demo times.

`commsched.demo` starts one process per rank of `python -m commsched.chargpt`; progress goes to
stdout as one JSON object a line. `add_hook` shows the whole use of commsched. All else is plain
PyTorch.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import commsched

SEED = 1
TURN_STEPS = 8  # steps that one run does before it is another's turn
WARM_UP_STEPS = TURN_STEPS  # not timed: DDP rebuilds its buckets, commsched measures and plans
CONTEXT = 64  # characters
BATCH = 12  # sequences per rank
COLLECTIVE_TIMEOUT_S = 40

# How the gradients travel in each run: nothing sent (ranks drift apart, good for the compute time
# only), DDP's own all-reduce, or commsched: with the optimizer handed over, or with the codec of
# that name.
RUNS = {
    "compute only": "noop",
    "plain DDP": "ddp",
    "commsched": "none",
    "commsched, optimizer": "optimizer",
    "commsched, bf16": "bf16",
}


@dataclass
class RunReport:
    """What one rank saw of one run.

    Attributes:
        losses: Of each step.
        step_ms: Duration of a step, the mean of each timed turn.
        wire_bytes: Sent per timed step; on loopback that of all ranks together.
        reported_ms: commsched's own `state.report().exposed_ms`, None where it was not active.
        inactive: Why commsched left the gradients to torch, else empty.
    """

    losses: list[float]
    step_ms: list[float]
    wire_bytes: float
    reported_ms: float | None = None
    inactive: str = ""


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then a two-layer MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention of `x`, shape (batch, length, width)."""
        batch, length, width = x.shape
        qkv: Tensor = self.qkv(x)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attend(self.norm_attention(x))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class CharGPT(nn.Module):
    """Next-character model, 3.2 million parameters with the defaults.

    Args:
        symbols: Size of the alphabet.
        width: Features per character.
        layers: Number of blocks.
        heads: Attention heads per block.
    """

    def __init__(self, symbols: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        """Map character numbers (batch, length) to logits (batch, length, symbols)."""
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def corpus() -> tuple[Tensor, int]:
    """Read the Python manual's topics as character numbers; also give the alphabet's size."""
    text = "\n".join(topics[name] for name in sorted(topics))
    number = {symbol: index for index, symbol in enumerate(sorted(set(text)))}
    return torch.tensor([number[symbol] for symbol in text]), len(number)


def batch(text: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random excerpts (BATCH, CONTEXT) of `text`, and the same moved on by one character."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
    index = starts + torch.arange(CONTEXT + 1)
    return text[index[:, :-1]], text[index[:, 1:]]


def add_hook(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, how: str
) -> commsched.State | None:
    """Choose how the gradients travel (a value of `RUNS`); return commsched's state, if any."""
    if how == "ddp":
        return None
    if how == "noop":
        ddp.register_comm_hook(None, noop_hook)
        return None
    # Policies that the automatic mode tries first; it would take most of so short a run to choose.
    if how == "optimizer":
        state = commsched.State(optimizer=optimizer, policy="priority")
    else:
        state = commsched.State(codec=how, policy="fifo")
    ddp.register_comm_hook(state, commsched.hook)  # the one line
    return state


class Trainee:
    """One run's model, optimizer and data: equal in every run but for how gradients travel.

    Args:
        run: A key of `RUNS`.
        text: The corpus.
        symbols: Size of its alphabet.
    """

    def __init__(self, run: str, text: Tensor, symbols: int) -> None:
        torch.manual_seed(SEED)
        self.run = run
        self.text = text
        self.ddp = DistributedDataParallel(
            CharGPT(symbols), bucket_cap_mb=4, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.state = add_hook(self.ddp, self.optimizer, RUNS[run])
        self.draw = torch.Generator().manual_seed(SEED + dist.get_rank())
        self.report = RunReport([], [], wire_bytes=0.0)
        self.count_bytes = byte_counter()

    def step(self) -> None:
        """One optimizer step."""
        characters, following = batch(self.text, self.draw)
        loss = cross_entropy(self.ddp(characters).flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.report.losses.append(loss.item())

    def turn(self, first: int, steps: int) -> None:
        """Some steps, which ranks start together, to the end of their communication."""
        dist.barrier()
        sent, started = self.count_bytes(), time.perf_counter()
        for step in range(first, first + steps):
            self.step()
            tell(run=self.run, step=step)
        if self.state is not None:
            self.state.synchronize()
        if first >= WARM_UP_STEPS:
            self.report.step_ms.append(1e3 * (time.perf_counter() - started) / steps)
            self.report.wire_bytes += (self.count_bytes() - sent) / steps

    def finish(self) -> RunReport:
        """What was seen; ends commsched's thread."""
        self.report.wire_bytes /= len(self.report.step_ms)
        if self.state is not None:
            own = self.state.report()
            self.report.reported_ms = own.exposed_ms if own.active else None
            self.report.inactive = own.reason
            self.state.close()
        return self.report


def train(steps: int) -> dict[str, RunReport]:
    """Train all `RUNS`, some steps of each in turn, so that a busy machine slows all alike.

    Args:
        steps: Optimizer steps a run, the untimed `WARM_UP_STEPS` included.
    """
    text, symbols = corpus()
    trainees = [Trainee(run, text, symbols) for run in RUNS]
    for first in range(0, steps, TURN_STEPS):
        for trainee in trainees:
            trainee.turn(first, min(TURN_STEPS, steps - first))
    return {trainee.run: trainee.finish() for trainee in trainees}


def tell(**message: object) -> None:
    """Print one JSON line for the parent."""
    print(json.dumps(message), flush=True)


def bench_links() -> ModuleType | None:
    """`bench.links` where the repository is at hand, None where only the package is installed."""
    try:
        return importlib.import_module("bench.links")
    except ModuleNotFoundError:
        return None


def byte_counter() -> Callable[[], int]:
    """Give a function that counts the bytes sent on this rank's interface so far."""
    links = bench_links()
    if links is not None:
        counter: Callable[[], int] = links.wire_bytes
        return counter
    sent = Path("/sys/class/net/lo/statistics/tx_bytes")
    return lambda: int(sent.read_text()) if sent.exists() else 0


def main() -> None:
    """Train all runs on the rank that the environment (as from torchrun) names."""
    parser = argparse.ArgumentParser(prog="python -m commsched.chargpt", description=__doc__)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps per run (32)")
    steps = parser.parse_args().steps
    faulthandler.register(signal.SIGUSR1)  # the demo asks a silent rank where it stands
    torch.set_num_threads(1)  # the ranks share one machine
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    for run, report in train(steps).items():
        tell(run=run, report=asdict(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
