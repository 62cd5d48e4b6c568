"""none, fp16, bf16: gradients as they are, or cast to two bytes. All are summed on the wire.

Shares of the mean are encoded, not gradients, as torch's own fp16 hook does: gradients of 4e4 on
eight ranks sum to 3.2e5, which fp16 cannot hold, while their mean fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from commsched.codecs.base import Codec, Oracle, Summed, WireSpec

if TYPE_CHECKING:
    from commsched.layout import Chunk
    from commsched.parcel import Parcel, Rounds

__all__ = ["Bf16", "Fp16", "Identity"]


@dataclass(frozen=True)
class Identity(Codec):
    """Every bit travels, whatever the dtype. The packer knows it and reduces gradients in place."""

    name = "none"
    lossy = False
    biased = False
    ops = ("all_reduce",)
    start_step = 0
    for_all = True

    def supports(self, dtype: torch.dtype) -> bool:
        """Everything travels as it is."""
        return True

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """The same bytes."""
        return WireSpec(getattr(torch, chunk.dtype), chunk.numel)

    def rounds(self, parcel: Parcel) -> Rounds:
        """Not used."""
        raise NotImplementedError("the packer sums exact gradients where they lie")


class _Cast(Summed):
    """Round each share to a two-byte float; sums are rounded again at each hop of the ring.

    Source: torch's fp16_compress_hook and bf16_compress_hook; Horovod's fp16 compression. No error
    feedback unless asked for: rounding to nearest hardly drifts, and it costs memory and time.
    """

    biased = False
    start_step = 0
    for_all = True
    to: ClassVar[torch.dtype]

    def supports(self, dtype: torch.dtype) -> bool:
        """Wider floats; complex gradients arrive as their float32 parts."""
        return dtype in (torch.float32, torch.float64)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """Two bytes a gradient."""
        return WireSpec(self.to, chunk.numel)

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Cast, to nearest even; out-of-range values become Inf, NaN stays NaN."""
        out.copy_(grad)

    def decode(self, wire: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Cast back, exactly."""
        out.copy_(wire)


def _fp16_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        return grad.astype(np.float16).view(np.uint8)


def _from_fp16(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    return wire.view(np.float16).astype(np.float32)


def _bf16_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    """The upper 16 bits of each float32, rounded to nearest even; only NaN needs care."""
    word = grad.view(np.uint32).astype(np.uint64)
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(grad), np.uint16(0x7FC0), rounded).view(np.uint8)


def _from_bf16(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    return (wire.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Fp16(_Cast):
    """IEEE half: 11 bits of precision, up to 65504; gradients below 6e-8 vanish."""

    name = "fp16"
    to = torch.float16
    oracle = Oracle(_fp16_bytes, _from_fp16)


@dataclass(frozen=True)
class Bf16(_Cast):
    """bfloat16: 8 bits of precision, the range of float32."""

    name = "bf16"
    to = torch.bfloat16
    oracle = Oracle(_bf16_bytes, _from_bf16)
