"""The command line: ``commsched env | trace | report | probe | profile | simulate``."""

from __future__ import annotations

from importlib import import_module

import click

from commsched.settings import settings_markdown
from commsched.version import __version__

__all__ = ["main", "settings_markdown"]

COMMANDS = ("env", "probe", "profile", "report", "simulate", "trace")


class _Lazy(click.Group):
    """Loads a command when it is asked for: some bring matplotlib with them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"commsched.commands.{cmd_name}")
        command: click.Command = module.command
        command.name = cmd_name
        return command


@click.group(cls=_Lazy)
@click.version_option(__version__)
def main() -> None:
    """Gradient communication for PyTorch DDP."""


if __name__ == "__main__":
    main()
