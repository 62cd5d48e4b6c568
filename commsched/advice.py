"""Advice on DDP's buckets: the step time with another `bucket_cap_mb`. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.policies import Policy
from commsched.profile import ParamTimes, Profile
from commsched.settings import MB, Settings
from commsched.simulate import simulate

__all__ = ["CAPS_MB", "Advice", "advise", "rebucketed"]

CAPS_MB = (1, 2, 4, 8, 16, 25, 50)
HOOK_S = 1e-4  # what one more bucket costs the training thread: autograd, the hook, the future
WORTH = 0.02  # of the step time, and
WORTH_S = 2e-3  # a step: below that a change is not worth a line in a log


@dataclass(frozen=True)
class Advice:
    """The predicted step with the present buckets, and with the best of `CAPS_MB`."""

    present_s: float
    best_s: float
    best_cap_mb: int

    @property
    def gain(self) -> float:
        """The share of the step time that the best cap is predicted to save."""
        return 1.0 - self.best_s / self.present_s if self.present_s > 0 else 0.0

    @property
    def worth_it(self) -> bool:
        """Whether anybody would notice the gain."""
        return self.gain >= WORTH and self.present_s - self.best_s >= WORTH_S

    def __str__(self) -> str:
        if not self.worth_it:
            return f"DDP's buckets are fine: nothing to change (step {self.present_s * 1e3:.0f} ms)"
        return (
            f"DDP's bucket_cap_mb={self.best_cap_mb} is predicted to save {self.gain:.0%} of the "
            f"step time ({self.present_s * 1e3:.0f} to {self.best_s * 1e3:.0f} ms)"
        )


def advise(profile: Profile, settings: Settings, policy: Policy, deferred: bool = True) -> Advice:
    """Predict the step for each of `CAPS_MB`, planned by the same policy with the same settings.

    Args:
        profile: as measured with the present buckets.
        settings: as the policy needs them.
        policy: plans each hypothetical layout.
        deferred: whether the optimizer is handed over, as in `simulate`.
    """

    def step_s(guess: Profile) -> float:
        return simulate(policy(guess, settings), guess, deferred).step_s

    present_s = step_s(profile)
    # Equal predictions: the larger cap, which costs fewer hook calls.
    best_s, cap_mb = min((step_s(rebucketed(profile, cap * MB)), -cap) for cap in CAPS_MB)
    return Advice(present_s, best_s, -cap_mb)


def rebucketed(profile: Profile, cap_bytes: int) -> Profile:
    """The profile as it would be measured with an explicit `bucket_cap_mb` of that size.

    DDP fills buckets in the order in which gradients become ready, one open bucket a dtype, and
    closes one as soon as it holds `cap_bytes`; sparse gradients travel alone (torch's
    `compute_bucket_assignment_by_size`). DDP calls the hook in bucket order, once all of a
    bucket's gradients are ready.
    """
    times = {param.name: param for param in profile.params}
    buckets = list(_buckets(profile, times, cap_bytes))
    present_s = sorted(profile.ready_s)
    ready_s: list[float] = []
    for index, spec in enumerate(buckets):
        own_s = max((times[param.name].ready_s for param in spec.params), default=0.0)
        before_s = HOOK_S * bisect_right(present_s, own_s)  # in `own_s` already
        ready_s.append(max([*ready_s[-1:], own_s + HOOK_S * (index + 1) - before_s, 0.0]))
    more_s = HOOK_S * (len(buckets) - len(profile.layout.buckets))
    return replace(
        profile,
        layout=Layout(tuple(buckets)),
        ready_s=tuple(ready_s),
        params=tuple(times[param.name] for spec in buckets for param in spec.params),
        backward_s=max([profile.backward_s + more_s, *ready_s]),
    )


def _buckets(
    profile: Profile, times: dict[str, ParamTimes], cap_bytes: int
) -> Iterator[BucketSpec]:
    rows = [(param, spec) for spec in profile.layout.buckets for param in spec.params]
    rows.sort(key=lambda row: times[row[0].name].ready_s)
    filling: dict[str, list[ParamSpec]] = {}
    for param, spec in rows:
        if spec.sparse:
            yield replace(spec, params=(param,))
            continue
        bucket = filling.setdefault(spec.dtype, [])
        bucket.append(param)
        if sum(other.numel for other in bucket) * spec.itemsize >= cap_bytes:
            yield BucketSpec(tuple(filling.pop(spec.dtype)), spec.dtype)
    for dtype, params in filling.items():
        yield BucketSpec(tuple(params), dtype)
