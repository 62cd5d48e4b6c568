"""Blocks of gradients in torch and in NumPy, and sums over them whose order is defined."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["LANES", "check_block", "lane_sum", "lane_sums", "row_sizes", "rows"]

LANES = 64


def check_block(name: str, block: int) -> None:
    """Raise ValueError unless `block` is a size that the kernels take."""
    if block not in [1 << power for power in range(6, 17)]:
        raise ValueError(f"{name}: block={block} must be a power of two from {LANES} to 65536")


def rows(grad: torch.Tensor, block: int) -> torch.Tensor:
    """The blocks, one a row; the last one is filled up with zeros."""
    missing = -grad.numel() % block
    return torch.nn.functional.pad(grad, (0, missing)).view(-1, block)


def row_sizes(grad: torch.Tensor, block: int) -> torch.Tensor:
    """The number of gradients in each of `rows`, as float64."""
    sizes = torch.full((-(-grad.numel() // block),), float(block), dtype=torch.float64)
    sizes[-1] -= -grad.numel() % block
    return sizes


def lane_sums(terms: torch.Tensor) -> torch.Tensor:
    """`lane_sum` of each row of float64."""
    steps = terms.view(terms.shape[0], -1, LANES).unbind(1)
    lanes = steps[0].clone()
    for step in steps[1:]:
        lanes += step
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, 1)
        lanes = low + high
    return lanes.squeeze(1)


def lane_sum(terms: np.ndarray) -> np.float64:
    """A sum in float64 whose order is defined, for oracles.

    Term i is added to lane i % 64, in the order of i. Then the upper half of the lanes is added to
    the lower half, until one is left. Sums of float32 magnitudes or squares cannot overflow, and
    those of denormals do not vanish.
    """
    lanes = np.zeros(LANES)
    for start in range(0, terms.size, LANES):
        step = terms[start : start + LANES]
        lanes[: step.size] += step
    while lanes.size > 1:
        low, high = np.split(lanes, 2)
        lanes = low + high
    return np.float64(lanes[0])
