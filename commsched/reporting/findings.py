"""Findings: an analysis in sentences that an engineer can act on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from commsched.reporting.remedies import WORTH, Alternative, Outlook

if TYPE_CHECKING:
    from commsched.reporting.analysis import Analysis
    from commsched.reporting.costs import BucketFigures

__all__ = ["basis", "causes", "headline", "ms", "offers"]

HIDDEN = 0.02  # of the step time: less exposed communication is none
FULL = 0.9  # of the step: a link that is busy for so long carries no more
MOST = 0.5  # of the exposed time: a cause that stands for so much of it
MUCH = 0.25


def ms(value: float | None) -> str:
    """Milliseconds for people; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def headline(analysis: Analysis) -> str:
    """What is lost, and the main reason."""
    share = analysis.exposed_ms / analysis.step_ms
    if share < HIDDEN:
        return (
            f"Communication is hidden: {ms(analysis.exposed_ms)} ms of {ms(analysis.step_ms)} ms "
            f"a step ({share:.1%})"
        )
    because = next(causes(analysis))
    return (
        f"You lose {ms(analysis.exposed_ms)} ms of {ms(analysis.step_ms)} ms a step ({share:.0%}) "
        f"to communication, because {because}"
    )


def causes(analysis: Analysis) -> Iterator[str]:
    """Why the training threads stand still, the main reason first. At least one."""
    late = analysis.straggler
    exposed_ms = analysis.exposed_ms or 1e-9
    found: list[tuple[float, str]] = []
    if late is not None:
        text = (
            f"rank {late.rank} is late: {late.cause}; each other rank stands still "
            f"{ms(1e3 * late.cost_s)} ms a step for it"
        )
        found.append((1e3 * late.cost_s / exposed_ms, text))
    idle_ms = sum(rank.idle_ms for rank in analysis.ranks) / len(analysis.ranks)
    if idle_ms > MUCH * exposed_ms:
        found.append((idle_ms / exposed_ms, _idle(analysis, idle_ms)))
    found = [row for row in sorted(found, key=lambda row: -row[0]) if row[0] > MUCH]
    link = _link(analysis)
    if found and found[0][0] > MOST:
        yield found.pop(0)[1]
    yield link
    yield from (text for _, text in found)


def _idle(analysis: Analysis, idle_ms: float) -> str:
    engine_ms = max(rank.engine_ms for rank in analysis.ranks)
    return (
        f"for {ms(idle_ms)} ms a step training waits while nothing is on the wire (encoding and "
        f"decoding take {ms(engine_ms)} ms on the engine's thread)"
    )


def _link(analysis: Analysis) -> str:
    """How the link explains the waits."""
    busy = analysis.busy
    if busy >= FULL:
        return (
            f"the link is busy {busy:.0%} of the step: it carries no more, so only fewer bytes or "
            "a faster link help"
        )
    if (sending_ms := _sending_ms(analysis)) > _compute_ms(analysis):
        return (
            f"sending takes about {ms(sending_ms)} ms, more than the "
            f"{ms(_compute_ms(analysis))} ms that a step computes: no order hides all of it, only "
            f"fewer bytes or a faster link would; the link is busy {busy:.0%} of the step"
        )
    last = _last(analysis)
    if last is not None and last.exposed_ms > MOST * analysis.exposed_ms:
        return (
            f"the last bucket ({last.nbytes / 1e6:.1f} MB) is ready only when backward ends, with "
            f"too little left to hide it behind; the link is busy {busy:.0%} of the step"
        )
    after_ms = sum(rank.after_last_ms for rank in analysis.ranks) / len(analysis.ranks)
    if after_ms > MOST * analysis.exposed_ms and not analysis.deferred:
        return (
            "gradients still travel when backward has ended, and training waits for them before "
            f"it goes on; the link is busy {busy:.0%} of the step"
        )
    if analysis.deferred:
        return (
            "forward needs gradients that are still on their way, though they travel in the order "
            f"of need; the link is busy {busy:.0%} of the step"
        )
    return f"the link is busy {busy:.0%} of the step"


def _sending_ms(analysis: Analysis) -> float:
    """What a rank's bytes take at the link's measured rate; 0 where that is not known."""
    profile = analysis.noted.profile
    if profile is None or not profile.measured:
        return 0.0
    sent_bytes = 1e6 * max(rank.sent_mb for rank in analysis.ranks)
    return 1e3 * profile.link.beta_s * sent_bytes


def _compute_ms(analysis: Analysis) -> float:
    return sum(rank.compute_ms for rank in analysis.ranks) / len(analysis.ranks)


def _last(analysis: Analysis) -> BucketFigures | None:
    come = [bucket for bucket in analysis.buckets if bucket.ready_ms is not None]
    return max(come, key=lambda row: row.ready_ms or 0.0) if len(come) > 1 else None


def offers(analysis: Analysis, outlook: Outlook | str) -> list[str]:
    """What to do, what keeps the result first; or that nothing is, or why one cannot say."""
    late = analysis.straggler
    found = []
    if late is not None:
        found.append(
            f"look at rank {late.rank}: {late.cause}; up to {ms(1e3 * late.cost_s)} ms a step"
        )
    if isinstance(outlook, str):
        return [*found, outlook]
    found += [_offer(row, outlook) for row in outlook.offers]
    if not found:
        hidden = analysis.exposed_ms < HIDDEN * analysis.step_ms
        return [
            "communication is hidden: nothing to gain"
            if hidden
            else "nothing that was looked at is predicted to gain "
            f"{WORTH:.0%} or more: this is as good as it gets here"
        ]
    return [*found, basis(analysis, outlook)]


def basis(analysis: Analysis, outlook: Outlook) -> str:
    """What predictions rest on, and how far no exact schedule goes."""
    return (
        f"(predicted from the profile measured in this run, in which the present way would take "
        f"{ms(outlook.present_ms)} ms a step and took {ms(analysis.step_ms)}; no exact schedule "
        f"takes less than {ms(outlook.ideal_ms)})"
    )


def _offer(row: Alternative, outlook: Outlook) -> str:
    marks = ["changes gradients: see docs/codecs.md"] if row.lossy else []
    marks.append(f"predicted {ms(row.step_ms)} ms a step instead of {ms(outlook.present_ms)}")
    if row.measured_ms is not None:
        marks.append(f"tried: {ms(row.measured_ms)} ms")
    return f"{row.do} ({'; '.join(marks)}: {-row.gain:.0%})"
