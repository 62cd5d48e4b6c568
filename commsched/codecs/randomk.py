"""randomk: a random part of the gradients, the same on all ranks, is averaged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.base import Codec, Oracle, Summed, WireSpec
from commsched.codecs.draws import mix, mix_oracle
from commsched.codecs.topk import check_ratio, clear, gather, kept, scatter

if TYPE_CHECKING:
    from commsched.layout import Chunk

__all__ = ["RandomK"]

WORD = 0xFFFFFFFF


# ---------------------------------------------------------------- drawing and checking


def _drawn(numel: int, count: int, seed: int) -> torch.Tensor:
    """One index of each of `count` strata, int32, ascending."""
    indices = torch.empty(count, dtype=torch.int32)
    kernel = kernels.load("select")
    if kernel is not None:
        kernel.strata(numel, seed, indices.numpy())
        return indices
    bounds = torch.arange(count + 1) * numel // count
    low, width = bounds[:-1], bounds.diff()
    salt = mix(torch.tensor([seed]).to(torch.int32))
    words = mix(torch.arange(count, dtype=torch.int32) + salt).long() & WORD
    return indices.copy_(low + (words * width >> 32))


def _is_finite(x: torch.Tensor) -> bool:
    kernel = kernels.load("select")
    if kernel is not None:
        return bool(kernel.is_finite(x.numpy()))
    return bool(x.isfinite().all())


def _add_finite(grad: torch.Tensor, error: torch.Tensor) -> bool:
    """Add `grad` to `error`; whether all of that is finite."""
    kernel = kernels.load("select")
    if kernel is not None:
        return bool(kernel.add_finite(grad.numpy(), error.numpy()))
    return _is_finite(error.add_(grad))


# ---------------------------------------------------------------- the codec


def _indices(codec: Codec, numel: int, seed: int) -> list[int]:
    assert isinstance(codec, RandomK)
    count = kept(numel, codec.ratio)
    bounds = [j * numel // count for j in range(count + 1)]
    salt = mix_oracle(np.array([seed], np.uint32))
    words = mix_oracle(np.arange(count, dtype=np.uint32) + salt).tolist()
    return [
        low + (word * (high - low) >> 32)
        for low, high, word in zip(bounds[:-1], bounds[1:], words, strict=True)
    ]


def _encoded(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    last = 0.0 if np.isfinite(grad).all() else np.nan
    return np.append(grad[_indices(codec, grad.size, seed)], np.float32(last)).view(np.uint8)


def _decoded(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    values = wire.view(np.float32)
    if not np.isfinite(values[-1]):
        return np.full(numel, np.nan, np.float32)
    out = np.zeros(numel, np.float32)
    out[_indices(codec, numel, seed)] = values[:-1]
    return out


@dataclass(frozen=True)
class RandomK(Summed):
    """A random part of the gradients, drawn anew each step, the same on all ranks: no indices.

    The chunk is cut into as many equal strata as gradients are kept, and one of each travels. So
    they are distinct and sorted, and each gradient is drawn equally often. Random numbers come from
    a hash of the seed and the stratum's number: any part can be drawn alone, and nobody's
    generator is touched.

    The wire: float32 values, and one more that is 0, or NaN if any gradient is not finite, drawn or
    not. Then all of the average becomes NaN, on every rank, and the error 0.

    Values are not scaled up by what was left out: error feedback sends that later.

    Sources: Stich et al., "Sparsified SGD with Memory", 2018; GRACE (Xu et al., 2021), which draws
    some indices twice and resets torch's generator.

    Attributes:
        ratio: the share of gradients that travels.
    """

    name = "randomk"
    oracle = Oracle(_encoded, _decoded)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def prepare(self) -> None:
        """Compile."""
        x = torch.ones(3)
        wire = torch.empty(kept(3, self.ratio) + 1)
        self.encode(x, wire)
        self.encode_feedback(x, torch.zeros(3), wire)
        self.decode(wire, x)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """The values, and what says whether all are finite."""
        return WireSpec(torch.float32, kept(chunk.numel, self.ratio) + 1)

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """As many as `out` holds, but one."""
        self._fill(grad, _drawn(grad.numel(), out.numel() - 1, seed), _is_finite(grad), out)

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """The error becomes 0 where it was sent, and everywhere if it is not finite anywhere."""
        finite = _add_finite(grad, error)
        indices = _drawn(grad.numel(), out.numel() - 1, seed)
        self._fill(error, indices, finite, out)
        if finite:
            clear(error, indices, finite)
        else:
            error.zero_()

    def decode(self, wire: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Zeros, and the values that were sent; all NaN where one was not finite."""
        if not math.isfinite(wire[-1].item()):
            out.fill_(math.nan)
            return
        scatter(wire[:-1], _drawn(out.numel(), wire.numel() - 1, seed), out)

    def _fill(
        self, x: torch.Tensor, indices: torch.Tensor, finite: bool, out: torch.Tensor
    ) -> None:
        gather(x, indices, out[:-1])
        out[-1] = 0.0 if finite else math.nan
