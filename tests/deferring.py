"""Training with deferred steps, for tests: a script's loop, a slow wire, and its plain twin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched.jobs import Job, Run
from commsched.packer import Packer
from commsched.pending import Pending
from tests.parity import SMALL, mlp, mlp_loss

STEPS = 8  # after so many, steps are deferred


class Training:
    """A model whose steps are deferred, and what a script does with it.

    Args:
        make: the model; takes 24 numbers.
        plain: DDP without a hook, as the reference.
        ddp: of DDP.
        optimizer: takes what SGD takes.
        settings: of commsched.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        plain: bool = False,
        ddp: dict[str, Any] | None = None,
        optimizer: type[torch.optim.SGD] = torch.optim.SGD,
        **settings: Any,
    ) -> None:
        torch.manual_seed(7)
        options = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True, **(ddp or {})}
        self.model = DDP(make(), **options)
        self.optimizer: torch.optim.Optimizer = optimizer(
            self.model.parameters(), lr=0.05, momentum=0.9
        )
        self.state: commsched.State | None = None
        if not plain:
            # Explicit: on loopback commsched would find that deferring gains nothing.
            settings = {"policy": "priority", **SMALL, "timeout_s": 10.0, **settings}
            self.state = commsched.attach(self.model, optimizer=self.optimizer, **settings)
        self.number = 0

    def backward(self, rank: int, scale: float = 1.0) -> None:
        """zero_grad, forward, backward."""
        self.optimizer.zero_grad()
        self.number += 1
        torch.manual_seed(10 * self.number + rank)
        (mlp_loss(self.model, self.number, rank) * scale).backward()

    def step(self, rank: int) -> None:
        """A whole step."""
        self.backward(rank)
        self.optimizer.step()

    def run(self, rank: int, steps: int = STEPS) -> Training:
        """So many steps, after which some are pending."""
        for _ in range(steps):
            self.step(rank)
        assert self.state is None or self.pending() > 0
        return self

    def pending(self) -> int:
        """How many parameters are."""
        return sum(type(param) is Pending for param in self.model.module.parameters())

    def synchronize(self) -> None:
        """Of the state, if there is one."""
        if self.state is not None:
            self.state.synchronize()

    def values(self) -> list[torch.Tensor]:
        """The parameters, up to date."""
        self.synchronize()
        return [param.detach().clone() for param in self.model.module.parameters()]

    def close(self) -> None:
        """Close the state."""
        if self.state is not None:
            self.state.close()


def grads(training: Training) -> list[torch.Tensor]:
    """All gradients there are."""
    return [param.grad for param in training.model.parameters() if param.grad is not None]


@contextmanager
def slow_wire(seconds: float = 0.02) -> Iterator[None]:
    """Every chunk leaves so much late: until then its gradients are this rank's own."""
    pack = Packer.pack

    def late(self: Packer, run: Run) -> torch.Tensor:
        time.sleep(seconds)
        return pack(self, run)

    with mock.patch.object(Packer, "pack", late):
        yield


@contextmanager
def late_sum(name: str, seconds: float = 0.3) -> Iterator[None]:
    """The sum of one parameter's bucket, and only that, is so much later than its gradients."""
    has, complete = Job.has, Job.complete

    def late(job: Job) -> bool:
        names = [param.name for param in job.spec.params]
        return name in names and time.monotonic() < job.timing.ready_s + seconds

    with (
        mock.patch.object(Job, "has", lambda job, index: not late(job) and has(job, index)),
        mock.patch.object(Job, "complete", lambda job: not late(job) and complete(job)),
    ):
        yield


def differ(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Whether some parameter does."""
    return not all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))
