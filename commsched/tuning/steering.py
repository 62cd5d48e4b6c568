"""Steering: the training thread's part in measuring, planning and trying.

Phases say when, the recorder measures, the ranks agree on the engine's threads, and each step is
told how to go.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from commsched import policies
from commsched.advice import advise
from commsched.engine import Engine
from commsched.planner import Begin, Made
from commsched.profile import Profile
from commsched.recorder import WINDOW, Recorder
from commsched.simulate import ddp as plain_ddp
from commsched.simulate import ideal, simulate
from commsched.tuning.phases import Event, Phases
from commsched.tuning.trials import Trial
from commsched.tuning.tuner import Outcome

__all__ = ["Mode", "Outlook", "Steering"]

PATIENCE = 50  # steps without a plan until it is said

logger = logging.getLogger("commsched")


class Mode(NamedTuple):
    """How a step goes."""

    deferred: bool = False  # optimizer steps wait for the next forward
    plain: bool = False  # torch's own all-reduce


@dataclass(frozen=True)
class Outlook:
    """What the plan's profile lets expect, in seconds: of the step as it goes, and at best."""

    step_s: float
    ideal_s: float


class Steering:
    """Steers one model's steps. Used by the training thread only.

    Args:
        ddp: the model.
        engine: where ranks agree.
        recorder: measures.
        defers: the user has chosen a policy for the next forward.
        step: the last one of the run that is resumed.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        engine: Engine,
        recorder: Recorder,
        defers: bool,
        step: int = -1,
    ) -> None:
        self.phases = Phases()
        self._engine = engine
        self._recorder = recorder
        self._defers = defers
        self._group = ddp.process_group
        self._asked: Begin | None = None  # what was last brought, until the answer is heard
        self._trial: Trial | None = None
        self._planned: tuple[Made, Mode, Outlook] | None = None
        self._advised: Profile | None = None
        self.step = step  # the present one; counted alike on all ranks
        self._first = step + 1
        self._began_s: float | None = None  # the present one; None: its length says nothing
        self._laps_s: deque[float] = deque(maxlen=WINDOW)

    @property
    def outcome(self) -> Outcome | None:
        """What the automatic mode has chosen; None before, and where the user has."""
        trials = self._engine.planner.trials
        return None if trials is None else trials.outcome

    @property
    def choice(self) -> str:
        """What is in effect, in words."""
        if self._trial is not None and not self.phases.measuring:
            return self._trial.candidate.name
        return self._engine.planner.active.policy

    @property
    def plain(self) -> bool:
        """Whether torch's own all-reduce is in effect, in settled training or for a trial."""
        return self._trial is not None and self._trial.candidate.plain

    @property
    def _deferred(self) -> bool:
        """Whether optimizer steps are, once there is a plan."""
        return self._defers if self._trial is None else self._trial.candidate.deferred

    def begin(self, previous: Sequence[int]) -> tuple[Begin, Mode]:
        """The first bucket of a backward is there.

        Args:
            previous: the keys of the last backward's buckets.

        Returns:
            What to tell the engine; and how this step goes.
        """
        self._end_lap()
        if previous:
            self.phases.end(previous)
        self._hear()
        self.step += 1
        begins = Begin()
        event = self.phases.begin(self.step >= self._engine.planner.last_start)
        if event is Event.MEASURED:
            begins.measured = self._recorder.summary()
        elif event is Event.TRIED:
            begins.tried_s = median(self._laps_s)
        elif event is Event.CHECK:
            begins.drift = self._drift()
        if begins.talks:
            self._asked, self._began_s = begins, None
            self._laps_s.clear()
        self._complain()
        return begins, self._mode(begins)

    def _end_lap(self) -> None:
        now_s = time.monotonic()
        if self._began_s is not None:
            self._laps_s.append(now_s - self._began_s)
        self._began_s = now_s

    def _hear(self) -> None:
        """What the ranks agreed on in the last step holds from this one on, on all of them."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        self._engine.wait(lambda: asked.answered)
        if asked.agreed_drift is not None:
            self._consider(asked.agreed_drift)
            return
        trials = self._engine.planner.trials
        if trials is not None:
            self._trial = trials.trial
        self.phases.try_for(0 if self._trial is None else self._trial.steps)

    def _consider(self, drift: float) -> None:
        if self.phases.drifted(drift):
            logger.info("steps take %.2f x the expected time: measuring again", drift)
            self._recorder.restart()

    def _drift(self) -> float:
        """The length of the last steps over what it should be."""
        outcome, outlook = self.outcome, self.outlook()
        if outcome is not None:
            return median(self._laps_s) / outcome.step_s if self._laps_s else 1.0
        return 1.0 if outlook is None else self._recorder.drift(outlook.step_s)

    def _mode(self, begins: Begin) -> Mode:
        if self.phases.measuring:
            return Mode()
        if self._trial is None:
            return Mode(deferred=self._defers and self.outlook() is not None)
        candidate = self._trial.candidate
        # The ranks talk in the engine's order, which it can only keep if it has the step's tasks.
        return Mode(candidate.deferred, candidate.plain and not begins.talks)

    def _complain(self) -> None:
        if self.step - self._first == PATIENCE - 1 and self.phases.unsteady:
            logger.warning(
                "after %d steps DDP's buckets still change from step to step: steps stay "
                "synchronous",
                PATIENCE,
            )

    def outlook(self) -> Outlook | None:
        """What the plan's profile lets expect; None before there is one."""
        made = self._engine.planner.made
        if made is None or made.profile is None or not made.profile.measured:
            return None
        mode = Mode(self._deferred, self.plain)
        if self._planned is None or self._planned[0] is not made or self._planned[1] != mode:
            profile = made.profile
            way = plain_ddp(profile) if mode.plain else simulate(made.plan, profile, mode.deferred)
            self._planned = made, mode, Outlook(way.step_s, ideal(profile))
        return self._planned[2]

    def advise(self) -> None:
        """Say once for each profile, on one rank, which bucket size would be better."""
        made, settings = self._engine.planner.made, self._engine.planner.active
        profile = None if made is None else made.profile
        if profile is self._advised or profile is None or not profile.measured:
            return
        if self.phases.name != "settled":
            return
        self._advised = profile
        if torch.distributed.get_rank(self._group) == 0:
            advice = advise(profile, settings, policies.get(settings.policy), self._deferred)
            logger.log(logging.WARNING if advice.worth_it else logging.INFO, "%s", advice)
