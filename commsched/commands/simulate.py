"""``commsched simulate``: the step time with other policies, codecs, buckets, links and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from commsched import policies
from commsched.errors import CommSchedError
from commsched.profiles import Loaded, load
from commsched.rules import parse_allow
from commsched.settings import Settings, specs
from commsched.whatif.alpha_beta import ALGORITHMS
from commsched.whatif.scenarios import BEST, Grid, Row, choices, recomputed, rows_of

__all__ = ["command"]

Callback = Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...]]


def _numbers(kind: Callable[[str], float], low: float) -> Callback:
    """What reads numbers between commas, each at least `low`."""

    def read(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[Any, ...]:
        if text is None:
            return ()
        try:
            found = tuple(kind(item) for item in text.split(","))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a list like 4,8,16", ctx, param) from None
        if not all(low <= number < float("inf") for number in found):
            raise click.BadParameter(f"{text!r}: each must be at least {low:g}", ctx, param)
        return found

    return read


@click.command()
@click.argument("source")
@click.option(
    "--policy",
    "chosen",
    multiple=True,
    type=click.Choice(policies.names()),
    help="Only this one; may be repeated. All when left out.",
)
@click.option(
    "--codec",
    "codec_texts",
    multiple=True,
    metavar="CODEC,...",
    help="Codecs as COMMSCHED_ALLOW takes them; none is exact, and all there is when left out.",
)
@click.option(
    "--deferred/--synchronous",
    default=None,
    help="Only with the optimizer handed over, or only without. Both when left out.",
)
@click.option(
    "--bucket-cap-mb",
    "caps_mb",
    callback=_numbers(float, 1e-6),
    metavar="MB,...",
    help="DDP's bucket_cap_mb. The profile's own buckets when left out.",
)
@click.option(
    "--gbps",
    callback=_numbers(float, 1e-6),
    metavar="GBIT,...",
    help="Each rank's link in Gbit/s. The profile's own when left out.",
)
@click.option(
    "--ranks",
    callback=_numbers(int, 2),
    metavar="N,...",
    help="How many ranks. As many as the profile's when left out.",
)
@click.option(
    "--algorithm",
    type=click.Choice([*ALGORITHMS, BEST]),
    default="ring",
    help="How collectives go; best: whichever gives the shorter step.",
)
@click.option(
    "--latency-us",
    type=click.FloatRange(min=0),
    metavar="US",
    help="Latency of one hop between two ranks. The profile's own when left out.",
)
@click.option(
    "--serial",
    "in_series",
    is_flag=True,
    help="One collective at a time, as NCCL on one stream. Else tasks in flight hide each other's "
    "latency, as on gloo.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MS",
    help="A step's computing takes this long: a faster GPU, another batch.",
)
@click.option(
    "--coding",
    "coding_texts",
    multiple=True,
    metavar="measured|CODEC=MS",
    help="What coding costs: measured here now, or ms a MB (1e6 bytes) of gradients. When left "
    "out: what the trace shows, else nothing, which is said.",
)
@click.option(
    "--set",
    "set_texts",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other setting for all of them, as in --set chunk_mb=8.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the step time against ranks or rates (.svg, .png, .pdf).",
)
def command(
    source: str,
    chosen: tuple[str, ...],
    codec_texts: tuple[str, ...],
    deferred: bool | None,
    caps_mb: tuple[float, ...],
    gbps: tuple[float, ...],
    ranks: tuple[int, ...],
    algorithm: str,
    latency_us: float | None,
    in_series: bool,
    compute_ms: float | None,
    coding_texts: tuple[str, ...],
    set_texts: tuple[str, ...],
    as_json: bool,
    picture: Path | None,
) -> None:
    """Predict the step time of SOURCE for every policy, codec, bucket size, link and rank count.

    SOURCE is a trace or a folder of them, a file of `commsched profile`, or the name of a shipped
    profile (`commsched profile --list`). The base line is plain DDP with the profile's own buckets.
    """
    try:
        loaded = load(source)
        profile = loaded.profile
        if compute_ms is not None:
            profile = recomputed(profile, compute_ms / 1e3)
        chosen_codecs = _codecs(codec_texts)
        coding_s, remarks = _coding(coding_texts, chosen_codecs, loaded, ranks)
        grid = Grid(
            candidates=choices(chosen, chosen_codecs, _settings(set_texts), deferred),
            caps_mb=caps_mb or (None,),
            gbps=gbps or (None,),
            ranks=ranks or (None,),
            hop_s=None if latency_us is None else latency_us / 1e6,
            algorithm=algorithm,
            in_series=in_series,
            coding_s=coding_s,
        )
        rows = list(rows_of(profile, grid))
    except CommSchedError as error:
        raise click.ClickException(str(error)) from None
    if not grid.candidates:
        remarks.append(f"without the optimizer, {', '.join(chosen)} gains nothing over fifo")
    if as_json:
        click.echo(json.dumps(_document(loaded, rows, remarks), indent=1))
    else:
        from commsched.whatif.view import print_rows

        print_rows(loaded, rows, remarks)
    if picture is not None:
        _draw(picture, loaded, rows)


def _draw(picture: Path, loaded: Loaded, rows: Sequence[Row]) -> None:
    from commsched.whatif.view import draw

    try:
        draw(picture, loaded, rows)
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib: pip install 'commsched[plots]'"
        ) from None
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{picture} cannot be drawn: {error}") from None


def _document(loaded: Loaded, rows: Sequence[Row], remarks: Sequence[str]) -> dict[str, Any]:
    return {
        "name": loaded.name,
        "source": loaded.source,
        "remarks": list(remarks),
        "rows": [asdict(row) for row in rows],
    }


def _codecs(texts: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(dict.fromkeys(name for text in texts for name in parse_allow(text)))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--codec") from None


def _settings(texts: Sequence[str]) -> Settings:
    """The defaults with what --set says: the environment is another job's."""
    known = {spec.field: spec for spec in specs()}
    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or name not in known:
            said = f"{text!r} is not NAME=VALUE with one of {', '.join(known)}"
            raise click.BadParameter(said, param_hint="--set")
        values[name] = known[name].parse(value)
    return Settings(**values)


def _coding(
    texts: Sequence[str], names: Sequence[str], loaded: Loaded, ranks: Sequence[int]
) -> tuple[dict[str, float], list[str]]:
    """Seconds for a byte of gradients by codec, and what to say about them."""
    lossy = [name for name in names if name != "none"]
    found = dict(loaded.coding_s)
    for text in texts:
        if text == "measured":
            found |= _measured(lossy, max([loaded.profile.world_size, *ranks]))
            continue
        name, _, value = text.rpartition("=")
        try:
            found[parse_allow(name)[0]] = float(value) / 1e9
        except (ValueError, IndexError):
            said = f"{text!r} is neither measured nor CODEC=MS"
            raise click.BadParameter(said, param_hint="--coding") from None
    free = [name for name in lossy if name not in found]
    if not free:
        return found, []
    return found, [
        f"coding with {', '.join(free)} is taken to be free: say what it costs with --coding"
    ]


def _measured(names: Sequence[str], ranks: int) -> dict[str, float]:
    """On this machine, as State prices them; at most 16 ranks' payloads, to fit in memory."""
    from commsched import codecs, pricing

    count = min(ranks, 16)
    return {
        name: pricing.coding_s(name, count, codecs.get(name).keeps_errors("auto")) for name in names
    }
