"""The command line: ``commsched env``."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from commsched.errors import CommSchedError
from commsched.settings import resolve, specs
from commsched.version import __version__

__all__ = ["main", "settings_markdown"]


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Gradient communication for PyTorch DDP."""


@main.command()
@click.option("--markdown", is_flag=True, help="The registry as a Markdown table, without values.")
def env(markdown: bool) -> None:
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
            spec.variable, _text(value), resolved.origin[spec.field], spec.allowed, spec.doc
        )
    console = Console()
    # Piped, a table must not be folded at 80 columns: scripts read it.
    Console(width=None if console.is_terminal else 1000).print(table)


def settings_markdown() -> str:
    """The registry as a Markdown table, for the README."""
    lines = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for spec in specs():
        allowed = spec.allowed.replace("|", "\\|")
        lines.append(f"| `{spec.variable}` | {_text(spec.default)} | {allowed} | {spec.doc} |")
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


if __name__ == "__main__":
    main()
