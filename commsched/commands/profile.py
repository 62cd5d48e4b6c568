"""``commsched profile``: take a profile out of a trace, and say what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from commsched.errors import CommSchedError
from commsched.profile import Profile
from commsched.profiles import Loaded, load, names
from commsched.whatif.alpha_beta import gbps_of, per_hop_s

__all__ = ["command"]


@click.command()
@click.argument("source", required=False)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write the profile to this JSON file.")  # fmt: skip
@click.option(
    "--list", "is_list", is_flag=True, help="List the shipped profiles and their sources."
)
def command(source: str | None, output: Path | None, is_list: bool) -> None:
    """Take the measured profile out of SOURCE, save it, and print what it says.

    SOURCE is a trace or a folder of them (the last profile counts), a file that this command wrote,
    or the name of a shipped profile.
    """
    console = Console()
    if is_list:
        for name in names():
            console.print(f"{name}: {load(name).source}\n", markup=False, highlight=False)
        return
    if source is None:
        raise click.UsageError("name a trace, a profile, or a shipped one (--list shows them)")
    try:
        loaded = load(source)
        if output is not None:
            _write(loaded, output)
    except CommSchedError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}") from None
    console.print(f"{loaded.name}: {loaded.source}", markup=False, highlight=False)
    console.print(_summary(loaded.profile))
    console.print(_buckets(loaded.profile))


def _write(loaded: Loaded, output: Path) -> None:
    document = {
        "name": loaded.name,
        "source": loaded.source,
        "profile": json.loads(loaded.profile.to_json()),
    }
    output.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _summary(profile: Profile) -> Table:
    table = Table(show_header=False)
    layout, link = profile.layout, profile.link
    numel = sum(bucket.numel for bucket in layout.buckets)
    hop_us = per_hop_s(link, profile.world_size) * 1e6
    rows = {
        "gradients": f"{numel:,} elements, {layout.nbytes / 1e6:.1f} MB (1e6 bytes)",
        "parameters": f"{len(profile.params)} in {len(layout.buckets)} buckets",
        "ranks": str(profile.world_size),
        "link": f"{gbps_of(link):.3g} Gbit/s a rank, {link.alpha_s * 1e6:.0f} us a collective "
        f"({hop_us:.1f} us a hop of a ring)",
        "forward": f"{profile.forward_s * 1e3:.1f} ms",
        "backward": f"{profile.backward_s * 1e3:.1f} ms",
        "optimizer": f"{profile.optimizer_s * 1e3:.1f} ms",
        "other": f"{profile.other_s * 1e3:.1f} ms",
        "computing": f"{profile.compute_s * 1e3:.1f} ms a step"
        + ("" if profile.measured else " (never measured)"),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _buckets(profile: Profile) -> Table:
    table = Table("bucket", "MB (2**20 bytes)", "parameters", "ready, ms", "first", "last")
    for index, spec in enumerate(profile.layout.buckets):
        ends = [spec.params[place].name for place in (0, -1)] if spec.params else ["", ""]
        size = f"{spec.nbytes / 2**20:.2f}{' sparse' if spec.sparse else ''}"
        ready = f"{profile.ready_s[index] * 1e3:.1f}"
        table.add_row(str(index), size, str(len(spec.params)), ready, *ends)
    return table
