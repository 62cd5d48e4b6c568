"""Phases: when to measure, when to plan anew, when to defer. Counted alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Phases"]

MEASURE = 3  # steps with the same buckets before a plan is made of them
CHECK = 100  # steps between looks at whether the plan still fits; doubled with each new measuring
TOLERANCE = 1.25  # a step so many times as long or as short as predicted: measure again


class Phases:
    """Where one model is between its first step and settled training.

    Everything here is decided from what all ranks see alike: which buckets come, and how many
    steps there were. Ranks that disagreed would talk past each other on the lane.
    """

    def __init__(self) -> None:
        self.measuring = True
        self._keys: tuple[int, ...] = ()
        self._streak = 0
        self._steps = 0  # since the plan was made
        self._check = CHECK

    def begin(self) -> bool:
        """A step begins; True if a plan is to be made from what was measured, now."""
        if self.measuring and self._streak >= MEASURE:
            self.measuring = False
            self._steps = 0
            return True
        return False

    def check_due(self) -> bool:
        """Whether the ranks should compare the length of their steps, in this step."""
        return not self.measuring and self._steps == self._check

    def knows(self, key: int) -> bool:
        """Whether the last step had this bucket."""
        return key in self._keys

    def end(self, keys: Sequence[int]) -> None:
        """A step's buckets have all come."""
        if tuple(keys) == self._keys:
            self._streak += 1
        else:
            self._keys, self._streak, self.measuring = tuple(keys), 0, True
        self._steps += 1

    def drifted(self, ratio: float) -> bool:
        """The ranks agree that steps are `ratio` times what they were; whether to measure again."""
        if 1 / TOLERANCE <= ratio <= TOLERANCE:
            self._steps = 0
            return False
        self.measuring, self._streak = True, 0
        self._check *= 2  # a model whose steps vary must not be measured all the time
        return True
