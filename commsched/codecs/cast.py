"""none, fp16, bf16: gradients as they are, or cast to two bytes. All are summed on the wire.

The engine divides by the world size *before* it encodes, as torch's own all-reduce hook does:
gradients of 4e4 on eight ranks sum to 3.2e5, which fp16 cannot hold, while their mean fits.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from commsched.codecs.base import Codec, WireSpec

__all__ = ["Bf16", "Fp16", "Identity"]


class Identity(Codec):
    """Every bit travels. The engine recognises it and reduces the gradients where they lie."""

    name = "none"
    lossy = False
    exchange = "ring_all_reduce"

    def supports(self, dtype: torch.dtype) -> bool:
        """Everything travels as it is."""
        return True

    def wire(self, numel: int, dtype: torch.dtype) -> WireSpec:
        """The same tensor."""
        return WireSpec(dtype, numel)

    def encode(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Copy."""
        out.copy_(grad)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Copy."""
        out.copy_(wire)


class _Cast(Codec):
    """Round each gradient to a two-byte float; sums are rounded again at each hop of the ring.

    Source: torch's fp16_compress_hook and bf16_compress_hook; Horovod's fp16 compression.
    """

    lossy = True
    exchange = "ring_all_reduce"
    to: ClassVar[torch.dtype]

    def supports(self, dtype: torch.dtype) -> bool:
        """Wider floats; complex gradients arrive as their float32 parts."""
        return dtype in (torch.float32, torch.float64)

    def wire(self, numel: int, dtype: torch.dtype) -> WireSpec:
        """Two bytes a gradient."""
        return WireSpec(self.to, numel)

    def encode(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Cast; out-of-range values become Inf, NaN stays NaN.

        Rounds to nearest even (float64 by way of float32, as torch does, so twice).
        """
        out.copy_(grad)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Cast back, exactly."""
        out.copy_(wire)


class Fp16(_Cast):
    """IEEE half: 11 bits of precision, up to 65504; gradients below 6e-8 vanish."""

    name = "fp16"
    to = torch.float16


class Bf16(_Cast):
    """bfloat16: 8 bits of precision, the range of float32."""

    name = "bf16"
    to = torch.bfloat16
