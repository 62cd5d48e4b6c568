"""Random numbers that are functions of a seed and an index: the same on every device.

In torch and in NumPy here; in numba in `kernels.stochastic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["uniform", "uniform_oracle"]

_SEED_SALT = 0x9E3779B9
_FACTORS = 0x7FEB352D, 0x846CA68B


def uniform(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Random numbers in [0, 1), in steps of 2**-24, each a function of a seed and an index.

    ``mix(index ^ mix(seed ^ 0x9E3779B9)) >> 8``, times 2**-24, where all are 32-bit words, and
    mix is Wellons' lowbias32 ("Prospecting for Hash Functions", 2018)::

        x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

    Nothing is kept between two draws: any device can draw any of them, in any order.

    Args:
        seed: 0 to 2**32 - 1.
        index: integers, of which the lower 32 bits count.
    """
    key = _mix(torch.tensor([seed ^ _SEED_SALT]).to(torch.int32))
    word = _mix(index.to(torch.int32) ^ key)
    return (word >> 8 & 0xFFFFFF).float().mul_(2.0**-24)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Of int32, whose shifts copy the sign; products wrap around as those of uint32 do."""
    x = (x >> 16 & 0xFFFF).bitwise_xor_(x).mul_(_FACTORS[0])
    x = (x >> 15 & 0x1FFFF).bitwise_xor_(x).mul_(_FACTORS[1] - (1 << 32))
    return (x >> 16 & 0xFFFF).bitwise_xor_(x)


def uniform_oracle(seed: int, index: np.ndarray) -> np.ndarray:
    """`uniform` in NumPy, of uint32."""

    def mix(x: Any) -> Any:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_FACTORS[0])
        x = (x ^ (x >> np.uint32(15))) * np.uint32(_FACTORS[1])
        return x ^ (x >> np.uint32(16))

    key = mix(np.array([seed ^ _SEED_SALT], np.uint32))
    word: np.ndarray = mix(index ^ key)
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
