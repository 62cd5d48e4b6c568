"""fp8, dynamic8: the numbers of a block, scaled by its largest magnitude, in eight-bit floats.

A `Format` is 128 magnitudes or fewer; a code's upper bit is the sign. Numbers are rounded to the
nearest by a table, not a search: their upper 16 bits choose a cell, which holds one boundary
between two codes at most, and the lower 16 bits say on which side of it they lie.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from commsched.codecs import kernels
from commsched.codecs.blocks import Blockwise, blocks_oracle

__all__ = ["FORMATS", "Dynamic8", "Format", "Fp8"]

Array = np.ndarray[Any, Any]
LOW_BITS = 0xFFFF


@dataclass(frozen=True, eq=False)
class Format:
    """An eight-bit float.

    Attributes:
        values: what each of the 256 codes stands for, float32; the last 128 are the negative ones.
        firsts: for each code from 1 up to the largest finite one, the smallest positive float32
            that is rounded to it, as its bits.
    """

    values: Array
    firsts: Array

    @property
    def top(self) -> float:
        """The largest magnitude."""
        return float(self.values[self.firsts.size])

    @property
    def low(self) -> int:
        """The first cell: everything in it and below becomes 0."""
        return int(self.firsts[0] >> 16) - 1

    @cached_property
    def lookup(self) -> Array:
        """For each cell from `low` to that of `top`: added to the lower 16 bits, the code << 16."""
        cells = np.arange(self.low, (_bits(self.top) >> 16) + 1)
        below = np.searchsorted(self.firsts, cells << 16, side="right")
        boundary = np.append(self.firsts, 1 << 32)[below] - (cells << 16)
        inside = boundary <= LOW_BITS
        return ((below << 16) + np.where(inside, LOW_BITS + 1 - boundary, 0)).astype(np.uint32)


def _bits(number: float | np.float32) -> int:
    return int(np.float32(number).view(np.uint32))


def _first(boundary: float, takes_it: bool) -> int:
    """The smallest float32 above `boundary`, or at it if the upper code takes it, as its bits."""
    nearest = np.float32(boundary)
    is_above = nearest > boundary or (takes_it and nearest == boundary)
    return _bits(nearest) + (0 if is_above else 1)  # the next float32 has the next bits


def _middles(magnitudes: Array) -> Array:
    wide = magnitudes.astype(np.float64)
    return (wide[:-1] + wide[1:]) / 2


def _ieee(dtype: torch.dtype) -> Format:
    """As torch has it; halfway to the even code."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()
    finite = values[:128][np.isfinite(values[:128])]
    firsts = [_first(middle, code % 2 == 1) for code, middle in enumerate(_middles(finite))]
    return Format(values, np.array(firsts, np.int64))


def _tree() -> Format:
    """Six decades, each half as finely as the one above; halfway to the lower magnitude."""
    decades = [_decade(float(f"1e{exponent}"), 2 ** (exponent + 6)) for exponent in range(-6, 0)]
    magnitudes = np.concatenate([[0.0], *decades, [1.0]]).astype(np.float32)
    firsts = [_first(middle, False) for middle in _middles(magnitudes)]
    firsts[0] = _first(float(np.float32(1.5e-6)), True)
    firsts[-1] = _first(float(np.float32(0.995703)), False)
    return Format(np.concatenate([magnitudes, -magnitudes]), np.array(firsts, np.int64))


def _decade(start: float, half: int) -> Array:
    """The middles of `half` equal intervals up to 4.5 times `start`, and as many up to 10 times."""
    middles = (np.arange(half) + 0.5) / half
    return start * np.concatenate([1.0 + 3.5 * middles, 4.5 + 5.5 * middles])


CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FORMATS = {name: _ieee(dtype) for name, dtype in CASTS.items()} | {"tree": _tree()}


class _Float8(Blockwise):
    """What the two codecs share: everything but the format."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """Which of `FORMATS`."""

    @property
    def top(self) -> float:
        """The format's largest magnitude."""
        return FORMATS[self.kind].top

    def compiled(self) -> Any:
        """See `Blockwise`."""
        family = kernels.load("float8")
        return family and family.KERNELS[self.kind]

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """By the same table as the kernels."""
        table = FORMATS[self.kind]
        words = scaled.view(torch.int32)
        magnitudes = words & 0x7FFFFFFF
        cells = (magnitudes >> 16).sub_(table.low).clamp_min_(0)
        lookup = torch.from_numpy(table.lookup.astype(np.int32))
        codes = lookup[cells].add_(magnitudes & LOW_BITS) >> 16
        return codes.add_((words < 0).to(torch.int32) << 7).to(torch.uint8)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """By the table."""
        return torch.from_numpy(FORMATS[self.kind].values)[codes.to(torch.int32)]


# ---------------------------------------------------------------- the formats in NumPy


def _magnitudes(exponent_bits: int, mantissa_bits: int, largest: float) -> Array:
    """All finite ones, from the definition: (1 + m) * 2^(e - bias), without the 1 for e = 0."""
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes % 2**mantissa_bits / 2.0**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    normal = (1 + mantissa) * 2.0 ** (exponent - bias)
    magnitudes: Array = np.where(exponent > 0, normal, mantissa * 2.0 ** (1 - bias))
    return magnitudes[magnitudes <= largest]


ORACLE_MAGNITUDES = {"e4m3": _magnitudes(4, 3, 448.0), "e5m2": _magnitudes(5, 2, 57344.0)}


def _fp8_codes(codec: Any, scaled: Array) -> Array:
    distances = np.abs(np.abs(scaled)[:, None] - ORACLE_MAGNITUDES[codec.format])
    nearest = distances == distances.min(1, keepdims=True)
    even = np.arange(nearest.shape[1]) % 2 == 0
    codes = np.where((nearest & even).any(1), (nearest & even).argmax(1), nearest.argmax(1))
    return _with_signs(codes, scaled)


def _with_signs(codes: Array, numbers: Array) -> Array:
    return np.where(np.signbit(numbers), codes + 128, codes).astype(np.uint8)


def _signed(magnitudes: Array, codes: Array) -> Array:
    found: Array = magnitudes.astype(np.float32)[codes % 128]
    return np.where(codes < 128, found, -found)


def _fp8_values(codec: Any, codes: Array) -> Array:
    return _signed(ORACLE_MAGNITUDES[codec.format], codes)


def _bisected() -> Array:
    """The tree's magnitudes once more: in [0.1, 1) 32 from 0.1 and 32 from 0.45, and so on down."""
    halves = []
    for power in range(1, 7):
        count = 64 >> power
        for start, width in ((0.1, 0.35), (0.45, 0.55)):
            middles = [start + width * (i + 0.5) / count for i in range(count)]
            halves.append(np.array(middles) / 10.0 ** (power - 1))
    magnitudes: Array = np.sort(np.concatenate([[0.0], *halves, [1.0]]))
    return magnitudes.astype(np.float32)


ORACLE_TREE = _bisected()


def _tree_codes(codec: Any, scaled: Array) -> Array:
    magnitudes = np.abs(scaled)
    distances = np.abs(magnitudes.astype(np.float64)[:, None] - ORACLE_TREE[1:127])
    codes = 1 + distances.argmin(1)  # the lower of two
    codes = np.where(magnitudes < np.float32(1.5e-6), 0, codes)
    codes = np.where(magnitudes > np.float32(0.995703), 127, codes)
    return _with_signs(codes, scaled)


def _tree_values(codec: Any, codes: Array) -> Array:
    return _signed(ORACLE_TREE, codes)


# ---------------------------------------------------------------- the two codecs


@dataclass(frozen=True)
class Fp8(_Float8):
    """An IEEE-like float of 8 bits a gradient, to nearest, halfway to even.

    Args:
        block: gradients that share a scale, a power of two.
        format: "e4m3": 3 bits of mantissa, magnitudes from 2^-9 to 448; or "e5m2": 2 bits, from
            2^-16 to 57344. The first is more precise unless a block's gradients differ by more
            than four orders of magnitude.

    Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
    """

    format: str = "e4m3"
    name = "fp8"
    oracle = blocks_oracle(_fp8_codes, _fp8_values)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.format not in CASTS:
            known = ", ".join(CASTS)
            raise ValueError(
                f"format={self.format!r} is not allowed for codec {self.name!r}: it takes {known}"
            )

    @property
    def kind(self) -> str:
        """The option."""
        return self.format

    def codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Cast: the same codes as by the table, ten times as fast."""
        return scaled.to(CASTS[self.format]).view(torch.uint8)


@dataclass(frozen=True)
class Dynamic8(_Float8):
    """A sign, and one of 128 magnitudes over six decades, half as many in each as in the next.

    In [0.1, 1) there are 64: the middles of 32 intervals up to 0.45 and of 32 from there. Then 32
    in [0.01, 0.1), and so on, 2 in [1e-6, 1e-5); and 0 and 1. A number is first multiplied by
    ``1 / largest`` of its block; below 1.5e-6 it becomes 0, above 0.995703 it becomes 1, else the
    nearest, halfway the lower one. Blocks whose largest magnitude is below 2.9e-39 travel as 0.

    Args:
        block: gradients that share a scale, a power of two.

    Source: Dettmers 2015, 8-Bit Approximations for Parallelism in Deep Learning; one scale a
    block, not a matrix, after Dettmers et al. 2022.
    """

    block: int = 2048
    name = "dynamic8"
    kind = "tree"
    oracle = blocks_oracle(_tree_codes, _tree_values)
