"""The report as one self-contained HTML page: no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commsched.layout import first_names
from commsched.reporting.drawing import draw
from commsched.reporting.findings import causes, headline, ms, offers
from commsched.reporting.terminal import about
from commsched.version import __version__

if TYPE_CHECKING:
    from commsched.reporting.analysis import Analysis
    from commsched.reporting.remedies import Outlook
    from commsched.reporting.traced import TracedStep

__all__ = ["page"]

LAYERS = 24  # bars; the others are one more
SEEN_MS = 0.05  # less is shown as 0.0
RANKS = 4  # timelines


def page(analysis: Analysis, foreseen: Outlook | str) -> str:
    """The page.

    Args:
        analysis: of the run.
        foreseen: the alternatives, or why they cannot be predicted.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("commsched.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ms": ms, "first_names": first_names}
    template = environment.get_template("report.html.jinja")
    shown = _shown(analysis)
    values: dict[str, Any] = {
        "version": __version__,
        "headline": headline(analysis),
        "about": list(about(analysis)),
        "analysis": analysis,
        "causes": list(causes(analysis)),
        "offers": offers(analysis, foreseen),
        "picture": draw(shown),
        "step": shown[0].number,
        "others": len(analysis.typical) - len(shown),
        "layers": _bars(analysis),
        "unforeseen": foreseen if isinstance(foreseen, str) else None,
        "foreseen": None if isinstance(foreseen, str) else foreseen,
    }
    return template.render(values)


def _shown(analysis: Analysis) -> Sequence[TracedStep]:
    """The ranks whose timelines are drawn: the first, the late one, those that wait most, least."""
    steps = {step.rank: step for step in analysis.typical}
    by_wait = sorted(steps, key=lambda rank: -steps[rank].exposed_s)
    late = [] if analysis.straggler is None else [analysis.straggler.rank]
    wanted = dict.fromkeys([min(steps), *late, by_wait[0], by_wait[-1], *sorted(steps)])
    return [steps[rank] for rank in sorted([*wanted][:RANKS])]


def _bars(analysis: Analysis) -> list[tuple[str, float, float]]:
    """Name, milliseconds, and the share of the longest bar."""
    rows = [row for row in analysis.layers or analysis.tensors if row.exposed_ms >= SEEN_MS]
    bars = [(row.name, row.exposed_ms) for row in rows[:LAYERS]]
    rest = rows[LAYERS:]
    if rest:
        bars.append((f"{len(rest)} more", sum(row.exposed_ms for row in rest)))
    longest = max((value for _, value in bars), default=1.0)
    return [(name, value, value / longest) for name, value in bars]
