"""Linear algebra of the low-rank codecs: factors and bases of one matrix.

A factor is rank x length, so its vectors are rows; "p" lies along the matrix's rows, "q" along its
columns.
"""

from __future__ import annotations

import zlib
from math import inf
from typing import Literal

import torch

__all__ = ["Factor", "drawn", "facing", "largest", "orthonormal", "subtract"]

Factor = Literal["p", "q"]

# Adding less than this to a finite float32 never gives an infinite one: half a unit in the last
# place of the largest is 1e31.
HARMLESS = 1e30


def facing(matrix: torch.Tensor, known: Factor) -> torch.Tensor:
    """Such that a basis of that kind can be multiplied with it."""
    return matrix if known == "p" else matrix.t()


def subtract(basis: torch.Tensor, factor: torch.Tensor, source: torch.Tensor) -> None:
    """Leave in `source` what ``basis.T @ factor`` lacks; 0 where that is not finite."""
    source.addmm_(basis.t(), factor, alpha=-1.0)
    if not largest(factor) * len(factor) < HARMLESS:
        source.nan_to_num_(0.0, 0.0, 0.0)


def orthonormal(factor: torch.Tensor) -> torch.Tensor:
    """Orthonormal rows that span the factor's and more where those are dependent.

    NaN everywhere if anything is not finite. QR rather than Gram-Schmidt: of zeros or dependent
    rows it makes no NaN, and no rows of zeros either, which a kept factor would keep for ever.
    """
    scale = largest(factor)
    if not scale < inf:
        return torch.full_like(factor, torch.nan)
    # Squares of large numbers would overflow.
    basis: torch.Tensor = torch.linalg.qr(factor.t() / max(scale, 1.0))[0]
    return basis.t()


def largest(factor: torch.Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(torch.linalg.vector_norm(factor, torch.inf))


def drawn(text: str, rank: int, length: int) -> torch.Tensor:
    """Random numbers, always the same for that text. Uniform ones are the same on any CPU."""
    generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
    return torch.empty(rank, length).uniform_(-1.0, 1.0, generator=generator)
