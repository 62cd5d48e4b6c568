"""ternary and qsgd: gradients rounded at random, so that they are right on average."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.base import Codec, Oracle, Sharded
from commsched.codecs.draws import uniform, uniform_oracle
from commsched.codecs.lanes import check_block, lane_sum, lane_sums, row_sizes, rows

__all__ = ["Qsgd", "Ternary"]

_LARGEST = float(np.finfo(np.float32).max)


def _draws(seed: int, blocks: torch.Tensor) -> torch.Tensor:
    return uniform(seed, torch.arange(blocks.numel(), dtype=torch.int32)).view_as(blocks)


# ---------------------------------------------------------------- the oracles


def _ternary_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    assert isinstance(codec, Ternary)
    draws = uniform_oracle(seed, np.arange(grad.size, dtype=np.uint32))
    scales, codes = [], []
    for start in range(0, grad.size, codec.block):
        block = grad[start : start + codec.block]
        sizes = np.abs(block)
        scale = sizes.max()
        if codec.clip and np.isfinite(scale):
            square = lane_sum(sizes.astype(np.float64) ** 2) / block.size
            scale = np.minimum(np.float64(scale), codec.clip * np.sqrt(square)).astype(np.float32)
        scales.append(scale if np.isfinite(scale) else np.float32(np.nan))
        with np.errstate(invalid="ignore"):
            chance = np.minimum(sizes, scales[-1]) / scales[-1]
        code = np.where(block < 0, 2, 1)
        codes.append(np.where(draws[start : start + block.size] < chance, code, 0))
    quads = np.concatenate([*codes, np.zeros(-grad.size % 4, int)]).reshape(-1, 4)
    packed = (quads << np.array([0, 2, 4, 6])).sum(1).astype(np.uint8)
    return _joined(codec, scales, packed, grad.size)


def _from_ternary(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    assert isinstance(codec, Ternary)
    head = 4 * -(-numel // codec.block)
    scales = np.repeat(wire[:head].view(np.float32), codec.block)[:numel]
    codes = (wire[head:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).flatten()[:numel]
    values: np.ndarray = np.array([0, 1, -1], np.float32)[codes]
    return values * scales


def _qsgd_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    assert isinstance(codec, Qsgd)
    draws = uniform_oracle(seed, np.arange(grad.size, dtype=np.uint32))
    norms, codes = [], []
    for start in range(0, grad.size, codec.block):
        block = grad[start : start + codec.block]
        norm = np.sqrt(lane_sum(block.astype(np.float64) ** 2))
        norms.append(np.minimum(norm, _LARGEST).astype(np.float32))
        if not np.isfinite(norm):
            norms[-1] = np.float32(np.nan)
        code = np.zeros(block.size, np.int8)
        if norms[-1] > 0:
            size = np.abs(block) / norms[-1] * np.float32(codec.levels)
            up = draws[start : start + block.size] < size - np.floor(size)
            code = (np.sign(block) * (np.floor(size) + up)).astype(np.int8)
        codes.append(code)
    return _joined(codec, norms, np.concatenate(codes).view(np.uint8), grad.size)


def _from_qsgd(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    assert isinstance(codec, Qsgd)
    head = 4 * -(-numel // codec.block)
    norms = np.repeat(wire[:head].view(np.float32), codec.block)[:numel]
    codes = wire[head : head + numel].view(np.int8).astype(np.float32)
    return codes / np.float32(codec.levels) * norms


def _joined(codec: _Blocks, head: list[np.float32], payload: np.ndarray, numel: int) -> np.ndarray:
    wire = np.zeros(codec.nbytes(numel), np.uint8)
    parts = np.concatenate([np.array(head, np.float32).view(np.uint8), payload])
    wire[: parts.size] = parts
    return wire


# ---------------------------------------------------------------- the codecs


class _Blocks(Sharded):
    """A float32 for each block, its head; then the codes; then zeros up to a multiple of 4 bytes.

    Kernels bear the codec's name and take its parts as arrays.
    """

    biased = False
    codes_a_byte: ClassVar[int]
    block: int

    def nbytes(self, numel: int, step: int | None = None) -> int:
        """See `ByteCodec`."""
        return 4 * (-(-numel // self.block) + -(-numel // (4 * self.codes_a_byte)))

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """See `ByteCodec`."""
        out[-4:] = 0  # the padding, of 0 to 3 bytes
        heads, codes = self._parts(out, grad.numel())
        kernel = self._kernel("encode")
        if kernel is None:
            self._encode_torch(grad, heads, codes, seed)
        else:
            kernel(grad.numpy(), *self._options(), seed, heads.numpy(), codes.numpy())

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """See `ByteCodec`."""
        heads, codes = self._parts(wire, out.numel())
        kernel = self._kernel("decode")
        if kernel is None:
            spread = heads.repeat_interleave(self.block)[: out.numel()]
            torch.mul(self._values(codes)[: out.numel()], spread, out=out)
        else:
            kernel(heads.numpy(), codes.numpy(), *self._options(), out.numpy())

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """See `ByteCodec`."""
        kernel = self._kernel("decode_add")
        if kernel is None:
            super().decode_add(wire, out)
            return
        heads, codes = self._parts(wire, out.numel())
        kernel(heads.numpy(), codes.numpy(), *self._options(), out.numpy())

    @abstractmethod
    def _options(self) -> tuple[int, float]:
        """As the kernels take them."""

    @abstractmethod
    def _encode_torch(
        self, grad: torch.Tensor, heads: torch.Tensor, codes: torch.Tensor, seed: int
    ) -> None:
        """Write all heads and codes."""

    @abstractmethod
    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        """What the codes stand for, in heads: float32."""

    def _parts(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads, and the codes without the padding."""
        end = 4 * -(-numel // self.block)
        return wire[:end].view(torch.float32), wire[end : end + -(-numel // self.codes_a_byte)]

    def _kernel(self, what: str) -> Callable[..., None] | None:
        return getattr(kernels.load("stochastic"), f"{self.name}_{what}", None)


@dataclass(frozen=True)
class Ternary(_Blocks):
    """-1, 0 or 1 times the largest magnitude of a block; unbiased.

    Source: TernGrad (Wen et al., NeurIPS 2017), with blocks for its layers. A gradient x becomes
    the scale, with the sign of x, with probability ``|x| / scale``, and 0 otherwise.

    Wire: the blocks' scales (float32); then two bits a gradient, element 4j + i at bits 2i and
    2i + 1 of byte j, 0 for zero, 1 for plus, 2 for minus; zeros up to a multiple of 4 bytes.

    Element i is not 0 where ``uniform(seed, i) < min(|x|, scale) / scale``, in float32. The scale
    of a block with a NaN or Inf is NaN, and its codes are 0. Decoded: 0, 1 or -1 times the scale.

    Attributes:
        block: gradients that share a scale: a power of two from 64 to 65536.
        clip: 0, or how many standard deviations larger magnitudes are cut down to: less noise
            (TernGrad's own is 2.5), but no longer unbiased, so that errors are fed back. The
            deviation is that from zero, ``sqrt(lane_sum(x * x) / number)`` in float64; that from
            the mean is nothing for a block of equal gradients, and would leave nothing of them.
    """

    name = "ternary"
    oracle = Oracle(_ternary_bytes, _from_ternary)
    codes_a_byte = 4

    block: int = 256
    clip: float = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        check_block(self.name, self.block)
        if not (self.clip == 0 or 1 <= self.clip < float("inf")):
            raise ValueError(f"ternary: clip={self.clip} must be 0 (never) or at least 1")
        if self.clip:
            object.__setattr__(self, "biased", True)

    def _options(self) -> tuple[int, float]:
        return self.block, float(self.clip)

    def _encode_torch(
        self, grad: torch.Tensor, heads: torch.Tensor, codes: torch.Tensor, seed: int
    ) -> None:
        blocks = rows(grad, self.block)
        sizes = blocks.abs()
        top = sizes.amax(1)
        heads.copy_(top.masked_fill(~top.isfinite(), torch.nan))
        if self.clip:
            square = lane_sums(sizes.double().square_()) / row_sizes(grad, self.block)
            heads.copy_(torch.minimum(heads.double(), self.clip * square.sqrt()))
        scale = heads.unsqueeze(1)
        drawn = _draws(seed, blocks) < torch.minimum(sizes, scale) / scale
        quads = (drawn * ((blocks < 0).to(torch.uint8) + 1)).view(-1, 4)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
        codes.copy_((quads << shifts).sum(1, dtype=torch.uint8)[: codes.numel()])

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
        each = (codes.unsqueeze(1) >> shifts & 3).flatten()
        return (each & 1).float() - (each >> 1)


@dataclass(frozen=True)
class Qsgd(_Blocks):
    """Multiples of a block's L2 norm over `levels`, rounded up or down at random; unbiased.

    Source: QSGD (Alistarh et al., NeurIPS 2017), without its entropy coding.

    Wire: the blocks' norms (float32); then a signed byte a gradient; zeros up to a multiple of 4
    bytes.

    The norm is ``sqrt(lane_sum(x * x))`` in float64, at most the largest float32, rounded to
    float32. With ``size = |x| / norm * levels`` in float32, the code of element i is floor(size),
    plus 1 where ``uniform(seed, i) < size - floor(size)``, with the sign of x. The norm of a block
    with a NaN or Inf is NaN, and its codes are 0. Decoded: ``code / levels * norm``, in that order.

    Attributes:
        levels: 1 to 127.
        block: gradients that share a norm: a power of two from 64 to 65536.
    """

    name = "qsgd"
    oracle = Oracle(_qsgd_bytes, _from_qsgd)
    codes_a_byte = 1

    levels: int = 127
    block: int = 128

    def __post_init__(self) -> None:
        """Check the options."""
        check_block(self.name, self.block)
        if not 1 <= self.levels <= 127:
            raise ValueError(f"qsgd: levels={self.levels} must be from 1 to 127")

    def _options(self) -> tuple[int, float]:
        return self.block, float(self.levels)

    def _encode_torch(
        self, grad: torch.Tensor, heads: torch.Tensor, codes: torch.Tensor, seed: int
    ) -> None:
        blocks = rows(grad, self.block)
        norm = lane_sums(blocks.double().square_()).sqrt_()
        heads.copy_(norm.clamp(max=_LARGEST).masked_fill_(~norm.isfinite(), torch.nan))
        column = heads.unsqueeze(1)
        # 0 where there is no norm to divide by: NaN could not be cast to an integer.
        size = torch.where(column > 0, blocks.abs() / column * self.levels, 0.0)
        low = size.floor()
        code = (low + (_draws(seed, blocks) < size - low)).copysign_(blocks)
        codes.view(torch.int8).copy_(code.flatten()[: codes.numel()])

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8) / self.levels
