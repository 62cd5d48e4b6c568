"""Kernels of the sign codec: means of magnitudes, sign bits packed and unpacked.

Bits go by way of a byte each, in a scratch of one block that stays in the cache: from floats to
bytes and from eight bytes, taken as one 64-bit word, to one are loops that LLVM vectorises, while
shifting eight floats together is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, njit, uint8, uint64

from commsched.codecs.kernels import JIT
from commsched.codecs.kernels.shared import LANES, NAN, Array, fold

__all__ = ["decode", "decode_add", "encode", "encode_feedback"]

FIRST_BYTES = np.uint64(0x0101010101010101)  # 1 in each byte
DIAGONAL = np.uint64(0x8040201008040201)  # bit k in byte k
GATHER = np.uint64(0x0102040810204080)  # times bytes of 0 or 1: byte k's moves to bit 56 + k

_jit: Any = njit(**JIT)


# ---------------------------------------------------------------- scales


@_jit
def _add_sizes(values: Array, lanes: Array) -> None:
    for i in range(values.size):
        lanes[i] += float64(abs(values[i]))


@_jit
def _total(values: Array, lanes: Array) -> float:
    """The sum of all magnitudes, number i in lane i % LANES."""
    lanes[:] = 0.0
    for row in range(0, values.size - LANES + 1, LANES):
        _add_sizes(values[row : row + LANES], lanes[:LANES])
    _add_sizes(values[values.size // LANES * LANES :], lanes)
    total: float = fold(lanes)
    return total


@_jit
def _take_sizes(grad: Array, error: Array, lanes: Array) -> None:
    for i in range(error.size):
        value = grad[i] + error[i]
        error[i] = value
        lanes[i] += float64(abs(value))


@_jit
def _take_total(grad: Array, error: Array, lanes: Array) -> float:
    """Add `grad` to `error`; the sum of all magnitudes then."""
    lanes[:] = 0.0
    for row in range(0, error.size - LANES + 1, LANES):
        _take_sizes(grad[row : row + LANES], error[row : row + LANES], lanes[:LANES])
    whole = error.size // LANES * LANES
    _take_sizes(grad[whole:], error[whole:], lanes)
    total: float = fold(lanes)
    return total


@_jit
def _scale(total: float, numel: int) -> np.float32:
    return float32(total / numel) if np.isfinite(total) else NAN


# ---------------------------------------------------------------- bits


@_jit
def _pack(values: Array, scratch: Array, bits: Array) -> None:
    """The sign bits of a block, eight a byte."""
    words = values.view(np.uint32)
    for i in range(words.size):
        scratch[i] = uint8(words[i] >> np.uint32(31))
    scratch[words.size : 8 * bits.size] = 0
    eights = scratch.view(np.uint64)
    for i in range(bits.size):
        bits[i] = uint8((eights[i] * GATHER) >> np.uint64(56))


@_jit
def _unpack(bits: Array, scratch: Array) -> None:
    """A byte for each bit: not 0 where it is set."""
    eights = scratch.view(np.uint64)
    for i in range(bits.size):
        eights[i] = (uint64(bits[i]) * FIRST_BYTES) & DIAGONAL


@_jit
def _subtract(values: Array, scale: np.float32) -> None:
    for i in range(values.size):
        values[i] -= np.copysign(scale, values[i])


# ---------------------------------------------------------------- entry points


@_jit
def encode(grad: Array, block: int, scales: Array, bits: Array) -> None:
    """Scales and sign bits; see `commsched.codecs.sign`. `bits` has no padding."""
    lanes = np.empty(LANES)
    scratch = np.empty(block, np.uint8)
    for b in range(scales.size):
        values = grad[b * block : (b + 1) * block]
        packed = bits[b * (block // 8) : (b + 1) * (block // 8)]
        scales[b] = _scale(_total(values, lanes), values.size)
        if np.isnan(scales[b]):
            packed[:] = 0
        else:
            _pack(values, scratch, packed)


@_jit
def encode_feedback(grad: Array, error: Array, block: int, scales: Array, bits: Array) -> None:
    """As `encode` of grad + error; what that loses stays in `error`."""
    lanes = np.empty(LANES)
    scratch = np.empty(block, np.uint8)
    for b in range(scales.size):
        values = error[b * block : (b + 1) * block]
        packed = bits[b * (block // 8) : (b + 1) * (block // 8)]
        total = _take_total(grad[b * block : (b + 1) * block], values, lanes)
        scales[b] = _scale(total, values.size)
        if np.isnan(scales[b]):
            packed[:] = 0
            values[:] = 0.0
        else:
            _pack(values, scratch, packed)
            _subtract(values, scales[b])


@_jit
def decode(scales: Array, bits: Array, block: int, out: Array) -> None:
    """Each block's scale, with the signs."""
    scratch = np.empty(block, np.uint8)
    for b in range(scales.size):
        _unpack(bits[b * (block // 8) : (b + 1) * (block // 8)], scratch)
        values = out[b * block : (b + 1) * block]
        for i in range(values.size):
            values[i] = -scales[b] if scratch[i] else scales[b]


@_jit
def decode_add(scales: Array, bits: Array, block: int, out: Array) -> None:
    """As `decode`, added to `out`."""
    scratch = np.empty(block, np.uint8)
    for b in range(scales.size):
        _unpack(bits[b * (block // 8) : (b + 1) * (block // 8)], scratch)
        values = out[b * block : (b + 1) * block]
        for i in range(values.size):
            values[i] += -scales[b] if scratch[i] else scales[b]
