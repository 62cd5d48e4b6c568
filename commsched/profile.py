"""Profile: what a policy plans from. Measured, agreed over ranks, and then plain data.

Times are in seconds. Two clocks: a forward's time runs from its start and stands still while the
training thread waits for gradients or runs deferred optimizer steps; a backward's time runs from
the end of forward.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from commsched.layout import Layout

__all__ = ["Link", "ParamTimes", "Profile"]


@dataclass(frozen=True)
class Link:
    """The link as a line: a collective in which a rank sends ``b`` bytes takes alpha + b * beta."""

    alpha_s: float
    beta_s: float  # seconds per byte that one rank sends


@dataclass(frozen=True)
class ParamTimes:
    """One parameter's part in a step."""

    name: str
    ready_s: float  # backward's time at which its own gradient is computed
    use_s: float  # forward's time at which it is first read
    optimizer_s: float  # the optimizer's time for it


@dataclass(frozen=True)
class Profile:
    """One model on one group of ranks, as measured.

    Attributes:
        layout: the buckets.
        world_size: how many ranks.
        ready_s: for each bucket, backward's time at which DDP calls the hook for it.
        params: all parameters of the layout, bucket by bucket, in the buckets' order.
        forward_s: forward's computing, without waits and deferred steps.
        backward_s: from the end of forward to the end of backward's computing.
        other_s: the rest of a step: data loading, zero_grad, and the like.
        link: the link.
        measured: False for `unmeasured`, whose times are all zero.
    """

    layout: Layout
    world_size: int
    ready_s: tuple[float, ...]
    params: tuple[ParamTimes, ...]
    forward_s: float
    backward_s: float
    other_s: float
    link: Link
    measured: bool = True

    @classmethod
    def unmeasured(cls, layout: Layout, world_size: int) -> Profile:
        """What is known before anything was measured: the layout."""
        params = tuple(
            ParamTimes(param.name, 0.0, 0.0, 0.0)
            for bucket in layout.buckets
            for param in bucket.params
        )
        zeros = (0.0,) * len(layout.buckets)
        link = Link(0.0, 0.0)
        return cls(layout, world_size, zeros, params, 0.0, 0.0, 0.0, link, measured=False)

    @cached_property
    def optimizer_s(self) -> float:
        """The optimizer's time for all parameters."""
        return sum(param.optimizer_s for param in self.params)

    @cached_property
    def compute_s(self) -> float:
        """A step without any communication."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    def to_json(self) -> str:
        """The profile as JSON text; `from_json` reverses it exactly."""
        return json.dumps(asdict(self) | {"layout": self.layout.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        data["layout"] = Layout.from_json(data["layout"])
        data["ready_s"] = tuple(data["ready_s"])
        data["params"] = tuple(ParamTimes(**item) for item in data["params"])
        data["link"] = Link(**data["link"])
        return cls(**data)
