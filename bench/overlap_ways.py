"""What `bench/overlap.py` compares: ways to sum gradients while computing goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.driven import TIMEOUT_S, Driven
from bench.hooks import HookSpec, register
from commsched.settings import MB, Settings

__all__ = ["Compute", "Matmul", "Sleep", "Way", "make"]

SIDE = 64  # of the matrices: some 10 us a product on one thread, so that small shares can be had
FLOAT_BYTES = 4


class Compute(Protocol):
    """Something to do beside communication; the same work however long it takes."""

    def run(self, share: float) -> None:
        """Does that share of it."""


class Sleep:
    """An accelerator's computing, which takes nothing from this machine."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s

    def run(self, share: float) -> None:
        """Sleeps."""
        if share * self._duration_s > 0:
            time.sleep(share * self._duration_s)


class Matmul:
    """Products of small matrices on this machine's core: as many as take `duration_s` undisturbed.

    Args:
        duration_s: how long all of it takes where nothing disturbs.
        product_s: how long one product takes: see `product_seconds`.
    """

    def __init__(self, duration_s: float, product_s: float) -> None:
        self._products = duration_s / product_s
        self._a, self._out = torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)

    def run(self, share: float) -> None:
        """Multiplies."""
        for _ in range(round(share * self._products)):
            torch.mm(self._a, self._a, out=self._out)

    @staticmethod
    def product_seconds(times: int = 2000) -> float:
        """What one product takes here, now."""
        matmul = Matmul(times, 1.0)
        matmul.run(0.1)
        began_s = time.perf_counter()
        matmul.run(1.0)
        return (time.perf_counter() - began_s) / times


class Way(Protocol):
    """Sums one message a step over the ranks. All ranks make it, and call it, together."""

    def steps(self, count: int, computing: bool, communicating: bool) -> None:
        """So many steps, and whatever they leave under way."""

    def close(self) -> None:
        """Ends its threads."""


class Bare:
    """torch.distributed's own: one non-blocking all-reduce, then computing, then the wait."""

    def __init__(self, nbytes: int, compute: Compute) -> None:
        self._flat = torch.zeros(nbytes // FLOAT_BYTES)
        self._compute = compute

    def steps(self, count: int, computing: bool, communicating: bool) -> None:
        """See `Way`."""
        for _ in range(count):
            work = dist.all_reduce(self._flat, async_op=True) if communicating else None
            if computing:
                self._compute.run(1.0)
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Nothing to end."""


class OnEngine:
    """commsched's engine: after each layer's share of computing its gradients become ready."""

    def __init__(self, nbytes: int, layers: int, compute: Compute) -> None:
        numel = max(1, nbytes // FLOAT_BYTES // layers)
        self._buffers = [torch.zeros(numel) for _ in range(layers)]
        self._compute = compute
        settings = Settings(policy="fifo", timeout_s=TIMEOUT_S)
        self._driven = Driven(settings, [numel] * layers)

    def steps(self, count: int, computing: bool, communicating: bool) -> None:
        """See `Way`."""
        for _ in range(count):
            for buffer in self._buffers:
                if computing:
                    self._compute.run(1 / len(self._buffers))
                if communicating:
                    self._driven.ready(buffer)
            if communicating:
                self._driven.finish()

    def close(self) -> None:
        """Ends the engine."""
        self._driven.close()


class _Shares(torch.autograd.Function):
    """Computes in both directions; the gradient is the layer's ready-made buffer."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, _weight: Tensor) -> Tensor:
        ctx.layer = layer
        layer.compute(layer.forward_share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.compute(layer.backward_share)
        return None, grad, layer.gradient.view_as(layer.gradient)


class _Layer(nn.Module):
    def __init__(self, numel: int, shares: tuple[float, float], compute: Compute) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.gradient = torch.zeros(numel)
        self.forward_share, self.backward_share = shares
        self.computing = True
        self._compute = compute

    def compute(self, share: float) -> None:
        if self.computing:
            self._compute.run(share)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Shares.apply(self, x, self.weight)  # type: ignore[no-untyped-call]
        return out


class _Training:
    """A synthetic model under DDP with one hook."""

    def __init__(self, spec: HookSpec, layers: Callable[[], nn.Sequential], cap_mb: float) -> None:
        arguments = {"bucket_cap_mb": cap_mb, "gradient_as_bucket_view": True, **spec.ddp}
        model = layers()
        self._layers = [layer for layer in model if isinstance(layer, _Layer)]
        self._ddp = DistributedDataParallel(model, init_sync=False, **arguments)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=1e-3)
        self._state = register(spec, self._ddp, self._optimizer)
        self._input = torch.ones(1, requires_grad=True)

    def steps(self, count: int, computing: bool) -> None:
        for layer in self._layers:
            layer.computing = computing
        for _ in range(count):
            self._optimizer.zero_grad(set_to_none=True)
            self._ddp(self._input).sum().backward()
            self._optimizer.step()
        if hasattr(self._state, "synchronize"):
            self._state.synchronize()

    def close(self) -> None:
        if hasattr(self._state, "close"):
            self._state.close()


class OnDdp:
    """A training step of a model of equal layers under DDP, with the hook that `text` names.

    Three models: without communication (torch's no-op hook), and two with the hook, one of which
    always computes and one never, so that a hook that measures its steps sees steps of one kind.

    Args:
        text: as `bench.hooks.HookSpec.parse` takes it.
        nbytes: of all gradients.
        layers: how many; each is a bucket of its own unless the text has a `bucket_cap_mb`.
        compute: of one step.
        forward_share: of it in forward; the rest in backward.
        warmup: steps before anything is measured, at least.
    """

    def __init__(
        self,
        text: str,
        nbytes: int,
        layers: int,
        compute: Compute,
        forward_share: float,
        warmup: int,
    ) -> None:
        spec = HookSpec.parse(text)
        numel = max(1, nbytes // FLOAT_BYTES // layers)
        shares = forward_share / layers, (1 - forward_share) / layers

        def model() -> nn.Sequential:
            return nn.Sequential(*(_Layer(numel, shares, compute) for _ in range(layers)))

        cap_mb = numel * FLOAT_BYTES / MB
        self._silent = _Training(HookSpec.parse("noop"), model, cap_mb)
        self._idle, self._busy = (_Training(spec, model, cap_mb) for _ in range(2))
        for training, computing in ((self._silent, True), (self._idle, False), (self._busy, True)):
            training.steps(spec.warmup(warmup), computing)

    def steps(self, count: int, computing: bool, communicating: bool) -> None:
        """See `Way`."""
        hooked = self._busy if computing else self._idle
        (hooked if communicating else self._silent).steps(count, computing)

    def close(self) -> None:
        """Ends the hooks' threads."""
        for training in (self._silent, self._idle, self._busy):
            training.close()


def make(
    text: str, nbytes: int, layers: int, compute: Compute, forward_share: float, warmup: int
) -> Way:
    """The way that `text` names: `c10d`, `engine`, or a hook; warmed up.

    Raises:
        ValueError: no such hook, or settings that it does not take.
    """
    if text not in ("c10d", "engine"):
        return OnDdp(text, nbytes, layers, compute, forward_share, warmup)
    way = Bare(nbytes, compute) if text == "c10d" else OnEngine(nbytes, layers, compute)
    for computing in (True, False):
        way.steps(max(2, warmup), computing, True)
    return way
