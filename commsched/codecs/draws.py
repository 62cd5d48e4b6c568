"""Random numbers that are functions of a seed and an index: the same on every device.

In torch and in NumPy here; in numba in `kernels.shared` and `kernels.stochastic`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["mix", "mix_oracle", "uniform", "uniform_oracle"]

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
    key = mix(torch.tensor([seed ^ _SEED_SALT]).to(torch.int32))
    word = mix(index.to(torch.int32) ^ key)
    return (word >> 8 & 0xFFFFFF).float().mul_(2.0**-24)


def mix(x: torch.Tensor) -> torch.Tensor:
    """Wellons' lowbias32 of each word, as int32, whose products wrap around as those of uint32."""
    x = (x >> 16 & 0xFFFF).bitwise_xor_(x).mul_(_FACTORS[0])  # int32's shifts copy the sign
    x = (x >> 15 & 0x1FFFF).bitwise_xor_(x).mul_(_FACTORS[1] - (1 << 32))
    return (x >> 16 & 0xFFFF).bitwise_xor_(x)


def mix_oracle(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`mix` in NumPy, of uint32."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_FACTORS[0])
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_FACTORS[1])
    mixed: np.ndarray[Any, Any] = x ^ (x >> np.uint32(16))
    return mixed


def uniform_oracle(seed: int, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`uniform` in NumPy, of uint32."""
    key = mix_oracle(np.array([seed ^ _SEED_SALT], np.uint32))
    return (mix_oracle(index ^ key) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
