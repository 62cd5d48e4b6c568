"""Kernels of the codecs in eight-bit floats: rounding and decoding by tables.

The tables of all formats are one global array each, which numba compiles in as constants: loops
that read an argument by computed index and write another cannot be vectorised, since the two
might overlap. A format is told by where its part begins. After a change of the tables in
`codecs.float8`, or of what comes from `kernels.integer` and `kernels.shared`, touch this file:
numba's cache looks at nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from commsched.codecs.blocks import most_scale
from commsched.codecs.float8 import FORMATS
from commsched.codecs.kernels import JIT
from commsched.codecs.kernels.integer import Kernels, scale_of, settle
from commsched.codecs.kernels.shared import MAGNITUDE, Array, add, peak_of

__all__ = ["KERNELS"]

_jit: Any = njit(**JIT)

LOOKUP = np.concatenate([table.lookup for table in FORMATS.values()])
VALUES = np.concatenate([table.values for table in FORMATS.values()])

LOW_BITS = np.uint32(0xFFFF)
SIGN = np.uint32(0x80)
HALF = np.uint32(16)
ZERO = np.float32(0)


# A format, for kernels: its lowest cell; where its cells begin in LOOKUP, less the lowest, modulo
# 2^32; where its values begin; its largest magnitude; the largest scale.
Spec = tuple[np.uint32, np.uint32, np.uint32, np.float32, np.float32]


@_jit
def _round(x: Array, inverse: np.float32, spec: Spec, codes: Array) -> None:
    low, cells = spec[0], spec[1]
    for i in range(x.size):
        word = np.float32(x[i] * inverse).view(np.uint32)
        magnitude = word & MAGNITUDE
        cell = np.uint32(max(magnitude >> HALF, low) + cells)
        code = (LOOKUP[cell] + (magnitude & LOW_BITS)) >> HALF
        codes[i] = np.uint8(code | ((word >> np.uint32(24)) & SIGN))


@_jit
def _spread(codes: Array, scale: np.float32, spec: Spec, out: Array) -> None:
    values = spec[2]
    for i in range(out.size):
        out[i] = VALUES[np.uint32(values + codes[i])] * scale


@_jit
def _add(codes: Array, scale: np.float32, spec: Spec, out: Array) -> None:
    values = spec[2]
    for i in range(out.size):
        out[i] += VALUES[np.uint32(values + codes[i])] * scale


@_jit
def _encode(spec: Spec, grad: Array, scales: Array, codes: Array, block: int) -> None:
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        x = grad[start:end]
        scale, inverse = scale_of(peak_of(x.view(np.uint32)), spec[3], spec[4])
        scales[b] = scale
        if inverse == ZERO:
            codes[start:end] = 0
        else:
            _round(x, inverse, spec, codes[start:end])


@_jit
def _encode_feedback(
    spec: Spec, grad: Array, error: Array, scales: Array, codes: Array, block: int
) -> None:
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, grad.size)
        u = error[start:end]
        add(grad[start:end], u)
        scale, inverse = scale_of(peak_of(u.view(np.uint32)), spec[3], spec[4])
        scales[b] = scale
        if inverse == ZERO:
            codes[start:end] = 0
            settle(u, scale)
        else:
            _round(u, inverse, spec, codes[start:end])
            _add(codes[start:end], -scale, spec, u)  # u + v * -s is u - v * s, bit for bit


@_jit
def _decode(spec: Spec, scales: Array, codes: Array, out: Array, block: int) -> None:
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _spread(codes[start:end], scales[b], spec, out[start:end])


@_jit
def _decode_add(spec: Spec, scales: Array, codes: Array, out: Array, block: int) -> None:
    for b in range(scales.size):
        start, end = b * block, min(b * block + block, out.size)
        _add(codes[start:end], scales[b], spec, out[start:end])


def _kernels() -> dict[str, Kernels]:
    found, begin = {}, 0
    for place, (name, table) in enumerate(FORMATS.items()):
        cells = np.uint32((begin - table.low) % 2**32)
        top, most = np.float32(table.top), np.float32(most_scale(table.top))
        spec = np.uint32(table.low), cells, np.uint32(256 * place), top, most
        all_four = _encode, _encode_feedback, _decode, _decode_add
        found[name] = Kernels(*(partial(kernel, spec) for kernel in all_four))
        begin += table.lookup.size
    return found


KERNELS = _kernels()
