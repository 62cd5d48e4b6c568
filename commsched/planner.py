"""The planner: makes plans, before and after anything is measured, and has the ranks agree."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from commsched import policies
from commsched.lane import Lane
from commsched.layout import Layout
from commsched.plan import Plan, agree
from commsched.probe import agree_on_median, agree_on_profile
from commsched.profile import Profile
from commsched.settings import Settings

__all__ = ["Begin", "Made", "Planner"]

logger = logging.getLogger("commsched")


@dataclass
class Begin:
    """What a rank brings to a new iteration. All ranks bring the same kinds of things.

    Attributes:
        measured: its `Recorder.summary()`: plan anew, from the ranks' medians.
        drift: the length of its steps over the predicted one.
        agreed_drift: the answer: the ranks' median.
    """

    measured: dict[str, Any] | None = None
    drift: float | None = None
    agreed_drift: float | None = None


@dataclass(frozen=True)
class Made:
    """A plan, and the profile it was made from once one is measured."""

    plan: Plan
    profile: Profile | None


class Planner:
    """Makes the plans of one model.

    Its conversations are tasks of the lane: all ranks hold them at the same place of its order.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.made: Made | None = None  # the present plan; replaced as a whole, read by others
        self._settings = settings
        self._world_size = world_size
        self._policy = policies.get(settings.policy)

    def unmeasured(self, layout: Layout) -> Plan:
        """This rank's plan before anything is measured."""
        return self._policy(Profile.unmeasured(layout, self._world_size), self._settings)

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
        if begins.measured is None or layout is None:
            return None
        profile = lane.agree(
            "agreeing on a profile",
            partial(agree_on_profile, lane.group, layout, self._world_size, begins.measured),
        )
        return self._agree(lane, layout, profile)

    def _agree(self, lane: Lane, layout: Layout, profile: Profile | None) -> Plan:
        def make(layout: Layout) -> Plan:
            return self._policy(profile, self._settings) if profile else self.unmeasured(layout)

        plan = lane.agree("agreeing on a plan", partial(agree, lane.group, layout, make))
        self.made = Made(plan, profile)
        logger.info("%s", str(plan).partition("\n")[0])
        logger.debug("%s", plan)
        return plan
