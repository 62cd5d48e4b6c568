"""A small CNN on scikit-learn's 8 x 8 handwritten digits (1797 images, comes with the package)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.optim import Optimizer

__all__ = ["Digits"]

_BATCH = 64


class Digits:
    """About 50 000 parameters, a step of a few milliseconds; it learns within 100 steps.

    Args:
        rank: the batches differ by rank.
    """

    name = "digits"

    def __init__(self, rank: int) -> None:
        data = load_digits()
        self._images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        self._labels = torch.tensor(data.target)
        self._rank = rank

    def model(self) -> nn.Module:
        """A new model."""
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 80),
            nn.ReLU(),
            nn.Linear(80, 10),
        )

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def step(self, model: nn.Module, optimizer: Optimizer, step_index: int) -> float | None:
        """One step on a batch that depends on the step and the rank only."""
        generator = torch.Generator().manual_seed(step_index * 1000 + self._rank)
        chosen = torch.randint(len(self._labels), (_BATCH,), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(self._images[chosen]), self._labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())
