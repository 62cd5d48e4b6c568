"""What the kernels of several families call: largest magnitudes, sums, random words.

numba's cache of a module does not see edits in another: after one here, touch those that import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint32, uint64

from commsched.codecs.kernels import JIT

__all__ = ["INF", "LANES", "MAGNITUDE", "NAN", "Array", "add", "fold", "mix", "peak_of"]

Array = np.ndarray[Any, Any]

MAGNITUDE = np.uint32(0x7FFFFFFF)  # of a float's bits
INF = np.uint32(0x7F800000)
NAN = np.float32(np.nan)
LANES = 64

_jit: Any = njit(**JIT)


@_jit
def peak_of(bits: Array) -> np.uint32:
    """The largest magnitude of floats, given as their bits: NaN above Inf above all others."""
    top = np.uint32(0)
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        top = magnitude if magnitude > top else top
    return top


@_jit
def add(grad: Array, error: Array) -> None:
    """Add the gradients to what was kept of earlier ones."""
    for i in range(error.size):
        error[i] = grad[i] + error[i]


@_jit
def fold(lanes: Array) -> float:
    """The sum of the lanes: the upper half is added to the lower, until one is left."""
    half = uint64(lanes.size >> 1)
    while half > uint64(0):
        for i in range(half):
            lanes[i] += lanes[i + half]
        half >>= uint64(1)
    total: float = lanes[0]
    return total


@_jit
def mix(x: np.uint32) -> Any:
    """See `commsched.codecs.draws.mix`. numba would go on in 64 bits: hence the casts."""
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ (x >> uint32(15)))
    x = uint32(x * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))
