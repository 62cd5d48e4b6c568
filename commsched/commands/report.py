"""``commsched report TRACE...``: what communication costs a step, why, and what would help."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commsched.errors import CommSchedError

if TYPE_CHECKING:
    from commsched.reporting.analysis import Analysis
    from commsched.reporting.remedies import Outlook

__all__ = ["command"]

TIMING_S = 0.2  # of each codec


@click.command()
@click.argument("traces", nargs=-1, required=True, metavar="TRACE...")
@click.option("--json", "as_json", is_flag=True, help="All figures as JSON, on standard output.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write one self-contained page: the timeline, exposed time by layer, alternatives.",
)
def command(traces: tuple[str, ...], as_json: bool, html: Path | None) -> None:
    """Say how much time training loses to communication, why, and what would help.

    TRACE: the files that COMMSCHED_TRACE=folder makes a run write, one a rank, or that folder.
    """
    from commsched.reporting.analysis import analyse
    from commsched.reporting.remedies import outlook
    from commsched.tracing.file import read_all

    try:
        analysis = analyse(read_all(traces))
        foreseen = outlook(analysis, _coding_s(analysis))
    except CommSchedError as error:
        raise click.ClickException(str(error)) from None
    if html is not None:
        _write(html, analysis, foreseen)
    if as_json:
        click.echo(json.dumps(_values(analysis, foreseen), indent=2))
    else:
        from commsched.reporting.terminal import show

        show(analysis, foreseen)
        if html is not None:
            click.echo(f"page: {html}")


def _coding_s(analysis: Analysis) -> Mapping[str, float]:
    """What coding takes on this machine: without it codecs look free."""
    from commsched.reporting.remedies import CODECS

    profile = analysis.noted.profile
    if profile is None:
        return {}
    return {codec: _timed(codec, profile.world_size) for codec in CODECS}


def _timed(codec: str, world_size: int) -> float:
    """Seconds a byte: the least of several times, since what else runs here can only add to it."""
    from commsched.pricing import coding_s

    timed = coding_s.__wrapped__  # it keeps its first answer
    until_s = time.monotonic() + TIMING_S
    least_s: float = timed(codec, world_size, True)
    while time.monotonic() < until_s:
        least_s = min(least_s, timed(codec, world_size, True))
    return least_s


def _values(analysis: Analysis, foreseen: Outlook | str) -> dict[str, object]:
    from commsched.reporting.findings import causes, headline, offers

    return {
        "headline": headline(analysis),
        "why": list(causes(analysis)),
        "do": offers(analysis, foreseen),
        **analysis.to_dict(),
        "predicted": foreseen if isinstance(foreseen, str) else foreseen.to_dict(),
    }


def _write(path: Path, analysis: Analysis, foreseen: Outlook | str) -> None:
    from commsched.reporting.page import page

    try:
        path.write_text(page(analysis, foreseen), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None
