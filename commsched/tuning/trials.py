"""Trials: the conversations of the automatic mode, and the file that keeps their outcome."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from commsched import codecs
from commsched.errors import CommSchedError
from commsched.lane import Lane
from commsched.layout import digest_of
from commsched.pricing import coding_s
from commsched.profile import Profile
from commsched.rules import parse_allow
from commsched.settings import Settings
from commsched.simulate import ideal
from commsched.tuning.candidates import Candidate, candidates, predict
from commsched.tuning.tuner import Outcome, Row, Tuner
from commsched.version import __version__

__all__ = ["Search", "Trial", "Trials"]

logger = logging.getLogger("commsched")

OF_ONE_RUN = ("enabled", "timeout_s", "trace_steps", "tuning_file")  # the choice is the same


@dataclass(frozen=True)
class Search:
    """What there is to choose from.

    Attributes:
        fixed: settings that the user has set: they leave the search.
        deferrable: whether the optimizer is handed over.
        model: a digest of the parameters' names and shapes.
    """

    fixed: frozenset[str]
    deferrable: bool
    model: str = ""


@dataclass(frozen=True)
class Trial:
    """What is in effect, and for how many more steps it is to be measured; 0: for good."""

    candidate: Candidate
    steps: int = 0


class Trials:
    """Has candidates tried. On the engine's thread; rank 0 decides, and tells the others.

    Attributes:
        trial: what is in effect; None before the first one. Replaced as a whole, read by the
            training thread.
        outcome: likewise; None while something is still to be tried.
    """

    def __init__(
        self, settings: Settings, search: Search, world_size: int, saved: Mapping[str, Any] | None
    ) -> None:
        self.trial: Trial | None = None
        self.outcome: Outcome | None = None
        self._settings = settings
        self._search = search
        self._world_size = world_size
        self._tuner: Tuner | None = None  # rank 0's
        self._started = self._complained = False
        self._saved = self._fitting(saved or {})
        if self._saved is not None:
            self._settle(self._saved)

    @property
    def to_save(self) -> dict[str, Any] | None:
        """What was chosen, for what job; a later run takes it as `saved`."""
        if self.outcome is None:
            return None
        return {"job": self._job, "outcome": self.outcome.to_dict()}

    def _fitting(self, saved: Mapping[str, Any]) -> Outcome | None:
        """What was chosen, if that was for such a job."""
        return Outcome.from_dict(saved["outcome"]) if saved.get("job") == self._job else None

    def _settle(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.trial = Trial(_candidate_of(outcome))

    def nothing_to_go_by(self, rank: int) -> None:
        """The ranks have measured nothing: what a run before has chosen stays, or nothing is tried.

        Args:
            rank: of the group.
        """
        self.trial = None if self.outcome is None else Trial(_candidate_of(self.outcome))
        if rank == 0 and not self._complained:
            self._complained = True
            logger.warning("this model's steps could not be measured: nothing is tried")

    def start(self, lane: Lane, profile: Profile, effective: Settings) -> None:
        """Begin a search; or go by an outcome that was saved for this job.

        Collective.

        Args:
            lane: with nothing on the wire.
            profile: just measured.
            effective: the user's settings, without what is refused.
        """
        again = self._started  # what was saved has drifted
        self._started, self.outcome = True, None

        def answer() -> dict[str, Any]:
            found = None if again else self._saved or self._load()
            if found is not None:
                return {"outcome": found.to_dict()}
            self._tuner = self._new_tuner(profile, effective)
            return self._said()

        self._hear(lane, "choosing what to try", answer)

    def measured(self, lane: Lane, step_s: float) -> None:
        """A trial is over: on to the next. Collective."""

        def answer() -> dict[str, Any]:
            assert self._tuner is not None
            self._tuner.measured(step_s)
            said = self._said()
            if self._tuner.outcome is not None:
                self._keep(self._tuner.outcome)
            return said

        self._hear(lane, "choosing what to try next", answer)

    def _said(self) -> dict[str, Any]:
        tuner = self._tuner
        assert tuner is not None
        if tuner.outcome is not None:
            return {"outcome": tuner.outcome.to_dict()}
        return {"candidate": tuner.trial.to_dict(), "steps": tuner.steps}

    def _hear(self, lane: Lane, what: str, answer: Callable[[], dict[str, Any]]) -> None:
        said = lane.agree(what, partial(_from_rank_0, lane, answer))
        if "outcome" in said:
            self._settle(Outcome.from_dict(said["outcome"]))
        else:
            self.trial = Trial(Candidate.from_dict(said["candidate"]), said["steps"])
            logger.info("automatic mode tries %s", self.trial.candidate.name)

    def _new_tuner(self, profile: Profile, effective: Settings) -> Tuner:
        allow = parse_allow(self._settings.allow)
        costs = {codec: self._coding_s(codec) for codec in allow}
        found = candidates(
            profile,
            effective,
            fixed=self._search.fixed,
            deferrable=self._search.deferrable,
            allow=allow,
            coding_s=costs,
        )
        rows = [Row(one, predict(one, profile, costs).step_s) for one in found]
        return Tuner(rows, profile.compute_s, ideal(profile))

    def _coding_s(self, codec: str) -> float:
        feedback = codecs.get(codec).keeps_errors(self._settings.error_feedback)
        return coding_s(codec, self._world_size, feedback)

    # ---- rank 0's file ---------------------------------------------------------------------

    @property
    def _job(self) -> str:
        """Equal for jobs that may share an outcome: by values, not by who has set them."""
        shared = self._settings.shared().items()
        settings = {name: value for name, value in shared if name not in OF_ONE_RUN}
        search = [self._search.deferrable, self._search.model]
        return digest_of([__version__, self._world_size, settings, search])

    def _load(self) -> Outcome | None:
        path = self._settings.tuning_file
        if not path:
            return None
        try:
            found = self._fitting(json.loads(Path(path).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommSchedError(
                f"tuning_file={path!r} cannot be read ({error!r}): remove it, or name another"
            ) from None
        if found is None:
            logger.warning("%s is of another job: everything is tried anew", path)
        return found

    def _keep(self, outcome: Outcome) -> None:
        self.outcome = outcome
        logger.log(
            logging.WARNING if _candidate_of(outcome).plain else logging.INFO,
            "%s",
            outcome,
        )
        path = self._settings.tuning_file
        if not path:
            return
        text = json.dumps(self.to_save, indent=1)
        try:
            Path(f"{path}.new").write_text(text)
            os.replace(f"{path}.new", path)  # whole or not at all
        except OSError as error:
            logger.warning("what was chosen could not be written to %s: %s", path, error)


def _from_rank_0(lane: Lane, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's answer, or its error, on every rank.

    Any error: the others wait for an answer, and would hear of nothing until their deadline.
    """
    said: dict[str, Any] = {}
    if lane.group.rank == 0:
        try:
            said = answer()
        except CommSchedError as error:
            said = {"error": str(error)}
        except Exception as error:
            logger.error("automatic mode", exc_info=True)
            said = {"error": f"the automatic mode failed: {type(error).__name__}: {error}"}
    text = json.dumps(said).encode()
    heard: dict[str, Any] = json.loads(lane.group.broadcast_bytes(text).decode())
    if "error" in heard:
        raise CommSchedError(heard["error"])
    return heard


def _candidate_of(outcome: Outcome) -> Candidate:
    return Candidate.from_dict(outcome.candidate)
