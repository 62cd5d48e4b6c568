"""Tuner: tries the most promising candidates in turn, and keeps the fastest. Pure.

It is told step times that all ranks agree on, and says what is to be tried next. Predictions choose
what is worth trying; only measurements choose what is kept. Sources of the idea: Horovod's and
ByteScheduler's tuners, which switch all workers at an agreed step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from commsched.tuning.candidates import Candidate

__all__ = ["MOST_STEPS", "Outcome", "Row", "Tuner"]

TRIED = 5  # candidates at most, plain DDP among them
STEPS = 3  # measured of each; the one in which ranks switch comes before and does not count
FINAL_STEPS = 4  # measured in each turn of the final
TURNS = 6  # of the final, shared by two or three finalists by turns: a machine's speed drifts
CLOSE = 1.05  # finalists whose step times differ by more need no final
CLOSE_TO_PLAIN = 1.25  # plain DDP is in the final unless it takes so many times as long as the best
WORTH = 0.015  # of the step time: what must be gained over plain DDP, or over an exact candidate
CLEAR = 0.05  # of the step time: a gain that is smaller must show in every turn
HOPELESS = 1.2  # predicted to take so many times as long as the best: not tried

MOST_STEPS = TRIED * (1 + STEPS) + TURNS * (1 + FINAL_STEPS)


@dataclass(eq=False)
class Row:
    """One candidate. Times in seconds; the measured ones of single turns."""

    candidate: Candidate
    predicted_s: float
    turns_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float | None:
        """The median over its turns; None where it was not tried."""
        return median(self.turns_s) if self.turns_s else None

    def to_dict(self) -> dict[str, Any]:
        """For people, in milliseconds."""
        measured_s = self.measured_s
        return {
            "name": self.candidate.name,
            "predicted_ms": 1e3 * self.predicted_s,
            "measured_ms": None if measured_s is None else 1e3 * measured_s,
            "deferred": self.candidate.deferred,
            "codec": self.candidate.codec,
        }


@dataclass(frozen=True)
class Outcome:
    """What was chosen, from what, and why.

    Attributes:
        chosen: the candidate's name.
        why: one sentence.
        steps: how many steps the trials took.
        compute_ms: a step without communication; no schedule and no codec beats it.
        ideal_ms: what no exact schedule beats.
        rows: the candidates, those that were tried first: see `Row.to_dict`.
        candidate: the chosen one, with its settings; see `Candidate.to_dict`.
        step_s: its measured step time.
    """

    chosen: str
    why: str
    steps: int
    compute_ms: float
    ideal_ms: float
    rows: tuple[dict[str, Any], ...]
    candidate: dict[str, Any]
    step_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Outcome:
        """What `to_dict` gave, also by way of JSON."""
        return cls(**{**saved, "rows": tuple(saved["rows"])})

    def __str__(self) -> str:
        tried = ", ".join(
            f"{row['name']} {row['measured_ms']:.1f} (predicted {row['predicted_ms']:.1f})"
            for row in self.rows
            if row["measured_ms"] is not None
        )
        return (
            f"automatic mode keeps {self.chosen}: {self.why}. Step times in ms after {self.steps} "
            f"steps of trials: {tried or 'nothing was tried'}; computing alone "
            f"{self.compute_ms:.1f}, best exact schedule {self.ideal_ms:.1f}"
        )


class Tuner:
    """One search.

    Args:
        rows: all candidates with their predicted step times.
        compute_s: a step without communication.
        ideal_s: what no exact schedule beats.

    Attributes:
        outcome: None while there is something to try.
    """

    def __init__(self, rows: Sequence[Row], compute_s: float, ideal_s: float) -> None:
        self.outcome: Outcome | None = None
        self._rows = list(rows)
        self._bounds_ms = 1e3 * compute_s, 1e3 * ideal_s
        self._steps = 0
        self._queue = _worth_trying(self._rows)
        self._final = False
        if len(self._queue) == 1:
            self._conclude(self._queue[0], "nothing else is predicted to come near it")

    @property
    def trial(self) -> Candidate:
        """What is to be in effect now: tried, or kept."""
        if self.outcome is not None:
            return Candidate.from_dict(self.outcome.candidate)
        return self._queue[0].candidate

    @property
    def steps(self) -> int:
        """How many steps of the trial are to be measured; 0 once there is an outcome."""
        if self.outcome is not None:
            return 0
        return FINAL_STEPS if self._final else STEPS

    def measured(self, step_s: float) -> None:
        """The trial is over.

        Args:
            step_s: its step time, as agreed by all ranks.
        """
        self._steps += 1 + self.steps
        self._queue.pop(0).turns_s.append(step_s)
        if self._queue:
            return
        finalists = [] if self._final else self._finalists()
        if finalists:
            self._final = True
            self._queue = finalists * (TURNS // len(finalists))
            return
        self._choose()

    def _finalists(self) -> list[Row]:
        """The best two, and plain DDP; none where the best is clearly so."""
        best, *others = self._by_time()
        if not others or _time(others[0]) >= CLOSE * _time(best):
            return []
        near = [row for row in others[1:] if _time(row) < CLOSE_TO_PLAIN * _time(best)]
        return [best, others[0], *filter(_is_plain, near)]

    def _by_time(self) -> list[Row]:
        return sorted((row for row in self._rows if row.turns_s), key=_time)

    def _choose(self) -> None:
        """The fastest, unless something safer is as fast."""
        best = self._by_time()[0]
        for safer, what in ((_is_plain, "plain DDP"), (_is_exact, "an exact one")):
            rows = [row for row in self._by_time() if safer(row)]
            if rows and not safer(best) and (why := _why_not(best, rows[0])):
                self._conclude(rows[0], f"{best.candidate.name} {why.format(what=what)}")
                return
        plain = [row for row in self._by_time() if _is_plain(row)]
        if plain and plain[0] is not best:
            ratio = _time(best) / _time(plain[0])
            self._conclude(best, f"the fastest of those tried, {ratio:.3f} x plain DDP")
        else:
            self._conclude(best, "nothing that was tried is faster")

    def _conclude(self, row: Row, why: str) -> None:
        tried = self._by_time()
        rest = sorted((one for one in self._rows if not one.turns_s), key=_predicted)
        self.outcome = Outcome(
            chosen=row.candidate.name,
            why=why,
            steps=self._steps,
            compute_ms=self._bounds_ms[0],
            ideal_ms=self._bounds_ms[1],
            rows=tuple(one.to_dict() for one in [*tried, *rest]),
            candidate=row.candidate.to_dict(),
            step_s=row.measured_s or row.predicted_s,
        )


def _why_not(best: Row, safer: Row) -> str:
    """Why the best is not worth leaving something safer for; "" where it is."""
    gain = 1 - _time(best) / _time(safer)
    if gain < WORTH:
        return f"gains {gain:.1%} over {{what}}, less than {WORTH:.1%} is not worth leaving it for"
    turns = list(zip(best.turns_s, safer.turns_s, strict=False))  # one turn where no final was
    if gain < CLEAR and not all(one < other for one, other in turns):
        return f"gains {gain:.1%} over {{what}}, but not in each of {len(turns)} turns"
    return ""


def _worth_trying(rows: Sequence[Row]) -> list[Row]:
    """Plain DDP, then the best predicted; of the exact ones at least one."""
    plain = [row for row in rows if _is_plain(row)]
    others = sorted((row for row in rows if not _is_plain(row)), key=_predicted)
    best_s = min(map(_predicted, rows))
    # Predictions know nothing of what our own work costs: where they differ little, all may win.
    near = [row for row in others if _predicted(row) <= HOPELESS * best_s]
    firsts = {_family(row): row for row in reversed(near)}.values()
    # One of each kind before a second chunk size of any.
    found = sorted(near, key=lambda row: (row not in firsts, row.predicted_s))
    found = found[: TRIED - len(plain)]
    exact = next((row for row in others if _is_exact(row)), None)
    if exact is not None and not any(map(_is_exact, found)):
        found = [*found[: TRIED - len(plain) - 1], exact]
    return [*plain, *found]


def _family(row: Row) -> tuple[str, bool, str]:
    return row.candidate.settings.policy, row.candidate.deferred, row.candidate.codec


def _is_plain(row: Row) -> bool:
    return row.candidate.plain


def _is_exact(row: Row) -> bool:
    return not row.candidate.lossy


def _predicted(row: Row) -> float:
    return row.predicted_s


def _time(row: Row) -> float:
    measured_s = row.measured_s
    assert measured_s is not None
    return measured_s
