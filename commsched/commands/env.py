"""``commsched env``: every setting, and where its value comes from."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from commsched.errors import CommSchedError
from commsched.settings import resolve, settings_markdown, specs, text_of

__all__ = ["command"]


@click.command()
@click.option("--markdown", is_flag=True, help="The registry as a Markdown table, without values.")
def command(markdown: bool) -> None:
    """Print every setting: its variable, effective value, origin, range and meaning."""
    if markdown:
        click.echo(settings_markdown())
        return
    try:
        resolved = resolve()
    except CommSchedError as error:
        raise click.ClickException(str(error)) from None
    table = Table("variable", "value", "from", "allowed", "meaning", show_lines=False)
    for spec in specs():
        value = getattr(resolved.settings, spec.field)
        table.add_row(
            spec.variable, text_of(value), resolved.origin[spec.field], spec.allowed, spec.doc
        )
    console = Console()
    # Piped, a table must not be folded at 80 columns: scripts read it.
    Console(width=None if console.is_terminal else 1000).print(table)
