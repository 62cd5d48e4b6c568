"""The planner: makes plans, before and after anything is measured, and has the ranks agree."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from commsched import codecs, policies
from commsched.checkpoint import Checkpoint, moved
from commsched.codecs.base import WARM_UP
from commsched.lane import Lane
from commsched.layout import Layout
from commsched.plan import Plan, agree
from commsched.pricing import coding_s, price
from commsched.probe import agree_on_median, agree_on_profile, probe_link
from commsched.profile import Link, Profile
from commsched.rules import parse_allow, used, without
from commsched.settings import Settings
from commsched.tuning.trials import Search, Trials

__all__ = ["Begin", "Made", "Planner", "Verdict"]

logger = logging.getLogger("commsched")

REBUILT = 3  # steps after which DDP has rebuilt its buckets


@dataclass
class Begin:
    """What a rank brings to a new iteration. All ranks bring the same kinds of things.

    Attributes:
        step: which one it is, of this process; equal on all ranks.
        measured: its `Recorder.summary()`: plan anew, from the ranks' medians.
        tried_s: the step time of the trial that is over.
        drift: the length of its steps over the expected one.
        agreed_drift: the answer: the ranks' median.
        answered: all that was brought has been talked about.
    """

    step: int = -1
    measured: dict[str, Any] | None = None
    tried_s: float | None = None
    drift: float | None = None
    agreed_drift: float | None = None
    answered: bool = False

    @property
    def talks(self) -> bool:
        """Whether there is anything to talk about."""
        return not (self.measured is None and self.tried_s is None and self.drift is None)


@dataclass(frozen=True, eq=False)
class Made:
    """A plan, and the profile it was made from once one is measured."""

    plan: Plan
    profile: Profile | None


@dataclass(frozen=True)
class Verdict:
    """Which codecs cost more than they save here, and why in words.

    `priced` and `world_size` are what it was made for.
    """

    priced: frozenset[str]
    world_size: int
    refused: frozenset[str] = frozenset()
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "priced": sorted(self.priced), "refused": sorted(self.refused)}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Verdict:
        """What `to_dict` gave."""
        sets = {name: frozenset(saved[name]) for name in ("priced", "refused")}
        return cls(**{**saved, **sets})


class Planner:
    """Makes the plans of one model.

    Its conversations are tasks of the lane: all ranks hold them at the same place of its order.

    Attributes:
        made: the present plan; replaced as a whole, read by other threads.
        active: the settings as they are in effect: without codecs that have not begun, or are
            refused. Likewise.
        verdict: None before codecs were priced. Likewise.
        last_start: the step from which on every codec that may be used has begun, and those of the
            user are priced. What is planned or tried before would not hold.
        saved_plan: that of the run that is being resumed, while DDP may still come to its buckets.
        trials: those of the automatic mode; None where the user has chosen.
    """

    def __init__(
        self,
        settings: Settings,
        world_size: int,
        resumed: Checkpoint | None = None,
        search: Search | None = None,
    ) -> None:
        self.made: Made | None = None
        self.verdict: Verdict | None = None
        self._resumed = resumed
        self._settings = settings
        self._world_size = world_size
        self.trials: Trials | None = None
        if search is not None:
            saved = None if resumed is None else resumed.tuning
            self.trials = Trials(settings, search, world_size, saved)
        self._starts = _starts(settings, used(settings))
        if resumed is not None and resumed.verdict is not None:
            verdict = Verdict.from_dict(resumed.verdict)
            if (verdict.priced, verdict.world_size) == (frozenset(self._starts), world_size):
                self.verdict = verdict
        allowed = {} if search is None else _starts(settings, parse_allow(settings.allow))
        starts = [*self._starts.values(), *allowed.values()]
        if self._starts and not settings.codec_force:
            starts.append(WARM_UP)
        self.last_start = max(starts, default=0)
        self._step = 0
        self.active = self._effective()
        self.saved_plan: Plan | None = None
        self._planned_with = self.active

    @property
    def sends_exactly(self) -> bool:
        """Whether no codec that keeps anything is in effect, or will be by the user's own wish."""
        return not self._starts and not any(codecs.get(one).lossy for one in used(self.active))

    def begin(self, step: int) -> None:
        """Iteration `step` begins. Counted alike on all ranks; no conversation."""
        self._step = step
        self.active = self._effective()
        self.saved_plan = self._plan_of_resumed()

    def unmeasured(self, layout: Layout) -> Plan:
        """This rank's plan before anything is measured: as the resumed run's, if that fits."""
        saved = self.saved_plan
        first = self._resumed is not None and self._step == self._resumed.step + 1
        plan = moved(saved, layout) if saved is not None and first else None
        return plan or self._by_policy(layout)

    def _plan_of_resumed(self) -> Plan | None:
        if self._resumed is None or self._step > self._resumed.step + REBUILT:
            return None
        return self._resumed.plan_now(self.active, self._by_policy)

    def resume(self) -> None:
        """The buckets of the resumed run have come: go on by its plan."""
        assert self.saved_plan is not None
        self.made = Made(self.saved_plan, None)
        self._planned_with = self.active
        self._resumed = self.saved_plan = None

    def _by_policy(self, layout: Layout) -> Plan:
        return self._policy(Profile.unmeasured(layout, self._world_size), self.active)

    @staticmethod
    def _policy(profile: Profile, settings: Settings) -> Plan:
        return policies.get(settings.policy)(profile, settings)

    def compare(self, lane: Lane, layout: Layout) -> None:
        """Refuse buckets that are not the same on all ranks."""
        lane.agree("comparing buckets", partial(agree, lane.group, layout, self.unmeasured))

    def plan_for(self, lane: Lane, layout: Layout) -> Plan:
        """A plan for new buckets."""
        return self._agree(lane, layout, None)

    def converse(self, lane: Lane, begins: Begin, layout: Layout | None) -> Plan | None:
        """Hold the conversations that come with an iteration; the new plan, if there is one.

        Args:
            lane: with nothing on the wire.
            begins: what this rank brings.
            layout: the buckets that are planned for, if any are.
        """
        if begins.drift is not None:
            begins.agreed_drift = lane.agree(
                "comparing step times", partial(agree_on_median, lane.group, begins.drift)
            )
        plan = None if layout is None else self._plan_anew(lane, begins, layout)
        begins.answered = True
        return plan

    def _plan_anew(self, lane: Lane, begins: Begin, layout: Layout) -> Plan | None:
        profile = self.made.profile if self.made is not None else None
        if begins.measured is not None:
            profile = lane.agree(
                "agreeing on a profile",
                partial(agree_on_profile, lane.group, layout, self._world_size, begins.measured),
            )
        before = self._planned_with
        self._judge(lane, profile)
        self._try(lane, begins, profile)
        if begins.measured is None and self.active == before:
            return None
        return self._agree(lane, layout, profile)

    def _try(self, lane: Lane, begins: Begin, profile: Profile | None) -> None:
        """Begin with trials, or go on to the next one."""
        if self.trials is None:
            return
        if profile is None or not profile.measured:
            if begins.measured is not None:
                self.trials.nothing_to_go_by(lane.group.rank)
        elif begins.measured is not None:
            effective = without(self._settings, self._absent())
            self.trials.start(lane, profile, effective)
        elif begins.tried_s is not None:
            median = partial(agree_on_median, lane.group, begins.tried_s)
            self.trials.measured(lane, lane.agree("comparing step times", median))
        self.active = self._effective()

    def _absent(self) -> frozenset[str]:
        """The user's codecs that have not begun, or are refused."""
        absent = {codec for codec, start in self._starts.items() if self._step < start}
        if self.verdict is not None and not self._settings.codec_force:
            absent |= self.verdict.refused
        return frozenset(absent)

    def _effective(self) -> Settings:
        trial = None if self.trials is None else self.trials.trial
        settings = self._settings if trial is None else trial.candidate.settings
        return without(settings, self._absent())

    def _judge(self, lane: Lane, profile: Profile | None) -> None:
        """Price the codecs once all have begun, after warm-up, unless the user insists on them."""
        if not self._starts or self._settings.codec_force or self.verdict is not None:
            return
        if self._step < max(WARM_UP, *self._starts.values()):
            return
        link = profile.link if profile is not None else None
        self.verdict = lane.agree("pricing codecs", partial(self._price, lane, link))
        self.active = self._effective()
        if self.verdict.refused and lane.group.rank == 0:
            logger.warning(
                "gradients travel exactly: %s; codec_force=True uses it all the same",
                self.verdict.reason,
            )

    def _price(self, lane: Lane, link: Link | None) -> Verdict:
        link = link or probe_link(lane.group)
        prices = []
        for codec in sorted(self._starts):
            feedback = codecs.get(codec).keeps_errors(self._settings.error_feedback)
            own_s = coding_s(codec, self._world_size, feedback)
            agreed_s = agree_on_median(lane.group, own_s)
            prices.append(price(codec, agreed_s, link, self._world_size))
            logger.info("%s", prices[-1])
        refused = [one for one in prices if not one.worth_it]
        return Verdict(
            priced=frozenset(self._starts),
            world_size=self._world_size,
            refused=frozenset(one.codec for one in refused),
            reason="; ".join(map(str, refused)),
        )

    def _agree(self, lane: Lane, layout: Layout, profile: Profile | None) -> Plan:
        def make(layout: Layout) -> Plan:
            return self._policy(profile, self.active) if profile else self.unmeasured(layout)

        plan = lane.agree("agreeing on a plan", partial(agree, lane.group, layout, make))
        self.made = Made(plan, profile)
        self._planned_with = self.active
        logger.info("%s", str(plan).partition("\n")[0])
        logger.debug("%s", plan)
        return plan


def _starts(settings: Settings, named: Iterable[str]) -> dict[str, int]:
    """The steps in which the lossy ones of these codecs begin."""
    lossy = [codec for codec in map(codecs.get, named) if codec.lossy]
    own = settings.codec_start_step < 0
    return {str(c): c.start_step if own else settings.codec_start_step for c in lossy}
