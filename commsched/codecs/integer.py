"""int8, int4: gradients as whole multiples of a fraction of their block's largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.blocks import Blockwise, blocks_oracle

__all__ = ["Int4", "Int8"]

Array = np.ndarray[Any, Any]


def _int8_codes(codec: Any, scaled: Array) -> Array:
    return np.rint(scaled).astype(np.int8).view(np.uint8)


def _int8_values(codec: Any, codes: Array) -> Array:
    return codes.view(np.int8).astype(np.float32)


@dataclass(frozen=True)
class Int8(Blockwise):
    """A byte a gradient: ``rint(gradient * 127 / largest)``.

    Args:
        block: gradients that share a scale, a power of two; 512 add 0.8 % to the bytes.

    Source: Dettmers et al. 2022 (block-wise quantization); as the linear type there.
    """

    name = "int8"
    top = 127.0
    oracle = blocks_oracle(_int8_codes, _int8_values)

    def compiled(self) -> Any:
        """See `Blockwise`."""
        family = kernels.load("integer")
        return family and family.INT8

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Two's complement."""
        return scaled.round().to(torch.int8).view(torch.uint8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The integers."""
        return codes.view(torch.int8).to(torch.float32)


def _int4_codes(codec: Any, scaled: Array) -> Array:
    nibbles = np.rint(scaled).astype(np.int8).view(np.uint8) % 16
    even = np.pad(nibbles, (0, nibbles.size % 2))
    return even[0::2] + 16 * even[1::2]


def _int4_values(codec: Any, codes: Array) -> Array:
    nibbles = np.stack([codes % 16, codes // 16], axis=1).flatten().astype(np.float32)
    return np.where(nibbles < 8, nibbles, nibbles - np.float32(16))


@dataclass(frozen=True)
class Int4(Blockwise):
    """Half a byte a gradient: ``rint(gradient * 7 / largest)``; the first of two in the low half.

    Args:
        block: gradients that share a scale, a power of two. 128 add 6 % to the bytes; of
            normally distributed gradients, 64 would lose 16 % less (squared) for 6 % more bytes.

    Source: ZeRO++ (Wang et al. 2023), qgZ: quantized gradients by all-to-all in blocks.
    """

    block: int = 128
    name = "int4"
    top = 7.0
    oracle = blocks_oracle(_int4_codes, _int4_values)

    def compiled(self) -> Any:
        """See `Blockwise`."""
        family = kernels.load("integer")
        return family and family.INT4

    def code_nbytes(self, numel: int) -> int:
        """Half a byte each."""
        return -(-numel // 2)

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Two's complement in four bits, two a byte."""
        pairs = scaled.round().to(torch.int8).view(torch.uint8).view(-1, 2)
        return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The integers."""
        nibbles = torch.stack((codes & 15, codes >> 4), dim=1).flatten().view(torch.int8)
        return ((nibbles ^ 8) - 8).to(torch.float32)
