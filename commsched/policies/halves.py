"""halves: an order for chunks of two tasks, the second of which must wait for the first."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush

from commsched.plan import Plan, Task
from commsched.policies.units import Sizes, Unit, margin, next_event, sizes_for, units
from commsched.profile import Profile
from commsched.settings import Settings
from commsched.simulate import link_seconds

__all__ = ["in_halves"]

SPLIT_DTYPES = frozenset({"float32", "float64", "float16", "bfloat16"})


def in_halves(name: str, profile: Profile, settings: Settings, split_exact: bool) -> Plan:
    """The plan that `rs_ag` describes.

    Args:
        name: of the policy.
        profile: measured.
        settings: for sizes and codecs.
        split_exact: whether exact chunks are split too, or only those whose codec takes two tasks.
    """
    sizes = sizes_for(profile, settings, halves=True)
    found = units(profile, settings, sizes)
    if split_exact:
        found = [_split(unit) for unit in found]
    by_event: dict[int, list[Unit]] = defaultdict(list)
    for unit in found:
        by_event[unit.event].append(unit)
    order = _Order(profile, _ahead_s(profile, found, sizes))
    margin_s = margin(found)
    for event, ready_s in enumerate(profile.ready_s):
        order.busy_s = max(order.busy_s, ready_s)
        for unit in sorted(by_event[event], key=lambda unit: unit.use_s):
            order.scatter(unit)
        order.gather(next_event(profile, event) + margin_s)
    return Plan(name, profile.layout, tuple(order.tasks), sizes.credit_bytes)


class _Order:
    """The tasks so far, and until when they keep the link busy."""

    def __init__(self, profile: Profile, ahead_s: float) -> None:
        self.tasks: list[Task] = []
        self.busy_s = 0.0
        self._profile = profile
        self._scattered: deque[tuple[float, Unit]] = deque()  # end of its reduce-scatter
        self._ready: list[tuple[float, int, Unit]] = []  # use, place: smallest first
        self._ahead_s = ahead_s

    def scatter(self, unit: Unit) -> None:
        """Append a chunk's first task."""
        self._append(unit.tasks[0])
        if len(unit.tasks) > 1:
            self._scattered.append((self.busy_s, unit))

    def gather(self, until_s: float) -> None:
        """Append all-gathers that keep the link busy until then."""
        while self.busy_s < until_s:
            self._admit(self.busy_s - self._ahead_s)
            if not self._ready and self._scattered:
                # The link must wait until this one may go, as it has nothing else to send.
                self._admit(self._scattered[0][0])
                self.busy_s += self._profile.link.alpha_s
            if not self._ready:
                return
            self._append(heappop(self._ready)[2].tasks[1])

    def _admit(self, done_s: float) -> None:
        while self._scattered and self._scattered[0][0] <= done_s:
            unit = self._scattered.popleft()[1]
            heappush(self._ready, (unit.use_s, unit.index, unit))

    def _append(self, task: Task) -> None:
        self.tasks.append(replace(task, index=len(self.tasks)))
        self.busy_s += link_seconds(task, self._profile)


def _ahead_s(profile: Profile, found: Iterable[Unit], sizes: Sizes) -> float:
    """How much of what was issued before is still to be sent when credit lets a task go."""
    share = (profile.world_size - 1) / profile.world_size
    largest = max((unit.tasks[0].wire_bytes for unit in found), default=0)
    ahead_bytes = max(0, sizes.credit_bytes - largest)
    return ahead_bytes * share * profile.link.beta_s + profile.link.alpha_s


def _split(unit: Unit) -> Unit:
    (task, *more), chunk = unit.tasks, unit.tasks[0].chunk
    if more or task.codec != "none" or chunk.sparse or chunk.dtype not in SPLIT_DTYPES:
        return unit
    halves = replace(task, op="reduce_scatter"), replace(task, op="all_gather", round=1)
    return replace(unit, tasks=halves, wire_s=unit.wire_s / 2)
