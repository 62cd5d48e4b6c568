"""Measuring a link thoroughly: every collective, many sizes, several at once; and a line.

For `commsched probe`. The engine's own probe of the link (`commsched.probe`) takes half a second
and knows all-reduce only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from statistics import median

from commsched import exchange
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.linkprobe.collectives import NAMES, Call, Start, Wires, drive, sent_factor, timed
from commsched.policies.units import Sizes, sizes_for
from commsched.profile import Link, Profile
from commsched.settings import Settings

__all__ = ["MIB", "Line", "Point", "Skip", "Sweep", "fit", "own_sizes", "sweep"]

KIB, MIB = 2**10, 2**20
SIZES = (*(KIB << power for power in range(0, 16, 2)), 32 * MIB)
QUICK_SIZES = (KIB, 32 * KIB, MIB, 8 * MIB)
LANES = (1, 2, 4, 8)
BURST = 16  # collectives in one measurement of several at once
MOST_REPEATS = 50
LEAST_REPEATS = {1: 3, BURST: 2}  # by burst: a larger one is a mean already
REWEIGHTED = 30


@dataclass(frozen=True)
class Point:
    """One measurement: the median over repeats of the slowest rank's time.

    Attributes:
        collective: one of `commsched.linkprobe.collectives.NAMES`.
        nbytes: of the whole buffer.
        in_flight: how many at once; 1 with `burst` 1: each alone, after a barrier.
        burst: how many make one measurement.
        sent_bytes: by one rank, for one of them.
        seconds: for one of them.
        repeats: of the measurement.
    """

    collective: str
    nbytes: int
    in_flight: int
    burst: int
    sent_bytes: float
    seconds: float
    repeats: int

    @property
    def gb_s(self) -> float:
        """Bytes sent over time, in 1e9 bytes a second."""
        return self.sent_bytes / self.seconds / 1e9


@dataclass(frozen=True)
class Line:
    """A collective in which a rank sends ``b`` bytes takes ``alpha_s + b * beta_s``.

    The errors are those of the points it was fitted to, |line / time - 1|.
    """

    alpha_s: float
    beta_s: float
    median_error: float
    max_error: float
    points: int

    @property
    def gb_s(self) -> float:
        """The bandwidth, in 1e9 bytes a second; infinite where more bytes took no longer."""
        return 1e-9 / self.beta_s if self.beta_s else math.inf


@dataclass(frozen=True)
class Skip:
    """What was not measured; `in_flight` and `burst` as of `Point`."""

    collective: str
    nbytes: int
    in_flight: int
    burst: int
    why: str


@dataclass
class Sweep:
    """All that was measured, and what was left out."""

    points: list[Point] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)

    def alone(self, collective: str) -> list[Point]:
        """One at a time, from small to large."""
        return [p for p in self.points if p.collective == collective and p.burst == 1]

    def together(self, collective: str, nbytes: int) -> list[Point]:
        """Several at once, from few to many."""
        wanted = collective, nbytes
        return [p for p in self.points if (p.collective, p.nbytes) == wanted and p.burst > 1]

    def line(self, collective: str) -> Line:
        """Fitted to what `alone` gives."""
        return fit([(point.sent_bytes, point.seconds) for point in self.alone(collective)])


# ---------------------------------------------------------------- the line


def fit(rows: Sequence[tuple[float, float]]) -> Line:
    """The line nearest to (bytes sent, seconds) by the squares of relative errors.

    Small and large transfers count alike, and twice the time as much as half of it: an error is
    relative to the geometric mean of the line and the time, found by reweighting. Neither latency
    nor slope is negative: where one would be, it is 0.

    Raises:
        ValueError: there are no rows, or a time is not above 0.
    """
    if not rows or min(seconds for _, seconds in rows) <= 0:
        raise ValueError("a line needs at least one point, and times above 0")
    unit = max(nbytes for nbytes, _ in rows) or 1.0  # both unknowns in seconds: well conditioned
    u = [1 / seconds for _, seconds in rows]
    v = [nbytes / unit / seconds for nbytes, seconds in rows]
    ratios = [1.0] * len(rows)  # the line over the time
    for _ in range(REWEIGHTED):
        alpha_s, slope_s = _least_squares(u, v, [1 / max(ratio, 0.01) for ratio in ratios])
        ratios = [alpha_s * p + slope_s * q for p, q in zip(u, v, strict=True)]
    errors = [abs(ratio - 1) for ratio in ratios]
    return Line(alpha_s, slope_s / unit, median(errors), max(errors), len(rows))


def _least_squares(
    u: Sequence[float], v: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Not negative (a, b) with the least weighted squares of a * u + b * v - 1."""
    wu = [weight * p for weight, p in zip(weights, u, strict=True)]
    wv = [weight * q for weight, q in zip(weights, v, strict=True)]
    uu, uv, vv = _dot(wu, u), _dot(wu, v), _dot(wv, v)
    su, sv = math.fsum(wu), math.fsum(wv)
    det = uu * vv - uv * uv
    if det <= 1e-12 * uu * vv:  # one size only
        return su / uu, 0.0
    a, b = (su * vv - sv * uv) / det, (sv * uu - su * uv) / det
    if a < 0:
        return 0.0, sv / vv
    return (a, b) if b >= 0 else (su / uu, 0.0)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------- measuring


def sweep(
    wires: Wires,
    budget_s: float,
    quick: bool = False,
    now: Callable[[], float] = time.perf_counter,
    said: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Measure the link. Collective; takes `budget_s` seconds at most, or little more.

    First each collective alone, from small to large, for half of the time at most. Then several
    at once, of the size of chunks that commsched would choose for such a link, and of others.

    Args:
        wires: of a group of our own; torch's where tensors are not on the CPU.
        budget_s: what would take too long is left out, the larger sizes first.
        quick: fewer sizes, and only all-reduces at once.
        now: the clock, in seconds.
        said: told of each measurement before it begins.
    """
    bench = _Bench(wires, budget_s, now, said)
    bench.warm_up()
    for nbytes in QUICK_SIZES if quick else SIZES:
        for name in NAMES:
            bench.add(name, nbytes, 1, 1, until=0.5)
    line = bench.found.line("all_reduce")
    chunk = own_sizes(Link(line.alpha_s, line.beta_s), wires.size).chunk_bytes
    around = (chunk, chunk // 4, min(4 * chunk, 32 * MIB))
    cases = [("all_reduce", nbytes) for nbytes in around]
    if not quick:
        cases += [(name, chunk) for name in NAMES if name != "all_reduce"]
    for name, nbytes in cases:
        for most in LANES:
            bench.add(name, nbytes, most, BURST, until=0.0)
    return bench.found


class _Bench:
    """Measures within a budget. Collective; decides by times that all ranks have agreed on."""

    def __init__(
        self,
        wires: Wires,
        budget_s: float,
        now: Callable[[], float],
        said: Callable[[str], None],
    ) -> None:
        self.found = Sweep()
        self._said = said
        self._wires = wires
        self._budget_s = budget_s
        self._now = now
        self._begin_s = now()
        self._pool = exchange.Pool()

    def warm_up(self) -> None:
        """Connect, and let the transport find its pace."""
        self._said("the first collectives")
        for name in NAMES:
            call = Call(self._wires, name, KIB, in_place=name != "all_to_all")
            drive([self._start(call)] * BURST, 1)

    def add(self, name: str, nbytes: int, most: int, burst: int, until: float) -> None:
        """Measure one point, or say why not. A collective's first one always is measured.

        Args:
            name: the collective.
            nbytes: of its whole buffer.
            most: how many at once.
            burst: how many in one measurement.
            until: the share of the budget that must be left after it.
        """
        self._said(f"{name} of {nbytes} bytes, {most} at once")
        expected_s = (1 + LEAST_REPEATS[burst]) * burst * self._expected_s(name, nbytes)
        left_s = self._budget_s - self._used_s()
        limit_s = self._budget_s / (20 if burst == 1 else 8)
        if expected_s > limit_s:
            why = f"more than {limit_s:.1f} s each"
        elif expected_s and expected_s > left_s - until * self._budget_s:
            why = "the time was up"
        else:
            self.found.points.append(self._measured(name, nbytes, most, burst))
            return
        self.found.skipped.append(Skip(name, nbytes, most, burst, why))

    def _expected_s(self, name: str, nbytes: int) -> float:
        """By the line of those measured; of the first one only small buffers say nothing yet."""
        before = self.found.alone(name)
        if not before:
            return 0.0
        if len(before) == 1:
            ratio = nbytes / before[0].nbytes
            return before[0].seconds * (min(ratio, 2.0) if nbytes <= 64 * KIB else ratio)
        line = self.found.line(name)
        return line.alpha_s + nbytes * sent_factor(name, self._wires.size) * line.beta_s

    def _used_s(self) -> float:
        """The most over ranks."""
        return max(row[0] for row in self._wires.gathered([self._now() - self._begin_s]))

    def _measured(self, name: str, nbytes: int, most: int, burst: int) -> Point:
        # One that is out of the window is done, so its buffers are free again.
        calls = [
            Call(self._wires, name, nbytes // 4, in_place=name != "all_to_all")
            for _ in range(min(most, burst))
        ]
        starts = [*islice(cycle(map(self._start, calls)), burst)]
        action = partial(drive, starts, most)
        (once_s,) = self._slowest(action, 1)  # makes buffers and connections; does not count
        for_s = self._budget_s / 150
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS[burst], int(for_s / once_s)))
        seconds = median(self._slowest(action, repeats)) / burst
        sent = sent_factor(name, self._wires.size) * calls[0].nbytes
        return Point(name, nbytes, most, burst, sent, seconds, repeats)

    def _start(self, call: Call) -> Start:
        """As the engine starts it: on the CPU it has its own two halves of an all-reduce."""
        whole = call.send if call.name == "reduce_scatter" else call.recv
        if self._wires.device.type == "cpu" and call.name == "reduce_scatter":
            return lambda: exchange.reduce_scatter(self._wires, whole, self._pool)
        if self._wires.device.type == "cpu" and call.name == "all_gather":
            return lambda: exchange.all_gather(self._wires, whole, self._pool)
        return call.start

    def _slowest(self, action: Callable[[], object], repeats: int) -> list[float]:
        own_s = [timed(self._wires, action, self._now) for _ in range(repeats)]
        return [max(column) for column in zip(*self._wires.gathered(own_s), strict=True)]


def own_sizes(link: Link, world_size: int) -> Sizes:
    """What commsched's policies choose for such a link, for gradients that travel as they are."""
    layout = Layout((BucketSpec((ParamSpec("gradients", 64 * MIB),), "float32"),))
    bare = Profile.unmeasured(layout, world_size)
    return sizes_for(replace(bare, link=link), Settings())
