"""Trains two copies of a model, one under plain DDP and one under commsched, on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}

# Small enough that tiny models have many chunks in flight and something to fuse.
SMALL = {
    "chunk_mb": 0.004,
    "fusion_mb": 0.001,
    "credit_mb": 0.016,
    "timeout_s": 30.0,
    "codec_force": True,  # on loopback few codecs are worth it
}


@dataclass
class Case:
    """One way of using DDP. `loss` gets the DDP model, the step, and the rank."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    ddp: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    sparse: bool = False


def train(
    case: Case, optimizer: str, steps: int, rank: int, settings: dict[str, Any] | None, **ddp: Any
) -> tuple[list[torch.Tensor], commsched.State | None]:
    """Parameters after `steps` steps, under commsched with `settings`, or plain DDP (None)."""
    torch.manual_seed(7)
    model = DDP(case.model(), **{"bucket_cap_mb": 0.01, **case.ddp, **ddp})
    state = None
    if settings is not None:
        state = commsched.State(**{**SMALL, **settings})
        model.register_comm_hook(state, commsched.hook)
    kind = "sgd" if case.sparse else optimizer
    opt = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        opt.zero_grad()
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            with nullcontext() if last else model.no_sync():
                torch.manual_seed(1000 * step + 10 * micro + rank)
                case.loss(model, step, rank).backward()
        opt.step()
    if state is not None:
        state.synchronize()
    return [p.detach().clone() for p in model.module.parameters()], state


def sgd_steps(model: nn.Module, steps: int, rank: int) -> list[torch.Tensor]:
    """Parameters after `steps` plain SGD steps on `mlp_loss`."""
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        opt.zero_grad()
        mlp_loss(model, step, rank).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


def assert_same(
    ours: list[torch.Tensor], theirs: list[torch.Tensor], rtol: float | None = None
) -> None:
    """Fail unless both lists of parameters are equal: bit for bit, or within `rtol`."""
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if rtol is None:
            difference = (our - their).abs().max() if our.numel() else 0.0
            assert torch.equal(our, their), f"parameter {index} differs by {float(difference)}"
        else:
            torch.testing.assert_close(our, their, rtol=rtol, atol=rtol)


def mlp(width: int = 24, depth: int = 6) -> nn.Module:
    """Linear layers with ReLUs between: several buckets at the caps used here."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def mlp_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss on random data; the caller has seeded."""
    return model(torch.randn(5, 24)).square().mean()


class Odd(nn.Module):
    """Parameters that DDP stores oddly: 0-dim, empty, complex, channels_last, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.complex = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(7, 9).double()
        self.narrow = nn.Linear(9, 4).bfloat16()
        self.transposed = nn.Parameter(torch.randn(11, 13).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3)).sum() * self.scale + self.empty.sum()
        z = (self.complex * torch.randn(6, 5)).abs().square().mean()
        d = self.wide(torch.randn(2, 7).double())
        h = self.narrow(d.bfloat16()).float().square().mean()
        t = (torch.randn(2, 13) @ self.transposed).square().mean()
        return (y.square() + z + h + t + d.square().mean().float()) * 1e-1


def odd_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Uses every odd parameter."""
    return model(torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last))


class Branches(nn.Module):
    """Each step uses one of two branches on each rank; `never` is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(24, 24)
        self.left = mlp(depth=2)
        self.right = mlp(depth=2)
        self.never = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = self.trunk(x)
        return self.left(x) if left else self.right(x)


def branch_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Other branches on other ranks and steps."""
    return model(torch.randn(5, 24), (step + rank) % 3 == 0).square().mean()


def left_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Always the same branch: its counterpart's buckets may be skipped altogether."""
    return model(torch.randn(5, 24), True).square().mean()


class Bag(nn.Module):
    """A sparse embedding between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24, sparse=True)
        self.body = mlp(depth=3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids))


def bag_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Ranks look up different numbers of rows."""
    return model(torch.randint(0, 50, (4 + rank,))).square().mean()


class Norm(nn.Module):
    """Has buffers, which DDP broadcasts on its own group in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), mlp(depth=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Checkpointed(nn.Module):
    """Recomputes its middle in backward; `last` too: then the first gradients come from inside."""

    def __init__(self, reentrant: bool, last_too: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.last_too = last_too
        self.first, self.middle, self.last = nn.Linear(24, 24), mlp(depth=3)[:-1], nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        y = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        if self.last_too:
            return checkpoint(self.last, y, use_reentrant=self.reentrant)
        return self.last(y)


def autocast_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Forward under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return mlp_loss(model, step, rank).float()


class TwoLosses(nn.Module):
    """Deep copy target: a module whose forward returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = mlp(depth=2), mlp(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).mean() + self.b(x).square().mean()


def two_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """One loss from both heads."""
    return model(torch.randn(5, 24))


CASES: dict[str, Case] = {
    "mlp": Case(mlp, mlp_loss),
    "one-bucket": Case(mlp, mlp_loss, {"bucket_cap_mb": 25}),
    "bucket-per-parameter": Case(mlp, mlp_loss, {"bucket_cap_mb": 1e-9}),
    "odd": Case(Odd, odd_loss),
    "odd-many-buckets": Case(Odd, odd_loss, {"bucket_cap_mb": 1e-9}),
    "static-graph": Case(mlp, mlp_loss, {"static_graph": True}),
    "static-graph-odd": Case(Odd, odd_loss, {"static_graph": True}),
    "find-unused": Case(Branches, branch_loss, {"find_unused_parameters": True}),
    "skip-unused": Case(
        Branches,
        left_loss,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ),
    "skip-unused-fine": Case(
        Branches,
        left_loss,
        {
            "find_unused_parameters": True,
            "skip_all_reduce_unused_params": True,
            "bucket_cap_mb": 1e-9,
        },
    ),
    "sparse": Case(Bag, bag_loss, sparse=True),
    "buffers": Case(Norm, mlp_loss),
    "accumulation": Case(mlp, mlp_loss, accumulate=3),
    "checkpoint-reentrant": Case(lambda: Checkpointed(True), mlp_loss),
    "checkpoint-reentrant-all": Case(lambda: Checkpointed(True, True), mlp_loss),
    "static-graph-reentrant": Case(
        lambda: Checkpointed(True, True), mlp_loss, {"static_graph": True}
    ),
    "checkpoint": Case(lambda: Checkpointed(False), mlp_loss),
    "autocast": Case(mlp, autocast_loss),
    "two-heads": Case(TwoLosses, two_loss),
}
