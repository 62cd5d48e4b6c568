"""Candidates: the ways of communicating that may be chosen, and what each is predicted to take.

Pure functions: the automatic mode, the report's advice and ``commsched simulate`` all ask here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from commsched import codecs, policies
from commsched.plan import Plan
from commsched.policies.units import sizes_for
from commsched.profile import Profile
from commsched.rules import literal, travels_by, used
from commsched.settings import MB, Settings
from commsched.simulate import NO_CODING, Timeline, ddp, simulate

__all__ = ["Candidate", "candidates", "plan_of", "predict"]

DEFER_S = 1e-5  # what deferring costs the training thread for each parameter
HIDDEN = 0.01  # of the step time: so much more exposed communication is as good as none
WHOLE_MB = 1024.0  # no bucket is cut


@dataclass(frozen=True)
class Candidate:
    """One way of communicating.

    Attributes:
        name: what people call it, unique among candidates of one search.
        settings: the effective settings.
        deferred: whether optimizer steps are deferred into the next forward.
        plain: torch's own all-reduce of each bucket, in DDP's order: we only look on.
    """

    name: str
    settings: Settings
    deferred: bool = False
    plain: bool = False

    @property
    def codec(self) -> str:
        """The codecs it uses, in words."""
        lossy = [codec for codec in used(self.settings) if codecs.get(codec).lossy]
        return ", ".join(lossy) or "none"

    @property
    def lossy(self) -> bool:
        """Whether gradients lose bits."""
        return self.codec != "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Candidate:
        """What `to_dict` gave."""
        return cls(**{**saved, "settings": Settings(**saved["settings"])})


def plan_of(candidate: Candidate, profile: Profile) -> Plan:
    """What every rank issues."""
    return policies.get(candidate.settings.policy)(profile, candidate.settings)


def predict(
    candidate: Candidate, profile: Profile, coding_s: Mapping[str, float] = NO_CODING
) -> Timeline:
    """One step of it.

    Args:
        candidate: the way.
        profile: measured.
        coding_s: seconds for a byte of gradients, by codec; as in `simulate`.
    """
    if candidate.plain:
        return ddp(profile)
    timeline = simulate(plan_of(candidate, profile), profile, candidate.deferred, coding_s)
    if not candidate.deferred:
        return timeline
    cost_s = DEFER_S * len(profile.params)
    return replace(timeline, compute_s=timeline.compute_s + cost_s)


def candidates(
    profile: Profile,
    settings: Settings,
    *,
    fixed: frozenset[str] = frozenset(),
    deferrable: bool,
    allow: Sequence[str] = (),
    coding_s: Mapping[str, float] = NO_CODING,
) -> list[Candidate]:
    """All that may be chosen, in no order of merit. The first is plain DDP, where it is one.

    Args:
        profile: measured.
        settings: what holds for all of them: also a codec that the user has set.
        fixed: names of settings that the user has set, which are left as they are.
        deferrable: whether the optimizer is handed over.
        allow: lossy codecs that may be chosen where none is set.
        coding_s: as in `predict`, for how much must be compressed.
    """
    chosen = Candidate("", settings).lossy  # by the user, whose codec is not taken away
    found = [] if chosen else [_plain(settings)]
    found += _sized("fifo", profile, settings, fixed, deferred=False)
    if deferrable:
        for policy in ("fifo", "priority", "rs_ag"):
            found += _sized(policy, profile, settings, fixed, deferred=True)
    if not {"codec", "codec_rules"} & fixed:
        base = Candidate("", replace(settings, policy="priority" if deferrable else "fifo"))
        for codec in allow:
            found += _compressing(replace(base, deferred=deferrable), codec, profile, coding_s)
    return found


def _plain(settings: Settings) -> Candidate:
    return Candidate(
        "ddp", replace(settings, policy="fifo", codec="none", codec_rules=""), plain=True
    )


def _sized(
    policy: str, profile: Profile, settings: Settings, fixed: frozenset[str], deferred: bool
) -> Iterator[Candidate]:
    """A policy with its own chunk size, and with another one."""
    own = replace(settings, policy=policy)
    name = f"{policy}, deferred" if deferred else policy
    yield Candidate(name, own, deferred)
    if "chunk_mb" in fixed or (policy == "fifo" and deferred):
        return
    if policy == "fifo":
        whole = replace(own, chunk_mb=WHOLE_MB)
        yield Candidate(f"{name}, whole buckets", whole, deferred)
    elif policy == "priority":
        larger_mb = 2 * sizes_for(profile, own).chunk_bytes / MB
        larger = replace(own, chunk_mb=larger_mb)
        yield Candidate(f"{name}, chunk_mb={larger_mb:g}", larger, deferred)


def _compressing(
    base: Candidate, codec: str, profile: Profile, coding_s: Mapping[str, float]
) -> Iterator[Candidate]:
    """As few large gradients compressed as hide as much communication as all of them would."""
    name = f"{base.settings.policy}, deferred" if base.deferred else base.settings.policy
    full = replace(base, name=f"{name}, {codec}", settings=replace(base.settings, codec=codec))
    late = _eligible(full.settings, profile)
    if not late:
        return
    limit = predict(full, profile, coding_s)
    limit_s = limit.exposed_s + HIDDEN * limit.step_s

    def first(count: int) -> Candidate:
        rules = ";".join(
            [base.settings.codec_rules, *(f"{literal(p)}={codec}" for p in late[:count])]
        )
        part = replace(base.settings, codec_rules=rules.strip(";"))
        return replace(base, name=f"{name}, {codec} for {count} of {len(late)}", settings=part)

    low, high = 0, len(late)
    while low < high:
        middle = (low + high) // 2
        if predict(first(middle), profile, coding_s).exposed_s <= limit_s:
            high = middle
        else:
            low = middle + 1
    if low:  # else it hides nothing that is not hidden without it
        yield first(low) if low < len(late) else full


def _eligible(settings: Settings, profile: Profile) -> list[str]:
    """The parameters that would travel by the codec, those first whose gradients come last.

    What comes last has the least time to travel until it is needed, and is needed first.
    """
    codec = str(codecs.get(settings.codec))
    rows = []
    for index, spec in enumerate(profile.layout.buckets):
        for param in spec.params:
            plain_name = not {";", "="} & set(param.name)
            if plain_name and param.numel and travels_by(spec, param, settings) == codec:
                rows.append((index, param.name))
    return [name for _, name in sorted(rows, key=lambda row: -row[0])]
