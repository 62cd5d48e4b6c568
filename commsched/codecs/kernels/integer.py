"""Kernels of int8 and int4, and what they share with those of the 8-bit floats.

Each is a loop over blocks, and for each block short loops over its numbers, which then lie in the
first-level cache. All take (.., scales, codes, block), with as many scales as blocks; the last
block may be short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from commsched.codecs.blocks import most_scale
from commsched.codecs.kernels import JIT
from commsched.codecs.kernels.shared import INF, NAN, Array, add, peak_of

__all__ = ["INT4", "INT8", "Kernels", "scale_of", "settle"]

_jit: Any = njit(**JIT)

ZERO = np.float32(0)
LOW_NIBBLE = np.int32(15)

TOP8, MOST8 = np.float32(127), np.float32(most_scale(127.0))
TOP4, MOST4 = np.float32(7), np.float32(most_scale(7.0))


class Kernels(NamedTuple):
    """What a codec of blocks calls; all on 1-D contiguous arrays, codes as uint8."""

    encode: Any  # (grad, scales, codes, block)
    encode_feedback: Any  # (grad, error, scales, codes, block)
    decode: Any  # (scales, codes, out, block)
    decode_add: Any  # (scales, codes, out, block)


# ---------------------------------------------------------------- for all codecs of blocks


@_jit
def scale_of(peak: np.uint32, top: np.float32, most: np.float32) -> tuple[np.float32, np.float32]:
    """A block's scale, and what its numbers are multiplied by: 0 where nothing of it travels."""
    if peak >= INF:
        return NAN, ZERO
    largest = np.uint32(peak).view(np.float32)
    inverse = top / largest
    if inverse == np.float32(np.inf):
        return ZERO, ZERO
    return min(largest / top, most), inverse


@_jit
def settle(error: Array, scale: np.float32) -> None:
    """Forget a block that is not finite."""
    if np.isnan(scale):
        error[:] = ZERO


# ---------------------------------------------------------------- int8


@_jit
def _round8(x: Array, inverse: np.float32, codes: Array) -> None:
    for i in range(x.size):
        codes[i] = np.int8(np.int32(np.rint(x[i] * inverse)))


@_jit
def _round_keep8(u: Array, inverse: np.float32, scale: np.float32, codes: Array) -> None:
    for i in range(u.size):
        code = np.int32(np.rint(u[i] * inverse))
        codes[i] = np.int8(code)
        u[i] -= np.float32(code) * scale


@_jit
def _spread8(codes: Array, scale: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] = np.float32(codes[i]) * scale


@_jit
def _add8(codes: Array, scale: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] += np.float32(codes[i]) * scale


@_jit
def _encode8(grad: Array, scales: Array, codes: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        x = grad[start:end]
        scale, inverse = scale_of(peak_of(x.view(np.uint32)), TOP8, MOST8)
        scales[b] = scale
        if inverse == ZERO:
            signed[start:end] = 0
        else:
            _round8(x, inverse, signed[start:end])


@_jit
def _encode_feedback8(grad: Array, error: Array, scales: Array, codes: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        u = error[start:end]
        add(grad[start:end], u)
        scale, inverse = scale_of(peak_of(u.view(np.uint32)), TOP8, MOST8)
        scales[b] = scale
        if inverse == ZERO:
            signed[start:end] = 0
            settle(u, scale)
        else:
            _round_keep8(u, inverse, scale, signed[start:end])


@_jit
def _decode8(scales: Array, codes: Array, out: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _spread8(signed[start:end], scales[b], out[start:end])


@_jit
def _decode_add8(scales: Array, codes: Array, out: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _add8(signed[start:end], scales[b], out[start:end])


# ---------------------------------------------------------------- int4: two a byte, low half first


@_jit
def _round4(x: Array, inverse: np.float32, codes: Array) -> None:
    pairs = x.size // 2
    for j in range(pairs):
        low = np.int32(np.rint(x[2 * j] * inverse))
        high = np.int32(np.rint(x[2 * j + 1] * inverse))
        codes[j] = np.int8((low & LOW_NIBBLE) | (high << np.int32(4)))
    if x.size % 2:
        low = np.int32(np.rint(x[2 * pairs] * inverse))
        codes[pairs] = np.int8(low & LOW_NIBBLE)


@_jit
def _round_keep4(u: Array, inverse: np.float32, scale: np.float32, codes: Array) -> None:
    pairs = u.size // 2
    for j in range(pairs):
        low = np.int32(np.rint(u[2 * j] * inverse))
        high = np.int32(np.rint(u[2 * j + 1] * inverse))
        codes[j] = np.int8((low & LOW_NIBBLE) | (high << np.int32(4)))
        u[2 * j] -= np.float32(low) * scale
        u[2 * j + 1] -= np.float32(high) * scale
    if u.size % 2:
        low = np.int32(np.rint(u[2 * pairs] * inverse))
        codes[pairs] = np.int8(low & LOW_NIBBLE)
        u[2 * pairs] -= np.float32(low) * scale


@_jit
def _nibble(code: np.int8, i: int) -> np.float32:
    """The code's lower half for even i, its upper half for odd i, with its sign."""
    highest = np.int32(np.int32(code) << np.int32(28 - ((i & 1) << 2)))  # else it would be int64
    return np.float32(highest >> np.int32(28))


@_jit
def _spread4(codes: Array, scale: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] = _nibble(codes[i >> 1], i) * scale


@_jit
def _add4(codes: Array, scale: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] += _nibble(codes[i >> 1], i) * scale


@_jit
def _encode4(grad: Array, scales: Array, codes: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        x, own = grad[start:end], signed[start // 2 : (end + 1) // 2]
        scale, inverse = scale_of(peak_of(x.view(np.uint32)), TOP4, MOST4)
        scales[b] = scale
        if inverse == ZERO:
            own[:] = 0
        else:
            _round4(x, inverse, own)


@_jit
def _encode_feedback4(grad: Array, error: Array, scales: Array, codes: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        u, own = error[start:end], signed[start // 2 : (end + 1) // 2]
        add(grad[start:end], u)
        scale, inverse = scale_of(peak_of(u.view(np.uint32)), TOP4, MOST4)
        scales[b] = scale
        if inverse == ZERO:
            own[:] = 0
            settle(u, scale)
        else:
            _round_keep4(u, inverse, scale, own)


@_jit
def _decode4(scales: Array, codes: Array, out: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _spread4(signed[start // 2 : (end + 1) // 2], scales[b], out[start:end])


@_jit
def _decode_add4(scales: Array, codes: Array, out: Array, block: int) -> None:
    signed = codes.view(np.int8)
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _add4(signed[start // 2 : (end + 1) // 2], scales[b], out[start:end])


INT8 = Kernels(_encode8, _encode_feedback8, _decode8, _decode_add8)
INT4 = Kernels(_encode4, _encode_feedback4, _decode4, _decode_add4)
