"""What a rank of `bench/step_time.py` is told to measure, and what it measured: data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

__all__ = ["HookFigures", "RankConfig", "RankFigures", "Round"]


@dataclass(frozen=True)
class RankConfig:
    """What to measure; the same on every rank. Times in seconds, sizes in MB (1e6 bytes).

    `bucket_cap_mb` (MiB, as in DDP) and `gradient_as_bucket_view` are for hooks whose text does
    not set them. `memory` tells a run that is after memory peaks: no all-reduce alone, whose
    buffer counts.
    """

    workload: str
    hooks: list[str]
    rounds: int
    steps: int
    warmup: int
    gradient_mb: float | None
    forward_s: float
    backward_s: float
    bucket_cap_mb: float | None
    gradient_as_bucket_view: bool
    timeout_s: float
    memory: bool = False


@dataclass(frozen=True)
class Round:
    """The clock in one round of one hook, in seconds.

    Attributes:
        start_s: when the round began.
        ends_s: when each of its steps ended, as the training loop sees it.
        done_s: when the communication left under way by the last step was done too.
    """

    start_s: float
    ends_s: tuple[float, ...]
    done_s: float

    @property
    def step_s(self) -> float:
        """Mean step time. Everything counts, the tail too, so it falls as a round gets longer."""
        return (self.done_s - self.start_s) / len(self.ends_s)

    @property
    def steady_s(self) -> float | None:
        """Median time from one step's end to the next's; None for a round of one step.

        So without the first step, whose forward has nothing to wait for, and without the tail:
        what a step takes in a long training.
        """
        periods_s = [after - before for before, after in pairwise(self.ends_s)]
        return median(periods_s) if periods_s else None

    @property
    def tail_s(self) -> float:
        """The part of `step_s` that is the tail: the wait after the last step, over all steps."""
        return (self.done_s - self.ends_s[-1]) / len(self.ends_s)


@dataclass
class HookFigures:
    """What one rank measured of one hook.

    Attributes:
        status: `ok`, or why there are no figures.
        step_s, steady_s, tail_s: of each round, see `Round`; `steady_s` is empty if rounds are
            of one step.
        sent_bytes: bytes sent per step on the rank's interface, for each round.
        rss_mb: growth of resident memory by making and warming up this hook's model, in MB.
        loss: the last loss.
        report: `State.report()` of commsched, where there is one.
    """

    status: str = "ok"
    step_s: list[float] = field(default_factory=list)
    steady_s: list[float] = field(default_factory=list)
    tail_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    rss_mb: float = 0.0
    loss: float | None = None
    report: dict[str, Any] | None = None

    def add(self, one: Round) -> None:
        """The times of one more round."""
        self.step_s.append(one.step_s)
        self.tail_s.append(one.tail_s)
        if one.steady_s is not None:
            self.steady_s.append(one.steady_s)


@dataclass
class RankFigures:
    """All figures of one rank; `peak_mb` is the peak of its resident memory (VmHWM) in MB."""

    rank: int
    gradient_mb: float = 0.0
    all_reduce_s: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    hooks: dict[str, HookFigures] = field(default_factory=dict)
