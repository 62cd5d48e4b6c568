"""The microbenchmarks' runs: kept, and compared with the last kept run of the same machine kind.

    python bench/kept.py keep                    run them all, keep the result
    python bench/kept.py compare                 run them all, beside the last kept run
    python bench/kept.py compare --threshold 1.3 the same, and exit code 1 where one got slower
    python bench/kept.py compare -- -k plan      only some: the rest goes to pytest

pytest-benchmark measures and stores: files in `bench/results/micro/`, in its own format, so that
`pytest-benchmark compare` reads them too. They say what machine and which versions they come from.

Machines are of one kind where CPU, number of cores and vector instructions are equal. A
benchmark counts as slower where both its median and its least time are: on a shared machine either
one moves by itself.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

if __name__ == "__main__":  # run as a file: make the repository root importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.driven import described

__all__ = [
    "FOLDER",
    "Kept",
    "Ratio",
    "baseline",
    "kept_runs",
    "kind_of",
    "main",
    "ratios",
    "slower",
]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "micro"
FILES = ("bench/micro.py", "bench/micro_planning.py")
MEASURE = (
    "--benchmark-max-time=0.2", "--benchmark-min-rounds=5", "--benchmark-columns=min,median,stddev",
    "--benchmark-disable-gc", "-q", "-p", "no:cacheprovider",
)  # fmt: skip
MOST_NAMES = 6  # in one sentence
Benches = dict[str, Mapping[str, float]]


@dataclass(frozen=True)
class Kept:
    """One run.

    Attributes:
        name: of its file.
        date: ISO, UTC.
        machine: what `bench.machine.describe` says of it.
        versions: by package.
        times: name of a benchmark -> pytest-benchmark's statistics, in seconds.
    """

    name: str
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    times: Benches

    @classmethod
    def read(cls, path: Path) -> Kept:
        """The run in a file that pytest-benchmark wrote here.

        Raises:
            ValueError: another file.
        """
        try:
            content = json.loads(path.read_text())
            info = content["machine_info"]
            times = {bench["fullname"]: bench["stats"] for bench in content["benchmarks"]}
            return cls(path.name, content["datetime"], info["machine"], info["versions"], times)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no run kept by `make bench`: {error!r}") from None


@dataclass(frozen=True)
class Ratio:
    """One benchmark, now over before: above 1 is slower."""

    name: str
    before_s: float
    now_s: float
    of_medians: float
    of_least: float


def kind_of(machine: Mapping[str, Any]) -> str:
    """What makes two machines comparable, in words."""
    return f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('vectors')}"


def kept_runs(folder: Path) -> list[Kept]:
    """All runs in the folder, the oldest first.

    Raises:
        ValueError: a file in it is something else.
    """
    return sorted(map(Kept.read, folder.rglob("*.json")), key=lambda run: run.date)


def baseline(runs: Sequence[Kept], machine: Mapping[str, Any]) -> Kept | None:
    """The last run of that machine's kind, or else the last one at all; None if there is none."""
    same = [run for run in runs if kind_of(run.machine) == kind_of(machine)]
    return next(reversed(same or runs), None)


def ratios(before: Kept, now: Kept) -> list[Ratio]:
    """Benchmarks that both have, those that got slower most first."""
    found = []
    for name in before.times.keys() & now.times.keys():
        old, new = before.times[name], now.times[name]
        medians, least = new["median"] / old["median"], new["min"] / old["min"]
        found.append(Ratio(name, old["median"], new["median"], medians, least))
    return sorted(found, key=lambda ratio: (-ratio.of_medians, ratio.name))


def slower(found: Sequence[Ratio], threshold: float) -> list[Ratio]:
    """Those that take more than `threshold` times as long, by their median and their least time."""
    return [ratio for ratio in found if min(ratio.of_medians, ratio.of_least) > threshold]


# ---------------------------------------------------------------- running


class _Unusable(click.ClickException):
    exit_code = 2  # 1 is for what got slower


class _Machine:
    """A pytest plugin: what results say of the machine. Not pytest-benchmark's: it names hosts."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_generate_machine_info(self, config: object) -> dict[str, Any]:
        del config
        head = described()
        return {key: head[key] for key in ("machine", "versions")}


def _run(arguments: Sequence[str]) -> None:
    """Runs the microbenchmarks.

    Raises:
        SystemExit: one failed; 2, since 1 is for what got slower.
    """
    files = [str(ROOT / name) for name in FILES]
    root = f"--rootdir={ROOT}"
    code = pytest.main([root, *files, *MEASURE, *arguments], plugins=[_Machine()])
    if code:
        raise SystemExit(2)


def _file_name() -> str:
    return re.sub(r"[^a-z0-9]+", "-", kind_of(described()["machine"]).lower()).strip("-")


# ---------------------------------------------------------------- saying it


def _time(seconds: float) -> str:
    unit, scale = next((u, s) for u, s in (("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
                       if seconds * s >= 1 or u == "ns")  # fmt: skip
    return f"{seconds * scale:.3g} {unit}"


def _table(found: Sequence[Ratio], threshold: float | None) -> Table:
    table = Table(title="now / before: above 1 is slower", title_justify="left")
    table.add_column("benchmark", overflow="fold")
    for head in ("median before", "now", "ratio", "ratio of least"):
        table.add_column(head, justify="right", no_wrap=True)
    late = {ratio.name for ratio in slower(found, threshold or math.inf)}
    for ratio in found:
        row = [ratio.name.removeprefix("bench/"), _time(ratio.before_s), _time(ratio.now_s)]
        row += [f"{ratio.of_medians:.2f}", f"{ratio.of_least:.2f}"]
        table.add_row(*map(Text, row), style="red" if ratio.name in late else None)
    return table


def _differences(before: Kept, now: Kept) -> list[str]:
    """What else than the code differs between two runs, in whole sentences."""
    said = []
    if kind_of(before.machine) != kind_of(now.machine):
        said.append(
            f"OTHER MACHINE: no run of {kind_of(now.machine)} is kept. {before.name} comes from "
            f"{kind_of(before.machine)}: the ratios tell machines apart, not code. Keep one here: "
            "make bench"
        )
    packages = sorted(before.versions.keys() | now.versions.keys())
    changed = [
        f"{package} {before.versions.get(package)} -> {now.versions.get(package)}"
        for package in packages
        if before.versions.get(package) != now.versions.get(package)
    ]
    if changed:
        said.append(f"Versions differ: {', '.join(changed)}.")
    for text, names in (
        ("Only in the kept run", before.times.keys() - now.times.keys()),
        ("New", now.times.keys() - before.times.keys()),
    ):
        if names:
            shown = [*sorted(names)[:MOST_NAMES], f"... {len(names)} in all"][: len(names)]
            said.append(f"{text}: {', '.join(shown)}.")
    return said


def say(before: Kept, now: Kept, threshold: float | None, console: Console) -> int:
    """Print the comparison.

    Returns:
        The exit code. 0 without a threshold. With one: 1 where a benchmark is slower by more than
        that, 2 where it cannot be told, because the machines differ or nothing is in both runs.
    """
    found = ratios(before, now)
    if found:
        console.print(_table(found, threshold))
        mean = geometric_mean(ratio.of_medians for ratio in found)
        console.print(f"{len(found)} benchmarks, geometric mean of the ratios {mean:.3f}")
    for sentence in (f"Compared with {before.name} of {before.date}.", *_differences(before, now)):
        console.print(sentence, soft_wrap=True, markup=False)
    if threshold is None:
        return 0
    if not found or kind_of(before.machine) != kind_of(now.machine):
        console.print(f"Whether anything is slower than {threshold:g} x cannot be told.")
        return 2
    late = slower(found, threshold)
    for ratio in late:
        console.print(f"SLOWER than {threshold:g} x: {ratio.name}", soft_wrap=True, markup=False)
    return 1 if late else 0


# ---------------------------------------------------------------- the command


@click.group(help="Keep and compare runs of the microbenchmarks.")
def main() -> None:
    """The command line."""


@main.command(help="Run the microbenchmarks, all of them, and keep the result.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER)
def keep(folder: Path) -> None:
    """One more file in the folder. Of all benchmarks: later runs would miss those left out."""
    _run([f"--benchmark-storage={folder}", f"--benchmark-save={_file_name()}"])


@main.command(help="Run the microbenchmarks beside the last kept run of the same machine kind.")
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER)
@click.option("--threshold", type=click.FloatRange(1), help="exit code 1 if slower by more")
@click.argument("rest", nargs=-1)
def compare(folder: Path, threshold: float | None, rest: Sequence[str]) -> None:
    """Keeps nothing."""
    try:
        before = baseline(kept_runs(folder), described()["machine"])
    except ValueError as error:
        raise _Unusable(str(error)) from None
    if before is None:
        raise _Unusable(f"no run is kept in {folder}: make bench keeps one")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "now.json")
        _run([f"--benchmark-json={path}", "--benchmark-quiet", *rest])
        now = Kept.read(path)
    console = Console(width=None if sys.stdout.isatty() else 110)
    raise SystemExit(say(before, now, threshold, console))


if __name__ == "__main__":
    main()
