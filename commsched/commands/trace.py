"""``commsched trace merge``: all ranks' traces in one file."""

from __future__ import annotations

from pathlib import Path

import click

from commsched.errors import CommSchedError
from commsched.tracing.file import merged, read_all

__all__ = ["command"]


@click.group()
def command() -> None:
    """Work on the traces that COMMSCHED_TRACE=folder makes a job write."""


@command.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    default="merged.json",
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write; an existing one is replaced.",
)
def merge(paths: tuple[Path, ...], output: Path) -> None:
    """Put all ranks' traces, files or folders, on one clock and into one file.

    Open it in https://ui.perfetto.dev, or in chrome://tracing.
    """
    try:
        traces = read_all(paths)
        if any(output.resolve() == Path(trace.path).resolve() for trace in traces):
            raise CommSchedError(f"{output} is one of the traces; name another file with -o")
        with output.open("w") as file:
            file.writelines(merged(traces))
    except (CommSchedError, OSError) as error:
        raise click.ClickException(str(error)) from None
    ranks = len({trace.rank for trace in traces})
    spans = sum(len(trace.spans) for trace in traces)
    click.echo(f"{output}: {spans} spans of {ranks} of {traces[0].world_size} ranks")
