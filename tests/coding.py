"""Encoding and decoding in tests: one call each, and what it means to be the same."""

from __future__ import annotations

import numpy as np
import torch

from commsched.codecs.base import ByteCodec

__all__ = ["decoded", "encoded", "normal", "same", "same_values"]


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same(one: torch.Tensor, other: torch.Tensor | np.ndarray) -> bool:
    """Bit for bit: tells -0 from 0, and one NaN from another."""
    other = torch.as_tensor(other)
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def same_values(one: torch.Tensor, other: torch.Tensor | np.ndarray) -> bool:
    """Bit for bit, but any NaN for another: hardware makes different ones."""
    other = torch.as_tensor(other)
    if one.dtype != torch.float32:
        return same(one, other)
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and same(one[~nan], other[~nan])


def encoded(codec: ByteCodec, grad: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The wire, of which every byte must be written."""
    wire = torch.full((codec.nbytes(grad.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(grad, wire, seed)
    return wire


def decoded(codec: ByteCodec, wire: torch.Tensor, numel: int) -> torch.Tensor:
    """All of the gradients, of which every one must be written."""
    out = torch.full((numel,), 7.0)
    codec.decode(wire, out)
    return out
