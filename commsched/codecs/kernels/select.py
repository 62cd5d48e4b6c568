"""Kernels of the sparse codecs: exact selection of the largest, drawing of strata, votes.

The k largest of n numbers are found without sorting them, and without a histogram of all of them.
One pass leaves the largest magnitude of each block of 16, its peak. The k-th largest peak is a
floor: at least k numbers reach it. Only blocks that do (about k of them) are looked at again: to
find the exact threshold digit by digit (radix selection), and to write the indices down in order.
Where k is more than the number of blocks there is no floor, and all blocks are looked at.

Magnitudes are the lower 31 bits, as integers, which sort like the numbers they stand for: NaN
above Inf above all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from commsched.codecs.kernels import JIT
from commsched.codecs.kernels.shared import INF, MAGNITUDE, Array, add, mix, peak_of

__all__ = [
    "add_finite",
    "add_select",
    "clear",
    "elect",
    "gather",
    "is_finite",
    "momentum_select",
    "scatter",
    "scatter_add",
    "select",
    "strata",
]

BLOCK = 16  # numbers under one peak
TILE = 4096  # numbers added up before their peaks are taken, so that they are still in the cache
DIGITS = ((20, 11), (10, 10), (0, 10))  # (lowest bit, bits) of a magnitude's three digits

_jit: Any = njit(**JIT)


# ---------------------------------------------------------------- peaks


@_jit
def _peaks(bits: Array, peaks: Array) -> None:
    """Each block's. Indices are unsigned, or numba's test for negative ones costs five times."""
    whole = bits.size // BLOCK
    for b in range(whole):
        start = uint64(b) * uint64(BLOCK)
        peak = np.uint32(0)
        for i in range(uint64(BLOCK)):
            magnitude = bits[start + i] & MAGNITUDE
            peak = magnitude if magnitude > peak else peak
        peaks[uint64(b)] = peak
    if whole < peaks.size:
        peaks[whole] = peak_of(bits[whole * BLOCK :])


@_jit
def _add_momentum(grad: Array, velocity: Array, error: Array, momentum: np.float32) -> None:
    for i in range(error.size):
        velocity[i] = momentum * velocity[i] + grad[i]
        error[i] = error[i] + velocity[i]


# ---------------------------------------------------------------- the threshold


@_jit
def _count(bits: Array, low: np.uint32, size: np.uint32, prefix: np.uint32, counts: Array) -> None:
    """Count the digit at bits low.. of the magnitudes that begin with `prefix`.

    In four rows, so that equal numbers in a row do not wait for one another's store.
    """
    mask = np.uint32(counts.shape[1] - 1)
    for i in range(bits.size):
        magnitude = bits[i] & MAGNITUDE
        if magnitude >> (low + size) == prefix:
            counts[uint64(i & 3), uint64((magnitude >> low) & mask)] += np.int32(1)


@_jit
def _threshold(bits: Array, rank: int) -> tuple[np.uint32, int]:
    """The rank-th largest magnitude, and how many equal to it are among the `rank` largest."""
    prefix = np.uint32(0)
    for low, size in DIGITS:
        counts = np.zeros((4, 1 << size), np.int32)
        _count(bits, np.uint32(low), np.uint32(size), prefix, counts)
        digit = counts.shape[1] - 1
        while counts[:, digit].sum() < rank:
            rank -= counts[:, digit].sum()
            digit -= 1
        prefix = (prefix << np.uint32(size)) | np.uint32(digit)
    return prefix, rank


@_jit
def _first(bits: Array, indices: Array) -> None:
    """The indices of the largest magnitudes, ascending; of equal ones the first. All looked at."""
    threshold, ties = _threshold(bits, indices.size)
    at = 0
    for i in range(bits.size):
        if at == indices.size:
            return
        magnitude = bits[i] & MAGNITUDE
        tie = magnitude == threshold and ties > 0
        indices[at] = i
        at += magnitude > threshold or tie
        ties -= tie


@_jit
def _reaching(bits: Array, peaks: Array, least: np.uint32, found: Array) -> int:
    """Write down the indices of magnitudes from `least` on, ascending; how many, 0 if too many."""
    at = 0
    for b in range(peaks.size):
        if peaks[b] >= least:
            if at + BLOCK > found.size:
                return 0
            start = b * BLOCK
            block = bits[start : start + BLOCK]
            for i in range(block.size):
                found[at] = start + i
                at += (block[i] & MAGNITUDE) >= least
    return at


@_jit
def _largest(bits: Array, peaks: Array, indices: Array) -> None:
    """As `_first`, of those that reach the floor."""
    least = np.uint32(0)
    if indices.size <= peaks.size:
        least, _ = _threshold(peaks, indices.size)
    found = np.empty(bits.size // 4, np.int32)
    # A floor of 0 excludes nothing, while zeros are often many: try without them.
    count = _reaching(bits, peaks, max(least, np.uint32(1)), found)
    if count < indices.size:
        _first(bits, indices)
        return
    reaching = np.empty(count, np.uint32)
    for j in range(count):
        reaching[j] = bits[found[j]]
    _first(reaching, indices)
    for j in range(indices.size):
        indices[j] = found[indices[j]]


# ---------------------------------------------------------------- entry points


@_jit
def select(x: Array, indices: Array) -> bool:
    """Fill `indices` with those of the largest magnitudes; whether all of `x` is finite."""
    bits = x.view(np.uint32)
    peaks = np.empty((x.size + BLOCK - 1) // BLOCK, np.uint32)
    _peaks(bits, peaks)
    _largest(bits, peaks, indices)
    return bool(peak_of(peaks) < INF)


@_jit
def add_select(grad: Array, error: Array, indices: Array) -> bool:
    """Add `grad` to `error`, then `select` from that."""
    bits = error.view(np.uint32)
    peaks = np.empty((error.size + BLOCK - 1) // BLOCK, np.uint32)
    for t in range(0, error.size, TILE):
        add(grad[t : t + TILE], error[t : t + TILE])
        _peaks(bits[t : t + TILE], peaks[t // BLOCK : (t + TILE) // BLOCK])
    _largest(bits, peaks, indices)
    return bool(peak_of(peaks) < INF)


@_jit
def momentum_select(
    grad: Array, velocity: Array, error: Array, momentum: np.float32, indices: Array
) -> bool:
    """Momentum of `grad` into `velocity`, add that to `error`, then `select` from that."""
    bits = error.view(np.uint32)
    peaks = np.empty((error.size + BLOCK - 1) // BLOCK, np.uint32)
    for t in range(0, error.size, TILE):
        end = t + TILE
        _add_momentum(grad[t:end], velocity[t:end], error[t:end], momentum)
        _peaks(bits[t:end], peaks[t // BLOCK : end // BLOCK])
    _largest(bits, peaks, indices)
    return bool(peak_of(peaks) < INF)


@_jit
def elect(ballots: Array, start: int, votes: Array, indices: Array) -> None:
    """Fill `indices` with those named by most ballots (rows; the last column is no vote).

    Of equal ones the first, counted from `start` and round; in that order. Votes are small
    integers, so magnitudes. `votes` is scratch, int32, one for each index.
    """
    votes[:] = 0
    for row in range(ballots.shape[0]):
        for j in range(ballots.shape[1] - 1):
            place = ballots[row, j] - start
            votes[place if place >= 0 else place + votes.size] += 1
    select(votes, indices)
    for j in range(indices.size):
        place = indices[j] + start
        indices[j] = place if place < votes.size else place - votes.size


@_jit
def strata(numel: int, seed: int, indices: Array) -> None:
    """Draw one index from each of as many equal parts of `numel`."""
    salt = mix(np.uint32(seed))
    low = uint64(0)
    for j in range(indices.size):
        high = (uint64(j) + uint64(1)) * uint64(numel) // uint64(indices.size)
        drawn = uint64(mix(np.uint32(np.uint32(j) + salt)))
        indices[j] = low + (drawn * (high - low) >> uint64(32))
        low = high


@_jit
def is_finite(x: Array) -> bool:
    """Whether all of `x` is."""
    return bool(peak_of(x.view(np.uint32)) < INF)


@_jit
def add_finite(grad: Array, error: Array) -> bool:
    """Add `grad` to `error`; whether all of that is finite."""
    bits = error.view(np.uint32)
    peak = np.uint32(0)
    for t in range(0, error.size, TILE):
        add(grad[t : t + TILE], error[t : t + TILE])
        peak = max(peak, peak_of(bits[t : t + TILE]))
    return bool(peak < INF)


@_jit
def gather(x: Array, indices: Array, values: Array) -> None:
    """``values = x[indices]``."""
    for j in range(indices.size):
        values[j] = x[indices[j]]


@_jit
def clear(x: Array, indices: Array) -> None:
    """``x[indices] = 0``."""
    for j in range(indices.size):
        x[indices[j]] = np.float32(0)


@_jit
def scatter_add(values: Array, indices: Array, out: Array) -> None:
    """``out[indices] += values``; no index comes twice."""
    for j in range(indices.size):
        out[indices[j]] += values[j]


@_jit
def scatter(values: Array, indices: Array, out: Array) -> None:
    """``out[indices] = values``, and 0 elsewhere."""
    out[:] = np.float32(0)
    for j in range(indices.size):
        out[indices[j]] = values[j]
