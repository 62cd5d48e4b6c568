"""``commsched probe``: how fast the link between the ranks is, and what to set for it."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from commsched.errors import CommSchedError

if TYPE_CHECKING:
    from commsched.linkprobe.run import Probed

__all__ = ["command"]

HOW = "torchrun --nproc-per-node 2 -m commsched probe"


@click.command()
@click.option("--quick", is_flag=True, help="Fewer sizes, and a third of the time.")
@click.option(
    "--seconds",
    type=click.FloatRange(1.0, 3600.0),
    help="How long to measure; what does not fit is skipped.  [default: 16; --quick: 5]",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write everything that was measured to this file.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the points and the lines: an .svg, .png or .pdf file.",
)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    help="Whose collectives.  [default: nccl where there are GPUs, else gloo]",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(1.0, 3600.0),
    default=30.0,
    show_default=True,
    help="The longest that another rank is waited for.",
)
def command(
    quick: bool,
    seconds: float | None,
    json_path: Path | None,
    picture: Path | None,
    backend: str | None,
    timeout_s: float,
) -> None:
    """Measure the link between the ranks of a job, and suggest settings for it.

    Run it on the machines, and in the way, you train, as in
    torchrun --nproc-per-node 2 -m commsched probe

    The first rank prints latency and bandwidth of every collective, alone and several at once, a
    line fitted to them with its error, and values for chunk_mb and credit_mb.
    """
    _check_ranks()
    _check_picture(picture)
    from commsched.linkprobe.run import run

    try:
        probed = run(seconds or (5.0 if quick else 16.0), quick, backend, timeout_s)
        if probed.rank == 0:
            _write(probed, json_path, picture)
    except (CommSchedError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _check_ranks() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise click.ClickException(
            f"{', '.join(missing)} not set: a link has two ends, so start it on all ranks: {HOW}"
        )
    if os.environ["WORLD_SIZE"] == "1":
        raise click.ClickException(f"one rank alone has no link: start two or more: {HOW}")


def _check_picture(picture: Path | None) -> None:
    """Say now what would otherwise fail at the end."""
    if picture is None:
        return
    if picture.suffix not in (".svg", ".png", ".pdf"):
        raise click.ClickException(f"--picture {picture}: the name must end in .svg, .png or .pdf")
    if find_spec("matplotlib") is None:
        raise click.ClickException("--picture needs matplotlib: pip install 'commsched[plots]'")


def _write(probed: Probed, json_path: Path | None, picture: Path | None) -> None:
    from commsched.linkprobe import terminal
    from commsched.linkprobe.suggestions import advise, compared

    advice = advise(probed.found, probed.world_size)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=100, highlight=False)
    console.print(f"{probed.title}, measured in {probed.seconds:.1f} s")
    for table in terminal.tables(probed.found):
        console.print(table)
    for line in terminal.skipped(probed.found):
        console.print(line)
    console.print("\nSuggested, for gradients that travel as they are:")
    for reason in advice.reasons:
        console.print(f"- {reason}.")
    if probed.short is not None:
        console.print(compared(advice, probed.short, probed.world_size))
    else:
        console.print("commsched itself does not schedule gradients on GPUs yet.")
    click.echo("\n" + "\n".join(advice.environment()))
    if json_path is not None:
        document = terminal.as_json(probed, advice)
        json_path.write_text(json.dumps(document, indent=1) + "\n")
    if picture is not None:
        terminal.draw(probed.found, picture, probed.title)
