"""The automatic mode made to choose, for tests: trials as if candidates took made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from commsched.lane import Lane
from commsched.tuning import tuner
from commsched.tuning.trials import Trials

__all__ = ["TUNED", "as_if", "winning"]

TRIED = 7  # candidates: one of each kind, with a codec
TUNED = 70  # steps after which the automatic mode has chosen


@contextmanager
def as_if(seconds: Callable[[str], float]) -> Iterator[list[str]]:
    """Each trial is taken to have taken `seconds(candidate's name)`; gives the names as tried."""
    measured, tried = Trials.measured, []

    def made_up(self: Trials, lane: Lane, step_s: float) -> None:
        assert step_s > 0
        assert self.trial is not None
        tried.append(self.trial.candidate.name)
        measured(self, lane, seconds(tried[-1]))

    with (
        mock.patch.object(Trials, "measured", made_up),
        mock.patch.object(tuner, "HOPELESS", 1e9),  # of models that take no time all is possible
        mock.patch.object(tuner, "TRIED", TRIED),
    ):
        yield tried


def winning(name: str) -> Callable[[str], float]:
    """Times with which the candidate of that name is by far the fastest."""
    return lambda other: 0.01 if other == name else 0.1
