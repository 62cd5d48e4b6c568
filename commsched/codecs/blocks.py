"""What codecs have in common that scale each block of gradients by its largest magnitude.

A float32 scale for each block, all scales first on the wire, then the codes. A block that holds a
NaN or an Inf has a NaN for a scale and decodes to NaN; one that is all zero, or too small to divide
by, has 0 and decodes to 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from commsched.codecs.base import Oracle, Sharded

__all__ = ["LARGEST", "Blockwise", "blocks_oracle", "most_scale"]

LARGEST = np.finfo(np.float32).max
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 65536
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Blockwise(Sharded):
    """Each block of gradients is scaled by its largest magnitude, which travels as float32.

    With `top` what the largest magnitude is scaled to: ``scale = largest / top`` and the numbers
    are multiplied by ``top / largest``, all in float32, then rounded to codes. Decoded: what the
    code stands for, times the scale. ``top * scale`` stays finite.

    Args:
        block: gradients that share a scale, a power of two.

    Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization.
    """

    block: int = 512

    def __post_init__(self) -> None:
        """Check the options."""
        size = self.block
        if not SMALLEST_BLOCK <= size <= LARGEST_BLOCK or size & (size - 1):
            raise ValueError(
                f"block={size} is not allowed for codec {self.name!r}: "
                f"it takes a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
            )

    @property
    @abstractmethod
    def top(self) -> float:
        """What the largest magnitude of a block is scaled to."""

    @abstractmethod
    def compiled(self) -> Any:
        """Its `Kernels` (see `kernels.integer`); None where numba is missing."""

    @abstractmethod
    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """The codes, as uint8, of scaled gradients (1-D, finite, an even number of them)."""

    @abstractmethod
    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """What the codes stand for: 1-D, float32, at least as many as there were gradients."""

    def code_nbytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` gradients."""
        return numel

    def nbytes(self, numel: int, step: int | None = None) -> int:
        """Scales and codes, up to a multiple of 4."""
        return 4 * self._blocks(numel) + -(-self.code_nbytes(numel) // 4) * 4

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Scale, and round to nearest."""
        out[-4:].zero_()  # where codes may end
        scales, codes = self._parts(out, grad.numel())
        fast = self.compiled()
        if fast is None:
            self._encode_by_torch(grad, scales, codes)
        else:
            fast.encode(grad.numpy(), scales.numpy(), codes.numpy(), self.block)

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """See `ByteCodec`; compiled, block by block while it lies in the cache."""
        fast = self.compiled()
        if fast is None:
            super().encode_feedback(grad, error, out, seed)
            return
        out[-4:].zero_()
        scales, codes = self._parts(out, grad.numel())
        fast.encode_feedback(grad.numpy(), error.numpy(), scales.numpy(), codes.numpy(), self.block)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """What the codes stand for, times the scale of their block."""
        scales, codes = self._parts(wire, out.numel())
        fast = self.compiled()
        if fast is not None:
            fast.decode(scales.numpy(), codes.numpy(), out.numpy(), self.block)
            return
        every = scales.repeat_interleave(self.block)[: out.numel()]
        torch.mul(self.values(codes)[: out.numel()], every, out=out)

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """As `decode`, then one float32 add."""
        fast = self.compiled()
        if fast is None:
            super().decode_add(wire, out)
            return
        scales, codes = self._parts(wire, out.numel())
        fast.decode_add(scales.numpy(), codes.numpy(), out.numpy(), self.block)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _parts(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = 4 * self._blocks(numel)
        return wire[:first].view(torch.float32), wire[first : first + self.code_nbytes(numel)]

    def _encode_by_torch(
        self, grad: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor
    ) -> None:
        missing = scales.numel() * self.block - grad.numel()
        rows = functional.pad(grad, (0, missing)).view(-1, self.block)
        factors = self._scale(rows.abs().amax(1), scales)[:, None]
        scaled = rows.mul_(factors).nan_to_num_(0.0)
        coded = self.codes(scaled.flatten()).view(scales.numel(), -1)
        coded.masked_fill_(factors == 0.0, 0)
        codes.copy_(coded.flatten()[: codes.numel()])

    def _scale(self, peaks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Fill in the scales; return what each block is multiplied by, 0 if none of it travels."""
        top = torch.tensor(self.top)
        factors = top.expand_as(peaks).div(peaks)
        tiny, broken = factors.isinf(), peaks.isfinite().logical_not_()
        scales.copy_(peaks.div(top).clamp_max_(most_scale(self.top)))
        scales.masked_fill_(tiny, 0.0).masked_fill_(broken, float("nan"))
        return factors.masked_fill_(tiny | broken, 0.0)


def most_scale(top: float) -> float:
    """The largest scale at which ``top * scale`` is finite, as every block's must be."""
    scale = LARGEST / np.float32(top)
    with np.errstate(over="ignore"):
        fits = np.isfinite(np.float32(top) * scale)
    return float(scale if fits else np.nextafter(scale, np.float32(0)))


# ---------------------------------------------------------------- the same in NumPy


def blocks_oracle(
    codes: Callable[[Any, Array], Array], values: Callable[[Any, Array], Array]
) -> Oracle:
    """The oracle of a `Blockwise` codec.

    Args:
        codes: (codec, scaled gradients of a block) -> uint8.
        values: (codec, codes of all blocks and the zeros after them) -> float32.
    """
    return Oracle(partial(_encode_blocks, codes), partial(_decode_blocks, values))


def _encode_blocks(
    codes: Callable[[Any, Array], Array], codec: Any, grad: Array, seed: int
) -> Array:
    blocks = [grad[at : at + codec.block] for at in range(0, grad.size, codec.block)]
    with np.errstate(all="ignore"):
        pairs = [_encode_block(partial(codes, codec), np.float32(codec.top), x) for x in blocks]
    scales = np.array([scale for scale, _ in pairs], np.float32).view(np.uint8)
    wire = np.concatenate([scales, *(coded for _, coded in pairs)])
    return np.pad(wire, (0, -wire.size % 4))


def _encode_block(
    codes: Callable[[Array], Array], top: np.float32, x: Array
) -> tuple[np.float32, Array]:
    peak = np.abs(x).max()
    nothing = np.zeros_like(codes(np.zeros_like(x)))
    if not np.isfinite(peak):
        return np.float32(np.nan), nothing
    if np.isinf(top / peak):
        return np.float32(0), nothing
    scale = peak / top
    while np.isinf(top * scale):
        scale = np.nextafter(scale, np.float32(0))
    return scale, codes(x * (top / peak))


def _decode_blocks(
    values: Callable[[Any, Array], Array], codec: Any, wire: Array, numel: int, seed: int
) -> Array:
    blocks = -(-numel // codec.block)
    scales = wire[: 4 * blocks].view(np.float32)
    return values(codec, wire[4 * blocks :])[:numel] * np.repeat(scales, codec.block)[:numel]
