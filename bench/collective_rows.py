"""The rows of bench/collectives.py: sizes and columns as in nccl-tests, and its JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commsched.linkprobe.collectives import sent_factor

__all__ = [
    "AGGREGATES",
    "HEADS",
    "Coding",
    "Result",
    "Row",
    "as_json",
    "average_bus_bw",
    "parse_size",
    "result_of",
    "sizes",
    "text_of",
    "wrong_in",
]

Aggregate = Callable[[Sequence[float]], float]
AGGREGATES: tuple[Aggregate, ...] = (
    lambda times: times[0],
    lambda times: sum(times) / len(times),
    min,
    max,
)


@dataclass(frozen=True)
class Result:
    """One way, in place or out of place. GB/s; `wrong` is None where it was not checked."""

    time_us: float
    max_us: float  # the slowest rank's
    alg_bw: float
    bus_bw: float
    nwrong: int | None


@dataclass(frozen=True)
class Coding:
    """What an exchange adds; see the head of this file."""

    enc_us: float
    comm_us: float
    dec_us: float
    wire_bytes: int
    ratio: float
    rel_err: float | None


@dataclass(frozen=True)
class Row:
    """One size of one collective or exchange; a text says why there is no result."""

    collective: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    out_of_place: Result | str
    in_place: Result | str
    coding: Coding | None = None

    def results(self) -> list[Result]:
        """Those there are."""
        return [one for one in (self.out_of_place, self.in_place) if isinstance(one, Result)]


def parse_size(text: str) -> int:
    """Bytes of ``8``, ``1K``, ``32M`` or ``1G`` (powers of 1024).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 8, 1K, 32M or 1G")
    return size


def sizes(least: int, most: int, factor: int) -> Iterator[int]:
    """From `least` to `most`, each `factor` times the last."""
    while least <= most:
        yield least
        least *= factor


def result_of(
    times_s: Sequence[float], aggregate: Aggregate, nbytes: int, name: str, wrong: int | None
) -> Result:
    """The columns, from every rank's time for one."""
    seconds = aggregate(times_s)
    alg_bw = nbytes / seconds / 1e9
    bus_bw = alg_bw * sent_factor(name, len(times_s))
    return Result(1e6 * seconds, 1e6 * max(times_s), alg_bw, bus_bw, wrong)


# ---------------------------------------------------------------- printed

_COLUMNS = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
_LEFT = f"{'size':>12} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}"
_UNITS = f"{'(B)':>12} {'(elements)':>12} {'':>9} {'':>6} {'':>5}"
_WAY = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
_ADDED = "".join(
    f" {head:>{width}}"
    for head, width in (
        *(("enc", 9), ("comm", 9), ("dec", 9), ("total", 9)),
        *(("wire_bytes", 11), ("ratio", 7), ("rel_err", 8)),
    )
)
_WIDTH = len(_COLUMNS)
HEADS = {  # whether exchanges -> lines
    False: (
        f"#{'':>{len(_LEFT)}} {'out-of-place':^{_WIDTH}}   {'in-place':^{_WIDTH}}",
        f"#{_LEFT} {_COLUMNS}   {_COLUMNS}",
        f"#{_UNITS} {_WAY}   {_WAY}",
    ),
    True: (
        f"#{'':>{len(_LEFT)}} {'in-place':^{_WIDTH}}",
        f"#{_LEFT} {_COLUMNS}{_ADDED}",
        f"#{_UNITS} {_WAY} {'(us)':>9} {'(us)':>9} {'(us)':>9} {'(us)':>9} {'(B)':>11}",
    ),
}


def text_of(row: Row, exchange: bool) -> str:
    """One line. A way without a result says why at its place."""
    left = f" {row.size:>12} {row.count:>12} {row.type:>9} {row.redop:>6} {row.root:>5}"
    if not exchange:
        return f"{left} {_result(row.out_of_place):<{_WIDTH}}   {_result(row.in_place)}"
    return f"{left} {_result(row.in_place):<{_WIDTH}}{_coding(row.coding)}"


def _result(result: Result | str) -> str:
    if isinstance(result, str):
        return f"N/A: {result}"
    wrong = "N/A" if result.nwrong is None else str(result.nwrong)
    return f"{result.time_us:>9.2f} {result.alg_bw:>7.3f} {result.bus_bw:>7.3f} {wrong:>6}"


def _coding(coding: Coding | None) -> str:
    if coding is None:
        return ""
    total_us = coding.enc_us + coding.comm_us + coding.dec_us
    times = (coding.enc_us, coding.comm_us, coding.dec_us, total_us)
    error = "N/A" if coding.rel_err is None else f"{coding.rel_err:.2g}"
    said = "".join(f" {time_us:>9.2f}" for time_us in times)
    return f"{said} {coding.wire_bytes:>11} {coding.ratio:>7.2f} {error:>8}"


# ---------------------------------------------------------------- totals


def wrong_in(rows: Sequence[Row]) -> int:
    """All wrong elements."""
    return sum(result.nwrong or 0 for row in rows for result in row.results())


def average_bus_bw(rows: Sequence[Row]) -> float:
    """The mean over all results, as nccl-tests has it; 0 where there is none. GB/s."""
    found = [result.bus_bw for row in rows for result in row.results()]
    return sum(found) / len(found) if found else 0.0


def as_json(row: Row) -> dict[str, Any]:
    """The fields of nccl-tests' results, and those that it lacks."""
    data = asdict(row)
    for way in ("out_of_place", "in_place"):
        if isinstance(said := data[way], str):
            data[way] = {"unavailable": said}
        else:
            data[way] = {"time": said.pop("time_us"), **said}
    return data
