"""sign: one bit a gradient, and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.base import Codec, Oracle, Sharded
from commsched.codecs.lanes import check_block, lane_sum, lane_sums, row_sizes, rows

__all__ = ["Sign"]

_BYTE = 8  # bits


def _encode_oracle(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    assert isinstance(codec, Sign)
    scales, signs = [], []
    for start in range(0, grad.size, codec.block):
        block = grad[start : start + codec.block]
        scale = (lane_sum(np.abs(block).astype(np.float64)) / block.size).astype(np.float32)
        finite = np.isfinite(scale)
        scales.append(scale if finite else np.float32(np.nan))
        signs.append(np.signbit(block) & finite)
    wire = np.zeros(codec.nbytes(grad.size), np.uint8)
    head = np.array(scales, np.float32).view(np.uint8)
    bits = np.packbits(np.concatenate(signs), bitorder="little")
    wire[: head.size] = head
    wire[head.size : head.size + bits.size] = bits
    return wire


def _decode_oracle(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    assert isinstance(codec, Sign)
    head = 4 * -(-numel // codec.block)
    scales = np.repeat(wire[:head].view(np.float32), codec.block)[:numel]
    negative = np.unpackbits(wire[head:], bitorder="little")[:numel] == 1
    return np.where(negative, -scales, scales)


# ---------------------------------------------------------------- the codec


@dataclass(frozen=True)
class Sign(Sharded):
    """Each gradient becomes plus or minus the mean magnitude of its block.

    Sources: 1-bit SGD with error feedback (Seide et al., Interspeech 2014); the scale of EF-signSGD
    (Karimireddy et al., ICML 2019), of blocks here, so that layers of small gradients are not
    drowned by others. Without error feedback it may not converge.

    Wire: the blocks' scales (float32); then a bit a gradient, element 8j + i at bit i of byte j, 1
    where the float's sign bit is set; zeros up to a multiple of 4 bytes.

    The scale is `lane_sum` of the magnitudes over their number, in float64, then rounded. That of a
    block with a NaN or Inf is NaN, and its bits are 0.

    Attributes:
        block: gradients that share a scale: a power of two from 64 to 65536.
    """

    name = "sign"
    oracle = Oracle(_encode_oracle, _decode_oracle)

    block: int = 1024

    def __post_init__(self) -> None:
        """Check the options."""
        check_block(self.name, self.block)

    def nbytes(self, numel: int, step: int | None = None) -> int:
        """See `ByteCodec`."""
        return 4 * (-(-numel // self.block) + -(-numel // 32))

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """See `ByteCodec`."""
        out[-4:] = 0  # the padding, of 0 to 3 bytes
        kernel = _kernels()
        if kernel is None:
            self._encode_torch(grad, out)
            return
        scales, bits = self._parts(out, grad.numel())
        kernel.encode(grad.numpy(), self.block, scales.numpy(), bits.numpy())

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """See `ByteCodec`."""
        kernel = _kernels()
        if kernel is None:
            super().encode_feedback(grad, error, out, seed)
            return
        out[-4:] = 0
        scales, bits = self._parts(out, grad.numel())
        kernel.encode_feedback(
            grad.numpy(), error.numpy(), self.block, scales.numpy(), bits.numpy()
        )

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """See `ByteCodec`."""
        kernel = _kernels()
        if kernel is None:
            self._decode_torch(wire, out)
            return
        scales, bits = self._parts(wire, out.numel())
        kernel.decode(scales.numpy(), bits.numpy(), self.block, out.numpy())

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """See `ByteCodec`."""
        kernel = _kernels()
        if kernel is None:
            super().decode_add(wire, out)
            return
        scales, bits = self._parts(wire, out.numel())
        kernel.decode_add(scales.numpy(), bits.numpy(), self.block, out.numpy())

    def _parts(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Its scales, and its bits without the padding."""
        head = 4 * -(-numel // self.block)
        return wire[:head].view(torch.float32), wire[head : head + -(-numel // _BYTE)]

    def _encode_torch(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        blocks = rows(grad, self.block)
        mean = lane_sums(blocks.abs().double()) / row_sizes(grad, self.block)
        scales, bits = self._parts(out, grad.numel())
        scales.copy_(mean).masked_fill_(~mean.isfinite(), torch.nan)
        signs = blocks.signbit() & mean.isfinite().unsqueeze(1)
        powers = 1 << torch.arange(_BYTE, dtype=torch.uint8)
        packed = (signs.view(-1, _BYTE) * powers).sum(1, dtype=torch.uint8)
        bits.copy_(packed[: bits.numel()])

    def _decode_torch(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        scales, bits = self._parts(wire, out.numel())
        shifts = torch.arange(_BYTE, dtype=torch.uint8)
        negative = (bits.unsqueeze(1) >> shifts & 1).flatten()[: out.numel()].bool()
        spread = scales.repeat_interleave(self.block)[: out.numel()]
        torch.where(negative, -spread, spread, out=out)


def _kernels() -> ModuleType | None:
    return kernels.load("sign")
