"""An accelerator emulated by sleeping, so that one CPU can hold several ranks.

Each layer sleeps for its share of the forward and of the backward time and then hands DDP real
gradients in real memory. Everything after that is real: buckets, hooks, bytes on the wire,
optimizer. What is *not* emulated is contention: here communication never slows compute down.

Time is kept the way an accelerator keeps it, by deadlines: a layer starts when the one before it
ends, not when Python gets round to it. See `_Clock` for what counts as a real stall.

The optimizer is real and counts in full, wherever it runs: after backward, where no clock runs, or
deferred to the hooks of the forward's layers, which stop the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.workloads.shapes import Architecture, Layer

__all__ = ["Emulated", "Tiny"]

# Share of the forward time that Python between two layers may take in all before it counts. A
# forward that waits is a true stall and must not be slept away. In a layer's own forward pre-hooks
# it never is; elsewhere (a hook on the model's parts that this file cannot see) up to this share.
_FORWARD_SLACK = 0.05


class _Clock:
    """Deadlines of one pass, forward or backward.

    A layer is due one duration after the previous layer was due. What came in between (Python,
    DDP's copies, a sleep that overran) is made up for by sleeping less, as an accelerator whose
    queue is full does not notice it; but only up to `slack_s` in one pass: beyond, the
    accelerator would have run dry, so the layer starts late and all later ones with it.

    A `stall` counts from its first microsecond: there the accelerator waits for gradients, or runs
    a deferred optimizer step. Nothing reports stalls in a backward, whose slack is its whole time:
    a comm hook that waited there would go unseen.
    """

    def __init__(self, slack_s: float) -> None:
        self._slack_s = slack_s
        self.restart()

    def restart(self) -> None:
        """Starts a pass now."""
        self._due_s = self._left_s = time.perf_counter()
        self._budget_s = self._slack_s

    def stall_begins(self) -> None:
        """The accelerator may have to wait from now on."""
        self._stalled_s = time.perf_counter()

    def stall_ends(self) -> None:
        """The next layer has all it needs."""
        duration_s = time.perf_counter() - self._stalled_s
        self._due_s += duration_s
        self._left_s += duration_s  # or it would count as Python between layers as well

    def run(self, duration_s: float) -> None:
        """Sleeps until a layer that takes `duration_s` is done."""
        between_s = time.perf_counter() - self._left_s
        forgiven_s = min(between_s, self._budget_s)
        self._budget_s -= forgiven_s
        self._due_s += between_s - forgiven_s + duration_s
        wait_s = self._due_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)  # releases the GIL
        self._left_s = time.perf_counter()


class _Compute(torch.autograd.Function):
    """Sleeps in both directions; the gradients are the layer's ready-made buffers."""

    @staticmethod
    def forward(ctx: Any, layer: _EmulatedLayer, x: Tensor, *_params: Tensor) -> Tensor:
        ctx.layer = layer
        layer.forward_clock.run(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.backward_clock.run(layer.backward_s)
        # A new tensor object on the same memory: autograd then takes it over as `.grad` without
        # copying. DDP's copy into the bucket is real.
        return (None, grad, *(buffer.view_as(buffer) for buffer in layer.gradients))


class _EmulatedLayer(nn.Module):
    def __init__(
        self,
        layer: Layer,
        scale: float,
        seconds: tuple[float, float],
        clocks: tuple[_Clock, _Clock],
        pattern: Tensor,
    ) -> None:
        super().__init__()
        self.forward_s, self.backward_s = seconds
        self.forward_clock, self.backward_clock = clocks
        self.gradients: list[Tensor] = []
        for name, shape in layer.shapes.items():
            # Scaling the first dimension alone keeps the rank of a matrix (PowerSGD) plausible.
            scaled = (max(1, round(shape[0] * scale)), *shape[1:])
            self.register_parameter(name, nn.Parameter(torch.zeros(scaled)))
            self.gradients.append(_noise(scaled, pattern))

    def forward(self, x: Tensor) -> Tensor:
        self.forward_clock.stall_ends()
        out: Tensor = _Compute.apply(self, x, *self.parameters())  # type: ignore[no-untyped-call]
        return out


def _noise(shape: tuple[int, ...], pattern: Tensor) -> Tensor:
    """A tensor filled with the pattern again and again: far quicker than fresh noise."""
    flat = torch.empty(prod(shape))
    # In place: temporaries would show up as memory in use.
    for piece in torch.split(flat, len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return flat.view(shape)


class _Start(torch.autograd.Function):
    """Starts the backward clock: its backward is the first to run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.restart()
        return grad, None


class _EmulatedModel(nn.Module):
    def __init__(
        self,
        layers: list[Layer],
        scale: float,
        forward_s: float,
        backward_s: float,
        pattern: Tensor,
    ) -> None:
        super().__init__()
        self._forward_clock = _Clock(forward_s * _FORWARD_SLACK)
        # Nothing waits for the network inside a backward, so all of its Python may be hidden.
        self._backward_clock = _Clock(backward_s)
        total = sum(layer.flops for layer in layers)
        clocks = (self._forward_clock, self._backward_clock)
        for layer in layers:
            share = layer.flops / total
            seconds = (share * forward_s, share * backward_s)
            self.add_module(layer.name, _EmulatedLayer(layer, scale, seconds, clocks, pattern))

    def forward(self, x: Tensor) -> Tensor:
        self._forward_clock.restart()
        for layer in self.children():
            self._forward_clock.stall_begins()  # with the layer's forward pre-hooks
            x = layer(x)
        out: Tensor = _Start.apply(x, self._backward_clock)  # type: ignore[no-untyped-call]
        return out


class Emulated:
    """An emulated accelerator training one of the `ARCHITECTURES`.

    Args:
        architecture: the layers.
        rank: the gradients differ by rank.
        gradient_mb: total gradient in MB (1e6 bytes, fp32), None for the default.
        forward_s: seconds of compute in one forward.
        backward_s: seconds of compute in one backward.
    """

    def __init__(
        self,
        architecture: Architecture,
        rank: int,
        gradient_mb: float | None = None,
        forward_s: float = 0.25,
        backward_s: float = 0.5,
    ) -> None:
        self.name = architecture.name
        true_mb = architecture.true_mb()
        self._layers = architecture.layers()
        self._scale = (gradient_mb or architecture.default_mb or true_mb) / true_mb
        self._seconds = (forward_s, backward_s)
        generator = torch.Generator().manual_seed(1000 + rank)
        self._pattern = 1e-3 * torch.randn(2**20, generator=generator)  # the size of real ones

    def model(self) -> nn.Module:
        """A new model, all parameters zero."""
        return _EmulatedModel(self._layers, self._scale, *self._seconds, self._pattern)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Plain SGD: real, and run on the CPU."""
        return torch.optim.SGD(params, lr=1e-3)

    def step(self, model: nn.Module, optimizer: Optimizer, step_index: int) -> float | None:  # noqa: ARG002
        """One step. There is no loss."""
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(1)).backward()
        optimizer.step()
        return None


class Tiny:
    """200 layers of 16 x 16 without any compute to hide behind: what a hook's Python costs."""

    name = "tiny200"

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(1000 + rank)
        self._inputs = torch.randn(8, 16, generator=generator)

    def model(self) -> nn.Module:
        """A new model."""
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(200)))

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(params, lr=1e-3)

    def step(self, model: nn.Module, optimizer: Optimizer, step_index: int) -> float | None:  # noqa: ARG002
        """One step on always the same batch."""
        optimizer.zero_grad(set_to_none=True)
        loss = model(self._inputs).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())
