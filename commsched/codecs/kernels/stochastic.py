"""Kernels of the stochastic codecs, ternary and qsgd, and their random numbers.

Those that encode take (gradients, block, the codec's option, seed, heads, codes), those that decode
(heads, codes, block, option, values), whether they need the option or not. Codes are without the
padding.

Two-bit codes go by way of a byte each, in a scratch of one block; see `sign` for why.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int8, int32, njit, uint8, uint32

from commsched.codecs.kernels import JIT
from commsched.codecs.kernels.shared import INF, LANES, NAN, Array, fold, mix, peak_of

__all__ = [
    "qsgd_decode",
    "qsgd_decode_add",
    "qsgd_encode",
    "ternary_decode",
    "ternary_decode_add",
    "ternary_encode",
    "uniform",
]

LARGEST = float(np.finfo(np.float32).max)
TO_UNIT = np.float32(2.0**-24)

_jit: Any = njit(**JIT)


# ---------------------------------------------------------------- random numbers, norms


@_jit
def _key(seed: int) -> Any:
    return mix(uint32(seed) ^ uint32(0x9E3779B9))


@_jit
def _draw(key: np.uint32, index: int) -> Any:
    return float32(int32(mix(uint32(index) ^ key) >> uint32(8))) * TO_UNIT


@_jit
def uniform(seed: int, out: Array) -> None:
    """The numbers 0, 1, ... of that seed."""
    key = _key(seed)
    for i in range(out.size):
        out[i] = _draw(key, i)


@_jit
def _add_squares(values: Array, lanes: Array) -> None:
    for i in range(values.size):
        value = float64(values[i])
        lanes[i] += value * value  # exact


@_jit
def _square(values: Array, lanes: Array) -> float:
    """The sum of all squares, number i in lane i % LANES."""
    lanes[:] = 0.0
    for row in range(0, values.size - LANES + 1, LANES):
        _add_squares(values[row : row + LANES], lanes[:LANES])
    _add_squares(values[values.size // LANES * LANES :], lanes)
    total: float = fold(lanes)
    return total


# ---------------------------------------------------------------- ternary


@_jit
def _clipped(values: Array, top: np.float32, clip: float, lanes: Array) -> Any:
    return float32(min(float64(top), clip * np.sqrt(_square(values, lanes) / values.size)))


@_jit
def _ternary_codes(
    values: Array, scale: np.float32, key: np.uint32, start: int, codes: Array
) -> None:
    """A byte each: 0 for zero, 1 for plus, 2 for minus. NaN, as of 0 / 0, is never above a draw."""
    for i in range(values.size):
        size = abs(values[i])
        size = scale if size > scale else size
        code = uint8(2) if values[i] < float32(0.0) else uint8(1)
        codes[i] = code if _draw(key, start + i) < size / scale else uint8(0)


@_jit
def _pack(codes: Array, packed: Array) -> None:
    """Four codes a byte."""
    words = codes.view(np.uint32)
    for j in range(packed.size):
        word = words[j]
        packed[j] = uint8(word | (word >> uint32(6)) | (word >> uint32(12)) | (word >> uint32(18)))


@_jit
def _unpack(packed: Array, codes: Array) -> None:
    words = codes.view(np.uint32)
    for j in range(packed.size):
        word = uint32(packed[j])
        word = word | (word << uint32(6)) | (word << uint32(12)) | (word << uint32(18))
        words[j] = word & uint32(0x03030303)


@_jit
def ternary_encode(
    grad: Array, block: int, clip: float, seed: int, scales: Array, packed: Array
) -> None:
    """Scales and codes; see `commsched.codecs.stochastic`."""
    lanes = np.empty(LANES)
    codes = np.empty(block, np.uint8)
    tops = scales.view(np.uint32)
    key = _key(seed)
    for b in range(scales.size):
        values = grad[b * block : (b + 1) * block]
        tops[b] = peak_of(values.view(np.uint32))
        if tops[b] >= INF:
            scales[b] = NAN
        elif clip > 0.0:
            scales[b] = _clipped(values, scales[b], clip, lanes)
        _ternary_codes(values, scales[b], key, b * block, codes)
        codes[values.size :] = 0
        _pack(codes, packed[b * (block // 4) : (b + 1) * (block // 4)])


@_jit
def ternary_decode(scales: Array, packed: Array, block: int, clip: float, out: Array) -> None:
    """Each block's scale times 0, 1 or -1."""
    codes = np.empty(block, np.uint8)
    for b in range(scales.size):
        _unpack(packed[b * (block // 4) : (b + 1) * (block // 4)], codes)
        values = out[b * block : (b + 1) * block]
        for i in range(values.size):
            values[i] = float32((codes[i] & 1) - (codes[i] >> 1)) * scales[b]


@_jit
def ternary_decode_add(scales: Array, packed: Array, block: int, clip: float, out: Array) -> None:
    """As `ternary_decode`, added to `out`."""
    codes = np.empty(block, np.uint8)
    for b in range(scales.size):
        _unpack(packed[b * (block // 4) : (b + 1) * (block // 4)], codes)
        values = out[b * block : (b + 1) * block]
        for i in range(values.size):
            values[i] += float32((codes[i] & 1) - (codes[i] >> 1)) * scales[b]


# ---------------------------------------------------------------- qsgd


@_jit
def _norm(values: Array, lanes: Array) -> np.float32:
    norm = np.sqrt(_square(values, lanes))
    return float32(min(norm, LARGEST)) if np.isfinite(norm) else NAN


@_jit
def _qsgd_codes(
    values: Array, norm: np.float32, levels: np.float32, key: np.uint32, start: int, codes: Array
) -> None:
    """The divisor is above 0, so that there is no NaN to be cast to an integer."""
    for i in range(values.size):
        size = abs(values[i]) / norm * levels
        low = np.floor(size)
        code = int32(low) + int32(_draw(key, start + i) < size - low)
        codes[i] = int8(-code if values[i] < float32(0.0) else code)


@_jit
def qsgd_encode(
    grad: Array, block: int, levels: float, seed: int, norms: Array, codes: Array
) -> None:
    """Norms and codes; see `commsched.codecs.stochastic`."""
    lanes = np.empty(LANES)
    key = _key(seed)
    for b in range(norms.size):
        values = grad[b * block : (b + 1) * block]
        coded = codes[b * block : (b + 1) * block].view(np.int8)
        norms[b] = _norm(values, lanes)
        if norms[b] > float32(0.0):
            _qsgd_codes(values, norms[b], float32(levels), key, b * block, coded)
        else:
            coded[:] = 0


@_jit
def qsgd_decode(norms: Array, codes: Array, block: int, levels: float, out: Array) -> None:
    """The part of each block's norm that a code stands for."""
    for b in range(norms.size):
        values = out[b * block : (b + 1) * block]
        coded = codes[b * block : (b + 1) * block].view(np.int8)
        for i in range(values.size):
            values[i] = float32(coded[i]) / float32(levels) * norms[b]


@_jit
def qsgd_decode_add(norms: Array, codes: Array, block: int, levels: float, out: Array) -> None:
    """As `qsgd_decode`, added to `out`."""
    for b in range(norms.size):
        values = out[b * block : (b + 1) * block]
        coded = codes[b * block : (b + 1) * block].view(np.int8)
        for i in range(values.size):
            values[i] += float32(coded[i]) / float32(levels) * norms[b]
