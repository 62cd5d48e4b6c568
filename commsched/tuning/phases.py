"""Phases: when to measure, plan, try and look again. Counted alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

__all__ = ["Event", "Phases"]

MEASURE = 3  # steps with the same buckets before a plan is made of them
CHECK = 100  # steps between looks at whether the plan still fits; doubled with each new measuring
TOLERANCE = 1.25  # a step so many times as long or as short as expected: measure again


class Event(Enum):
    """What the ranks talk about at the beginning of a step."""

    NOTHING = "nothing"
    MEASURED = "measured"  # make a plan of what was measured
    TRIED = "tried"  # a trial is over
    CHECK = "check"  # do steps still take as long as they should?


class Phases:
    """Where one model is between its first step and settled training.

    Everything here is decided from what all ranks see alike: which buckets come, how many steps
    there were, and what was agreed on. Ranks that disagreed would talk past each other on the lane.
    """

    def __init__(self) -> None:
        self.measuring = True
        self._keys: tuple[int, ...] = ()
        self._streak = 0
        self._steps = 0  # since the plan was made, or chosen
        self._check = CHECK
        self._left: int | None = None  # steps of the trial under way
        self._asked = False  # what comes next is being agreed on

    @property
    def name(self) -> str:
        """In one word."""
        if self.measuring:
            return "measuring"
        return "settled" if self._left is None and not self._asked else "trying"

    @property
    def unsteady(self) -> bool:
        """Whether the buckets have not stayed the same for long enough to plan."""
        return self.measuring and self._streak < MEASURE

    def begin(self, may_plan: bool = True) -> Event:
        """A step begins: what to talk about in it.

        Args:
            may_plan: nothing that is known to come soon would change the plan.
        """
        if self.measuring:
            if self.unsteady or not may_plan:
                return Event.NOTHING
            self.measuring = False
            self._asked = True
            self._steps = 0
            return Event.MEASURED
        if self._left is not None:
            self._left -= 1
            return Event.TRIED if self._left < 0 else Event.NOTHING
        return Event.CHECK if self._steps == self._check else Event.NOTHING

    def try_for(self, steps: int) -> None:
        """The ranks have agreed on a trial of so many steps, beginning with this one; 0: no more.

        Call before `begin`.
        """
        self._asked = False
        self._left = steps if steps and not self.measuring else None
        self._steps = 0

    def knows(self, key: int) -> bool:
        """Whether the last step had this bucket."""
        return key in self._keys

    def end(self, keys: Sequence[int]) -> None:
        """A step's buckets have all come."""
        if tuple(keys) == self._keys:
            self._streak += 1
        else:
            self._keys, self._streak, self.measuring = tuple(keys), 0, True
            self._left, self._asked = None, False
        self._steps += 1

    def drifted(self, ratio: float) -> bool:
        """The ranks agree that steps are `ratio` times what they were; whether to measure again."""
        if 1 / TOLERANCE <= ratio <= TOLERANCE:
            self._steps = 0
            return False
        self.measuring, self._streak = True, 0
        self._check *= 2  # a model whose steps vary must not be measured all the time
        return True
