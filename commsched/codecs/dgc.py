"""dgc: Deep Gradient Compression, top-k of what momentum has piled up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.summing import spread_and_add
from commsched.codecs.topk import TopK, clear, gather, kept, select, split
from commsched.errors import CommSchedError

if TYPE_CHECKING:
    from commsched.parcel import Parcel, Rounds

__all__ = ["Dgc"]

FIRST_RATIO = 0.25  # kept when warm-up begins


def _momentum_select(
    grad: torch.Tensor,
    velocity: torch.Tensor,
    error: torch.Tensor,
    momentum: float,
    indices: torch.Tensor,
) -> bool:
    """Momentum of `grad` into `velocity`, add that to `error`, then `select` from that."""
    kernel = kernels.load("select")
    if kernel is None:
        return select(error.add_(velocity.mul_(momentum).add_(grad)), indices)
    tensors = grad.numpy(), velocity.numpy(), error.numpy()
    return bool(kernel.momentum_select(*tensors, np.float32(momentum), indices.numpy()))


@dataclass(frozen=True)
class Dgc(TopK):
    """As `topk`, but momentum is taken before sparsifying, and what waits keeps its momentum.

    Each rank keeps a velocity and an error. Each step the velocity becomes momentum x velocity +
    gradient, and is added to the error; the error's largest entries travel, and both become 0
    there (momentum correction, and momentum factor masking). What is put into the gradients is an
    update with momentum in it, so **the optimizer must be SGD without momentum**.

    Warm-up: in four equal stages the share that travels falls from 25 % towards `ratio`, each time
    by the same factor. It is over after iteration `warmup_steps` of the training, counted from its
    very first as warm-up of learning rates is, whenever the codec began and also where the run was
    resumed.

    Encoding alone is `topk`'s. Without memory there is no momentum either, which the optimizer
    would then lack: refused. The paper's clipping of local gradients is left to the user.

    Source: Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018.

    Attributes:
        ratio: the share of gradients that travels after warm-up.
        momentum: of the velocity.
        warmup_steps: iterations until the share is `ratio`.
    """

    name = "dgc"
    needs_feedback = True

    ratio: float = 0.001
    momentum: float = 0.9
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum={self.momentum} is not allowed: it takes 0 or more and less than 1"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} is not allowed: it takes 0 or more")

    def prepare(self) -> None:
        """Compile."""
        super().prepare()
        x, indices = torch.ones(3), torch.empty(1, dtype=torch.int32)
        _momentum_select(x, torch.zeros(3), torch.zeros(3), self.momentum, indices)

    def nbytes(self, numel: int, step: int | None = None) -> int:
        """Eight for each that is kept in that step."""
        return 8 * kept(numel, self.ratio_at(step))

    def ratio_at(self, step: int | None) -> float:
        """The share of gradients that travels in that iteration; None: after warm-up."""
        if step is None or step >= self.warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        # Square roots: of the same bits everywhere, unlike powers, and ranks' sizes must agree.
        middle = math.sqrt(FIRST_RATIO * self.ratio)
        stages = (
            FIRST_RATIO,
            math.sqrt(FIRST_RATIO * middle),
            middle,
            math.sqrt(middle * self.ratio),
        )
        return stages[4 * max(step, 0) // self.warmup_steps]

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`.

        Raises:
            CommSchedError: nothing is kept from step to step.
        """
        velocity, error = parcel.slot("velocity"), parcel.slot("error")
        if velocity is None or error is None:
            raise CommSchedError(
                "codec 'dgc' keeps momentum and errors from step to step, and error feedback is "
                "off: turn it on, or use codec 'topk'"
            )
        grad = parcel.take()
        own = parcel.pool.take(torch.uint8, self.nbytes(grad.numel(), parcel.step))
        indices, values = split(own)
        finite = _momentum_select(grad, velocity, error, self.momentum, indices)
        gather(error, indices, values)
        clear(error, indices, finite)
        clear(velocity, indices, finite)
        yield from spread_and_add(self, parcel, own, grad)
