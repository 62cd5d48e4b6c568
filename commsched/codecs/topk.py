"""topk: of each rank's gradients, the largest travel, with their indices.

Also what the other sparse codecs share: how many entries are kept, how they are selected. Each
selection is done by a kernel, or by torch where there is none, with the same result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.base import Codec, Gathered, Oracle

__all__ = [
    "TopK",
    "add_select",
    "check_ratio",
    "clear",
    "gather",
    "kept",
    "scatter",
    "select",
    "split",
]

INF = 0x7F800000  # as int32; the magnitudes of NaN are greater


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless indices and values are at most as many bytes as all gradients."""
    if not 0 < ratio <= 0.5:
        raise ValueError(f"ratio={ratio} is not allowed: it takes more than 0 and at most 0.5")


@cache
def kept(numel: int, ratio: float) -> int:
    """How many of `numel` gradients travel: that share, rounded up.

    Of the decimal number that the user wrote: 0.07 * 100 in floats is more than 7.
    """
    return math.ceil(Fraction(repr(ratio)) * numel)


# ---------------------------------------------------------------- selection


def select(x: torch.Tensor, indices: torch.Tensor) -> bool:
    """Fill `indices` (int32) with those of the largest magnitudes; whether all of `x` is finite.

    Ascending. Magnitudes are compared as integers, so NaN is above Inf, and Inf above all others.
    Of equal ones the first are taken.
    """
    kernel = kernels.load("select")
    if kernel is not None:
        return bool(kernel.select(x.numpy(), indices.numpy()))
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    place = x.numel() - indices.numel()
    # torch.topk takes up to 20 times as long.
    threshold = int(np.partition(magnitudes.numpy(), place)[place])
    chosen = magnitudes > threshold
    ties = (magnitudes == threshold).nonzero().flatten()
    chosen[ties[: indices.numel() - int(chosen.sum())]] = True
    indices.copy_(chosen.nonzero().flatten())
    return bool(magnitudes.max() < INF)


def add_select(grad: torch.Tensor, error: torch.Tensor, indices: torch.Tensor) -> bool:
    """Add `grad` to `error`, then `select` from that."""
    kernel = kernels.load("select")
    if kernel is not None:
        return bool(kernel.add_select(grad.numpy(), error.numpy(), indices.numpy()))
    return select(error.add_(grad), indices)


def gather(x: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """``values = x[indices]``."""
    kernel = kernels.load("select")
    if kernel is not None:
        kernel.gather(x.numpy(), indices.numpy(), values.numpy())
    else:
        torch.index_select(x, 0, indices, out=values)


def clear(x: torch.Tensor, indices: torch.Tensor, finite: bool) -> None:
    """``x[indices] = 0``; and 0 for what is not finite."""
    kernel = kernels.load("select")
    if kernel is not None:
        kernel.clear(x.numpy(), indices.numpy())
    else:
        x.index_fill_(0, indices.long(), 0.0)
    if not finite:
        x.nan_to_num_(0.0, 0.0, 0.0)


def scatter(values: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """``out[indices] = values``, and 0 elsewhere."""
    kernel = kernels.load("select")
    if kernel is not None:
        kernel.scatter(values.numpy(), indices.numpy(), out.numpy())
    else:
        out.zero_().index_copy_(0, indices.long(), values)


# ---------------------------------------------------------------- the codec


def split(wire: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and the values in a wire tensor."""
    indices, values = wire.view(torch.int32).chunk(2)
    return indices, values.view(torch.float32)


def _encoded(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    assert isinstance(codec, TopK)
    magnitudes = grad.view(np.uint32) & 0x7FFFFFFF
    order = np.lexsort((np.arange(grad.size), -magnitudes.astype(np.int64)))
    indices = np.sort(order[: codec.nbytes(grad.size) // 8]).astype(np.int32)
    return np.concatenate([indices.view(np.uint8), grad[indices].view(np.uint8)])


def _decoded(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    indices, values = np.split(wire, 2)
    out = np.zeros(numel, np.float32)
    out[indices.view(np.int32)] = values.view(np.float32)
    return out


@dataclass(frozen=True)
class TopK(Gathered):
    """The largest gradients of each rank, exactly so many: 4 bytes of index, 4 of value each.

    The wire: int32 indices, ascending, then float32 values. All ranks' are added up; where their
    indices differ, the average has more entries than each sent.

    A NaN or Inf is above all else, so it travels, and the average is not finite there.

    Sources: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017; Stich
    et al., "Sparsified SGD with Memory", 2018. Lin et al. ("Deep Gradient Compression", 2018)
    estimate the threshold from a sample, as sorting is slow; the exact one costs a pass here (see
    `kernels.select`), and payloads of a fixed size need no second round for their sizes.

    Attributes:
        ratio: the share of gradients that travels.
    """

    name = "topk"
    oracle = Oracle(_encoded, _decoded)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def nbytes(self, numel: int, step: int | None = None) -> int:
        """Eight for each that is kept."""
        return 8 * kept(numel, self.ratio)

    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """As many as `out` holds."""
        indices, values = split(out)
        select(grad, indices)
        gather(grad, indices, values)

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """The error becomes 0 where it was sent, and stays as it is elsewhere."""
        indices, values = split(out)
        finite = add_select(grad, error, indices)
        gather(error, indices, values)
        clear(error, indices, finite)

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Zeros, and the values that were sent."""
        indices, values = split(wire)
        scatter(values, indices, out)

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Only where something was sent: a -0 elsewhere stays -0."""
        indices, values = split(wire)
        kernel = kernels.load("select")
        if kernel is not None:
            kernel.scatter_add(values.numpy(), indices.numpy(), out.numpy())
        else:
            out.index_add_(0, indices, values)
