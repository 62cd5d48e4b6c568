"""What `bench/convergence.py` trains: two small models on real data, with data held out.

Each choice of optimizer, steps and learning rate is for comparing codecs, not for the best model:
rates so low that a change in rounding alone hardly moves the final loss (the nudged run tells by
how much it does), and falling to zero, so that the loss is flat in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from bench.workloads.digits import Digits
from commsched import chargpt, codecs
from commsched.codecs.dgc import Dgc

__all__ = ["EXACT", "EXACT_SGD", "NUDGED", "TASKS", "Task", "is_exact", "rate_at"]

# Plain DDP: the reference; another one with SGD where that is not the task's own optimizer; and
# one whose initial parameters differ in their last bits, to show what rounding alone changes.
EXACT, EXACT_SGD, NUDGED = "ddp", "ddp:sgd", "ddp:nudged"
MOMENTUM = 0.9
WARM_UP_SHARE = 0.05  # of the steps, in which the learning rate rises


def is_exact(how: str) -> bool:
    """Whether that is plain DDP, not a codec's text."""
    return how.partition(":")[0] == EXACT


def is_dgc(how: str) -> bool:
    """Whether momentum is the codec's, so that the optimizer must have none."""
    return not is_exact(how) and isinstance(codecs.get(how), Dgc)


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, as a share of the highest: a short rise, then half a cosine."""
    rise = max(1, round(WARM_UP_SHARE * steps))
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


class Task(Protocol):
    """A training job, with what decides on its result."""

    name: str
    steps: int

    def model(self, seed: int) -> nn.Module:
        """A new model; the same parameters on every rank."""
        ...

    def optimizer(self, params: Iterable[nn.Parameter], how: str) -> Optimizer:
        """A new optimizer; `how` gradients travel matters to dgc alone."""
        ...

    def reference(self, how: str) -> str:
        """The exact run that `how` is compared with: of the same optimizer."""
        ...

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """Of a batch that `draw` chooses."""
        ...

    def held_out(self, model: nn.Module) -> float:
        """The mean loss on data that are never trained on, always the same."""
        ...


@dataclass
class DigitsTask:
    """The CNN of `bench.workloads.Digits`, SGD with momentum, a third of the digits held out."""

    name = "digits"
    steps = 400
    rate = 0.02
    batch = 64
    trained_on = 1200

    def __post_init__(self) -> None:
        data = load_digits()
        self._images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
        self._labels = torch.tensor(data.target)
        order = torch.randperm(len(self._labels), generator=torch.Generator().manual_seed(0))
        self._train, self._held_out = order[: self.trained_on], order[self.trained_on :]

    def model(self, seed: int) -> nn.Module:
        """See `Task`."""
        model = Digits(rank=0).model()
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.reset_parameters()
        return model

    def optimizer(self, params: Iterable[nn.Parameter], how: str) -> Optimizer:
        """SGD, of which dgc needs the momentum to be its own."""
        return SGD(params, lr=self.rate, momentum=0.0 if is_dgc(how) else MOMENTUM)

    def reference(self, how: str) -> str:
        """One for all: momentum is in every run."""
        del how
        return EXACT

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """See `Task`."""
        chosen = torch.randint(self.trained_on, (self.batch,), generator=draw)
        return self._of(model, self._train[chosen])

    def held_out(self, model: nn.Module) -> float:
        """See `Task`."""
        with torch.no_grad():
            return self._of(model, self._held_out).item()

    def _of(self, model: nn.Module, chosen: Tensor) -> Tensor:
        return cross_entropy(model(self._images[chosen]), self._labels[chosen])


@dataclass
class GptTask:
    """A small `commsched.chargpt`, AdamW; the last tenth of the text is held out."""

    name = "gpt"
    steps = 500
    width, layers, heads = 64, 2, 4
    rate, sgd_rate = 3e-3, 0.3
    excerpts = 128

    def __post_init__(self) -> None:
        text, self._symbols = chargpt.corpus()
        cut = len(text) * 9 // 10
        self._train, rest = text[:cut], text[cut:]
        starts = torch.linspace(0, len(rest) - chargpt.CONTEXT - 1, self.excerpts).long()
        index = starts[:, None] + torch.arange(chargpt.CONTEXT + 1)
        self._held_out = rest[index[:, :-1]], rest[index[:, 1:]]

    def model(self, seed: int) -> nn.Module:
        """See `Task`."""
        torch.manual_seed(seed)
        return chargpt.CharGPT(self._symbols, self.width, self.layers, self.heads)

    def optimizer(self, params: Iterable[nn.Parameter], how: str) -> Optimizer:
        """AdamW; for dgc SGD, and for its reference SGD with the momentum that dgc has."""
        if is_dgc(how) or how == EXACT_SGD:
            return SGD(params, lr=self.sgd_rate, momentum=MOMENTUM if how == EXACT_SGD else 0.0)
        return AdamW(params, lr=self.rate)

    def reference(self, how: str) -> str:
        """SGD for dgc."""
        return EXACT_SGD if is_dgc(how) or how == EXACT_SGD else EXACT

    def loss(self, model: nn.Module, draw: torch.Generator) -> Tensor:
        """See `Task`."""
        return self._of(model, *chargpt.batch(self._train, draw))

    def held_out(self, model: nn.Module) -> float:
        """See `Task`."""
        with torch.no_grad():
            return self._of(model, *self._held_out).item()

    def _of(self, model: nn.Module, characters: Tensor, following: Tensor) -> Tensor:
        return cross_entropy(model(characters).flatten(0, 1), following.flatten())


TASKS: dict[str, type[Task]] = {task.name: task for task in (DigitsTask, GptTask)}
