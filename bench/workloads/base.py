"""The interface of a workload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

__all__ = ["Workload", "gradient_bytes"]


class Workload(Protocol):
    """A training job that any number of models can run in the same process, one after another."""

    name: str

    def model(self) -> nn.Module:
        """A new model; the same parameters on every rank and every call."""
        ...

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """A new optimizer over `params`."""
        ...

    def step(self, model: nn.Module, optimizer: Optimizer, step_index: int) -> float | None:
        """One step: forward, backward, optimizer.

        Args:
            model: the model, wrapped in DDP or not.
            optimizer: its optimizer.
            step_index: chooses the batch.

        Returns:
            The loss, None where there is none to speak of.
        """
        ...


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of all gradients of one step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
