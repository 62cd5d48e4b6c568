"""Remedies: what a run would take if it communicated otherwise. Pure: an analysis in, rows out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from commsched import policies
from commsched.advice import advise
from commsched.profile import Link, Profile
from commsched.settings import Settings
from commsched.simulate import NO_CODING, ddp, ideal, simulate
from commsched.tuning.candidates import Candidate, candidates, plan_of, predict

if TYPE_CHECKING:
    from commsched.reporting.analysis import Analysis

__all__ = ["CODECS", "WORTH", "Alternative", "Outlook", "outlook"]

CODECS = ("bf16", "int8", "powersgd")  # that are tried on paper, the mildest first
WORTH = 0.02  # of the step time: what gains less is not offered
RATES_GBIT = (10.0, 25.0, 100.0)
FASTER = 1.5  # times the present rate
NO_PROFILE = (
    "the traces hold no profile, so what else would take cannot be predicted: hand the optimizer "
    "over (State(optimizer=...)) or set policy=auto, and trace past the first ten steps"
)
UNMEASURED = "the traces hold a profile without times: trace past the first ten steps"


@dataclass(frozen=True)
class Alternative:
    """One way to communicate, or one thing to buy.

    Attributes:
        name: what it is.
        do: what to change, in words; "" for what is in effect.
        kind: "schedule", "codec", "buckets" or "link".
        group: the best of each is offered.
        step_ms: predicted.
        gain: the share of the present step's prediction that it saves; negative: it costs.
        lossy: gradients lose bits that they do not lose at present.
        measured_ms: by the automatic mode, where it has tried this.
    """

    name: str
    do: str
    kind: str
    group: str
    step_ms: float
    gain: float
    lossy: bool = False
    measured_ms: float | None = None


@dataclass(frozen=True)
class Outlook:
    """Predictions. Times in milliseconds a step.

    Attributes:
        present_ms: of what is in effect; compare it with the measured step.
        compute_ms: without communication.
        ideal_ms: what no exact schedule beats.
        ddp_ms: plain DDP.
        rows: all that was looked at, the shortest step first.
    """

    present_ms: float
    compute_ms: float
    ideal_ms: float
    ddp_ms: float
    rows: tuple[Alternative, ...]

    @property
    def offers(self) -> tuple[Alternative, ...]:
        """What is worth doing: the best of each group, exact ones first, by gain.

        Lossy ones follow, the mildest first: they cost accuracy, which no figure here tells. So a
        harsher one must gain more than those before it. What must be bought comes last.

        What the run has tried, and found no better than what is in effect, is not.
        """
        found: dict[str, Alternative] = {}
        for row in self.rows:
            if row.do and row.gain >= WORTH and not self._refuted(row):
                # Of faster links the slowest: it is the cheapest, and a faster one adds little.
                found = {
                    **found,
                    row.group: row if row.kind == "link" else found.get(row.group, row),
                }
        kept: list[Alternative] = []
        for row in sorted(found.values(), key=_harm):
            milder = [one.gain for one in kept if one.kind == row.kind == "codec"]
            if row.gain >= max(milder, default=0.0) + WORTH:
                kept.append(row)
        return tuple(kept)

    def _refuted(self, row: Alternative) -> bool:
        now = next((one.measured_ms for one in self.rows if not one.do), None)
        if now is None or row.measured_ms is None:
            return False
        return row.measured_ms > (1.0 - WORTH) * now

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "offers": [asdict(row) for row in self.offers]}


def _harm(row: Alternative) -> tuple[int, float]:
    """What an offer costs: nothing, accuracy, money."""
    ranks = {f"codec {codec}": rank for rank, codec in enumerate(CODECS, 1)}
    return len(CODECS) + 1 if row.kind == "link" else ranks.get(row.group, 0), row.step_ms


def outlook(analysis: Analysis, coding_s: Mapping[str, float] = NO_CODING) -> Outlook | str:
    """What else would take, or why that cannot be said.

    Args:
        analysis: of the run.
        coding_s: as in `simulate`; codecs that are not in it are taken to be free.
    """
    profile = analysis.noted.profile
    if profile is None or not profile.measured:
        return NO_PROFILE if profile is None else UNMEASURED
    now = _Now(analysis, profile, coding_s)
    present_s = now.step_s(profile)
    measured = {row["name"]: row["measured_ms"] for row in (now.tuning.get("rows") or ())}

    def row(name: str, do: str, group: str, step_s: float, lossy: bool) -> Alternative:
        gain = 1.0 - step_s / present_s if present_s > 0 else 0.0
        kind = group.partition(" ")[0]
        return Alternative(name, do, kind, group, 1e3 * step_s, gain, lossy, measured.get(name))

    rows = [row(*one) for one in (*now.ways(), *now.buckets(), *now.links())]
    return Outlook(
        present_ms=1e3 * present_s,
        compute_ms=1e3 * profile.compute_s,
        ideal_ms=1e3 * ideal(profile),
        ddp_ms=1e3 * ddp(profile).step_s,
        rows=tuple(sorted(rows, key=lambda one: one.step_ms)),
    )


def settings_of(noted: Mapping[str, Any]) -> Settings:
    """The settings that a trace notes; of another version's only those that exist here."""
    known = {field.name for field in fields(Settings)}
    return Settings(**{name: value for name, value in noted.items() if name in known})


Row = tuple[str, str, str, float, bool]  # the arguments of `outlook`'s `row`


class _Now:
    """What is in effect, and what could be instead."""

    def __init__(self, analysis: Analysis, profile: Profile, coding_s: Mapping[str, float]) -> None:
        self.tuning: Mapping[str, Any] = analysis.noted.tuning or {}
        self._analysis = analysis
        self._profile = profile
        self._coding_s = coding_s
        noted = settings_of(analysis.noted.settings)
        self._settings = replace(noted, policy="priority" if analysis.deferred else "fifo")
        self._handed_over = analysis.deferred or bool(analysis.noted.handed_over)
        self._ways = list(self._candidates())
        named = {way.name: way for way in self._ways}
        self._way = named.get(analysis.choice) or self._by_plan() or self._usual()

    def _candidates(self) -> Iterator[Candidate]:
        deferred = self._analysis.deferred
        yield from candidates(self._profile, self._settings, deferrable=True)
        more = candidates(
            self._profile,
            self._settings,
            deferrable=deferred,
            allow=CODECS,
            coding_s=self._coding_s,
        )
        yield from (one for one in more if one.lossy and self._settings.codec == "none")

    def _by_plan(self) -> Candidate | None:
        """The way that makes the plan in effect."""
        plan, deferred = self._analysis.noted.plan, self._analysis.deferred
        if plan is None or plan.layout != self._profile.layout:
            return None
        ways = (way for way in self._ways if way.deferred is deferred and not way.plain)
        return next((way for way in ways if plan_of(way, self._profile) == plan), None)

    def _usual(self) -> Candidate:
        plan = self._analysis.noted.plan
        policy = plan.policy if plan is not None else self._settings.policy
        policy = policy if policy in policies.names() else self._settings.policy
        deferred = self._analysis.deferred
        return Candidate("as now", replace(self._settings, policy=policy), deferred)

    def step_s(self, profile: Profile) -> float:
        """The step of what is in effect, with the profile as it is or on another link."""
        plan = self._analysis.noted.plan
        if self._way.name == "as now" and plan is not None and plan.layout == profile.layout:
            return simulate(plan, profile, self._way.deferred, self._coding_s).step_s
        return predict(self._way, profile, self._coding_s).step_s

    def ways(self) -> Iterator[Row]:
        """Schedules and codecs."""
        for way in self._ways:
            step_s = predict(way, self._profile, self._coding_s).step_s
            do = "" if way == self._way else self._do(way)
            yield way.name, do, self._group(way), step_s, way.codec not in ("none", self._way.codec)

    def _group(self, way: Candidate) -> str:
        if way.lossy and self._settings.codec == "none":
            return f"codec {way.codec}"
        return "schedule deferred" if way.deferred else "schedule synchronous"

    def _do(self, way: Candidate) -> str:
        if way.lossy and self._settings.codec == "none":
            codec = way.codec
            if way.settings.codec == "none":
                return f"COMMSCHED_ALLOW={codec} with policy=auto: compresses what is exposed"
            return f"COMMSCHED_CODEC={codec}"
        if way.plain:
            return "COMMSCHED_ENABLED=0"
        changes = f"COMMSCHED_POLICY={way.settings.policy}"
        if way.settings.chunk_mb != self._settings.chunk_mb:
            changes += f" COMMSCHED_CHUNK_MB={way.settings.chunk_mb:g}"
        if way.deferred and not self._handed_over:
            return "hand the optimizer over: State(optimizer=optimizer)"  # auto finds the rest
        return changes

    def buckets(self) -> Iterator[Row]:
        """Another `bucket_cap_mb`."""
        settings = self._way.settings
        advice = advise(self._profile, settings, policies.get(settings.policy), self._way.deferred)
        do = f"DistributedDataParallel(..., bucket_cap_mb={advice.best_cap_mb})"
        name = f"bucket_cap_mb={advice.best_cap_mb}"
        step_s = self.step_s(self._profile) * (1.0 - advice.gain)
        yield name, do, "buckets", step_s, False

    def links(self) -> Iterator[Row]:
        """Faster links."""
        link = self._profile.link
        present = 8e-9 / link.beta_s if link.beta_s > 0 else float("inf")
        for rate in reversed(RATES_GBIT):  # of equal steps the cheapest comes last
            if rate >= FASTER * present:
                faster = replace(self._profile, link=Link(link.alpha_s, 8e-9 / rate))
                name = f"a link of {rate:g} Gbit/s instead of {present:.3g}"
                yield name, name, "link", self.step_s(faster), False
