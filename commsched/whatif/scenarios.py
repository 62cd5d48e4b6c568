"""Scenarios: one profile with other policies, codecs, buckets, links and ranks. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from commsched import codecs, policies
from commsched.advice import rebucketed
from commsched.errors import CommSchedError
from commsched.profile import ParamTimes, Profile
from commsched.settings import MB, Settings
from commsched.simulate import Timeline, ideal
from commsched.tuning.candidates import Candidate, predict
from commsched.whatif.alpha_beta import ALGORITHMS, at_ranks, gbps_of, per_hop_s

__all__ = [
    "BEST",
    "DDP",
    "Grid",
    "Row",
    "base_line",
    "choices",
    "recomputed",
    "rows_of",
    "serial",
]

BEST = "best"  # of the algorithms, the one with the shorter step
DDP = "ddp"
SYNCHRONOUS = ("fifo",)  # before the optimizer, all gradients are waited for: no order gains more
WHOLE_MB = 1024.0  # no bucket is cut
ONE_BYTE_MB = 1 / MB  # as credit: one task at a time


@dataclass(frozen=True)
class Grid:
    """What is asked: every candidate with every value of the others.

    Attributes:
        candidates: the ways of communicating; the base line is added.
        caps_mb: DDP's bucket_cap_mb in MB of 2**20 bytes; None: the profile's own buckets, with
            which the base line is predicted in any case.
        gbps: links in Gbit/s; None: the profile's own.
        ranks: how many; None: as many as the profile's.
        hop_s: a hop's latency in seconds; None: the profile's own.
        algorithm: one of `alpha_beta.ALGORITHMS`, or `BEST`.
        in_series: one collective at a time; see `serial`.
        coding_s: seconds to encode and decode a byte of gradients, by codec; others are free.
    """

    candidates: tuple[Candidate, ...]
    caps_mb: tuple[float | None, ...] = (None,)
    gbps: tuple[float | None, ...] = (None,)
    ranks: tuple[int | None, ...] = (None,)
    hop_s: float | None = None
    algorithm: str = "ring"
    in_series: bool = False
    coding_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One predicted step. Times in milliseconds.

    Attributes:
        candidate: its name.
        codec: what gradients travel by.
        deferred: whether optimizer steps are deferred.
        bucket_cap_mb: as in `Grid`.
        gbps: each rank's link; None: it is free.
        hop_us: a hop's latency in microseconds.
        ranks: how many.
        algorithm: which one was taken.
        step_ms: the step.
        exposed_ms: of it, the training thread's waits for communication.
        vs_ddp: the step over plain DDP's with the profile's own buckets; below 1 is faster.
        ideal_ms: what no exact schedule can beat; see `simulate.ideal`.
        compute_ms: a step without communication.
    """

    candidate: str
    codec: str
    deferred: bool
    bucket_cap_mb: float | None
    gbps: float | None
    hop_us: float
    ranks: int
    algorithm: str
    step_ms: float
    exposed_ms: float
    vs_ddp: float
    ideal_ms: float
    compute_ms: float


def base_line() -> Candidate:
    """Plain DDP: one all-reduce a bucket, all waited for in backward."""
    settings = Settings(policy="fifo", chunk_mb=WHOLE_MB, fusion_mb=0.0)
    return Candidate(DDP, settings, plain=True)


def choices(
    chosen_policies: Sequence[str] = (),
    chosen_codecs: Sequence[str] = (),
    settings: Settings | None = None,
    deferred: bool | None = None,
) -> tuple[Candidate, ...]:
    """Candidates for every policy and codec, where the combination makes sense.

    Args:
        chosen_policies: of `policies.names()`; all when empty.
        chosen_codecs: their texts; exact only when empty.
        settings: what holds for all of them besides.
        deferred: whether the optimizer is handed over; None: both. Without it, waiting ends only
            with the last gradient, so that an order by use gains nothing over fifo.
    """
    base = settings or Settings()
    found: list[Candidate] = []
    for codec in chosen_codecs or ("none",):
        for late in (False, True) if deferred is None else (deferred,):
            for policy in chosen_policies or policies.names():
                if late or policy in SYNCHRONOUS:
                    own = replace(base, policy=policy, codec=codec)
                    found += _variants(Candidate("", own, late))
    return tuple(found)


def _variants(candidate: Candidate) -> Iterator[Candidate]:
    """With its name; and, where fifo sends before the optimizer, without cutting buckets too."""
    settings = candidate.settings
    words = [settings.policy, *(["deferred"] if candidate.deferred else [])]
    codec = str(codecs.get(settings.codec))
    more = [codec] if codec != "none" else []
    yield replace(candidate, name=", ".join([*words, *more]))
    if settings.policy == "fifo" and not candidate.deferred and not settings.chunk_mb:
        whole = replace(settings, chunk_mb=WHOLE_MB)
        yield Candidate(", ".join([*words, "whole buckets", *more]), whole)


def serial(candidate: Candidate) -> Candidate:
    """The same with one collective at a time, so that each one's latency is paid in full.

    So does NCCL on one stream. Otherwise tasks in flight hide each other's latency, as on gloo,
    which has several.
    """
    settings = replace(candidate.settings, credit_mb=ONE_BYTE_MB)
    return replace(candidate, settings=settings, plain=False)


def recomputed(profile: Profile, compute_s: float) -> Profile:
    """The profile of a machine that computes a step in that time, all parts of it in proportion.

    Raises:
        CommSchedError: the profile has no computing to scale.
    """
    if profile.compute_s <= 0:
        raise CommSchedError("this profile has no computing times, which could be scaled")
    share = compute_s / profile.compute_s
    return replace(
        profile,
        ready_s=tuple(share * ready_s for ready_s in profile.ready_s),
        params=tuple(
            ParamTimes(p.name, share * p.ready_s, share * p.use_s, share * p.optimizer_s)
            for p in profile.params
        ),
        forward_s=share * profile.forward_s,
        backward_s=share * profile.backward_s,
        other_s=share * profile.other_s,
    )


def rows_of(profile: Profile, grid: Grid) -> Iterator[Row]:
    """Predict all of a grid: rank count by rank count, link by link, the base line first.

    Raises:
        CommSchedError: the profile was never measured, or is of one rank and no link is given.
    """
    if not profile.measured:
        raise CommSchedError(
            "this profile holds no measured times: save it after the job has measured some steps"
        )
    for ranks in grid.ranks:
        for gbps in grid.gbps:
            yield from _rows(profile, grid, ranks, gbps)


def _rows(profile: Profile, grid: Grid, ranks: int | None, gbps: float | None) -> Iterator[Row]:
    names = ALGORITHMS if grid.algorithm == BEST else (grid.algorithm,)
    links = {name: at_ranks(profile, ranks, gbps, grid.hop_s, name) for name in names}
    hop_s = per_hop_s(profile.link, profile.world_size) if grid.hop_s is None else grid.hop_s
    rate = gbps_of(profile.link) if gbps is None else gbps
    ddp_s = 0.0
    for cap_mb in dict.fromkeys((None, *grid.caps_mb)):
        there = {name: _capped(found, cap_mb) for name, found in links.items()}
        bound_s = min(ideal(found) for found in there.values())
        for candidate in (base_line(), *(grid.candidates if cap_mb in grid.caps_mb else ())):
            best, timeline = _best(candidate, there, grid)
            ddp_s = ddp_s or timeline.step_s
            yield Row(
                candidate=candidate.name,
                codec=candidate.codec,
                deferred=candidate.deferred,
                bucket_cap_mb=cap_mb,
                gbps=None if math.isinf(rate) else rate,
                hop_us=hop_s * 1e6,
                ranks=there[best].world_size,
                algorithm=best,
                ideal_ms=bound_s * 1e3,
                **_times(timeline, ddp_s),
            )


def _best(candidate: Candidate, there: Mapping[str, Profile], grid: Grid) -> tuple[str, Timeline]:
    """The algorithm with the shorter step, and that step."""
    own = serial(candidate) if grid.in_series else candidate
    taken = {name: predict(own, found, grid.coding_s) for name, found in there.items()}
    best = min(taken, key=lambda name: taken[name].step_s)
    return best, taken[best]


def _times(timeline: Timeline, ddp_s: float) -> dict[str, float]:
    return {
        "step_ms": timeline.step_s * 1e3,
        "exposed_ms": timeline.exposed_s * 1e3,
        "vs_ddp": timeline.step_s / ddp_s if ddp_s > 0 else 1.0,
        "compute_ms": timeline.compute_s * 1e3,
    }


def _capped(profile: Profile, cap_mb: float | None) -> Profile:
    return profile if cap_mb is None else rebucketed(profile, max(1, int(cap_mb * MB)))
