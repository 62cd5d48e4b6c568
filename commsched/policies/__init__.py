"""Policies: pure functions (profile, settings) -> plan, one file each.

The registry holds names only until a policy is asked for: settings are checked against the names,
and the policies themselves import settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from commsched.plan import Plan
    from commsched.profile import Profile
    from commsched.settings import Settings

__all__ = ["AUTO", "VARIABLE", "Policy", "get", "names"]


class Policy(Protocol):
    """What a policy is. Equal arguments must give equal plans: every rank calls it for itself."""

    def __call__(self, profile: Profile, settings: Settings) -> Plan:
        """The plan of one iteration over `profile.layout`."""
        ...


AUTO = "auto"
VARIABLE = "COMMSCHED_POLICY"
_POLICIES = {
    "fifo": "commsched.policies.fifo:fifo",
    "priority": "commsched.policies.priority:priority",
    "rs_ag": "commsched.policies.rs_ag:rs_ag",
}


def names() -> tuple[str, ...]:
    """The registered policies."""
    return tuple(_POLICIES)


def get(name: str) -> Policy:
    """The policy of that name (one of `names`); for `AUTO` the one that needs no optimizer."""
    if name == AUTO:
        name = "fifo"
    module, _, function = _POLICIES[name].partition(":")
    return cast(Policy, getattr(import_module(module), function))
