"""`python -m commsched.demo`: plain DDP against commsched, in two minutes on one machine.

Two ranks train the character GPT of `commsched.chargpt`, from the same seed on the same batches:
with plain DDP, with commsched (exact, without and with the optimizer handed over) and with
commsched sending bf16. They sit on a link of known bandwidth where network namespaces are allowed,
on loopback otherwise. The closing table is what this machine did just now. The exit code is 1 if an
exact run's losses are not, bit for bit, those of plain DDP, and 2 if a rank failed or hung.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from commsched.chargpt import RUNS, WARM_UP_STEPS, RunReport, bench_links

__all__ = ["main"]

RANKS = 2
SILENCE_S = 60  # a rank that reports no step for so long hangs
GRACE_S = 5  # for the other ranks to say what they saw, after one failed
STDERR_LINES = 40
ONE_LINE = "ddp.register_comm_hook(commsched.State(optimizer=optimizer), commsched.hook)"
EXACT = ("commsched", "commsched, optimizer")


class Link(Protocol):
    """What connects the ranks: knows their rendezvous and starts their processes."""

    def popen(self, rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start the process of one rank."""


class Loopback:
    """Minimal `Link` for an installed package, which carries no bench/ folder."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def popen(self, rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start the process of one rank, with torchrun's variables."""
        rendezvous = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        return subprocess.Popen(argv, env={**os.environ, **rendezvous}, **options)


@dataclass
class Place:
    """Where the ranks run.

    Attributes:
        link: Starts them.
        about: What the link is, and why.
        ranks_counted: How many ranks' bytes one rank's interface counter holds.
    """

    link: Link
    about: str
    ranks_counted: int


@contextmanager
def choose_place(rate_mbit: float, loopback: bool) -> Iterator[Place]:
    """Give the best link that this machine allows."""
    links = bench_links()
    if links is None:
        why = "only the package is here; the repository's bench/ folder shapes a link"
        yield Place(Loopback(), f"loopback: {why}", RANKS)
        return
    why = "asked for" if loopback else links.why_unavailable()
    if why is not None:
        with links.loopback_links(RANKS) as link:
            yield Place(link, f"loopback: {why}", RANKS)
        return
    with links.shaped_links(RANKS, rate_mbit) as link:
        about = f"{RANKS} network namespaces, {rate_mbit:g} Mbit/s from each"
        yield Place(link, about, 1)


class RankError(Exception):
    """A rank exited with an error, or none said anything for too long."""


class Ranks:
    """The rank processes of one demo: started at once, never left behind.

    Args:
        link: Where they run.
        steps: Optimizer steps per run.
    """

    def __init__(self, link: Link, steps: int) -> None:
        self.inbox: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.processes: list[subprocess.Popen[Any]] = []
        self.errors: list[deque[str]] = [deque(maxlen=STDERR_LINES) for _ in range(RANKS)]
        self.readers: list[threading.Thread] = []
        argv = [sys.executable, "-m", "commsched.chargpt", "--steps", str(steps)]
        try:
            for rank in range(RANKS):
                self._start(link, rank, argv)
        except BaseException:
            self.kill()
            raise

    def _start(self, link: Link, rank: int, argv: Sequence[str]) -> None:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Own session: one killpg also ends whatever the rank itself started.
        process = link.popen(rank, argv, **pipes, errors="replace", start_new_session=True)
        self.processes.append(process)
        self._read(self._listen, rank, process.stdout)
        self._read(self.errors[rank].extend, process.stderr)

    def _read(self, target: Callable[..., None], *args: object) -> None:
        self.readers.append(threading.Thread(target=target, args=args, daemon=True))
        self.readers[-1].start()

    def _listen(self, rank: int, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("{"):
                self.inbox.put((rank, json.loads(line)))
        self.inbox.put((rank, None))

    def messages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (rank, message) until all ranks are done.

        Raises:
            RankError: A rank exited with an error or all fell silent; carries what they wrote.
        """
        running = RANKS
        while running:
            try:
                rank, message = self.inbox.get(timeout=SILENCE_S)
            except queue.Empty:
                self._ask_for_stacks()
                raise RankError(self._tails(f"no step for {SILENCE_S} s")) from None
            if message is not None:
                yield rank, message
                continue
            running -= 1
            code = self.processes[rank].wait()
            if code:
                raise RankError(self._tails(f"rank {rank} exited with code {code}"))

    def _ask_for_stacks(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGUSR1)

    def _tails(self, reason: str) -> str:
        # All ranks' words: the first to exit may only be the victim of the one that failed.
        deadline = time.monotonic() + GRACE_S
        for reader in self.readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        parts = [reason]
        for rank, lines in enumerate(self.errors):
            parts.append(f"--- rank {rank}, end of stderr ---\n{''.join(lines)}")
        return "\n".join(parts)

    def kill(self) -> None:
        """End every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


Reports = dict[int, RunReport]  # of one run, by rank


def measure(link: Link, steps: int, console: Console) -> dict[str, Reports]:
    """Run all of `RUNS` on new rank processes, behind a progress bar."""
    results: dict[str, Reports] = {run: {} for run in RUNS}
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    ranks = Ranks(link, steps)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting the ranks", total=RANKS * len(RUNS) * steps)
            for rank, message in ranks.messages():
                run = message["run"]
                if "report" in message:
                    results[run][rank] = RunReport(**message["report"])
                else:
                    progress.update(task, advance=1, description=run)
    finally:
        ranks.kill()
    return results


def typical_step_ms(reports: Reports) -> float:
    """Median over the timed turns of the slowest rank's step."""
    slowest = map(max, zip(*(report.step_ms for report in reports.values()), strict=True))
    median_ms: float = statistics.median(slowest)
    return median_ms


def mean_loss(reports: Reports, step: int) -> float:
    """Mean over the ranks of one step's loss."""
    return statistics.fmean(report.losses[step] for report in reports.values())


def table(results: dict[str, Reports], steps: int, ranks_counted: int) -> Table:
    """One row per run; exposed communication is against the run that sends nothing."""
    compute_ms = typical_step_ms(results["compute only"])
    closing = Table(
        title=f"character GPT, {RANKS} ranks, {steps} steps per run",
        caption=f"compute only (torch's noop hook): {compute_ms:.0f} ms per step",
    )
    closing.add_column("run", no_wrap=True)
    for name in ("first loss", "final loss", "step ms", "exposed ms", "reported ms", "MB/step"):
        closing.add_column(name.replace(" ", "\n"), justify="right")
    for run, reports in results.items():
        if run == "compute only":
            continue
        step_ms = typical_step_ms(reports)
        reported_ms = reports[0].reported_ms
        sent = max(report.wire_bytes for report in reports.values()) / ranks_counted
        closing.add_row(
            run,
            f"{mean_loss(reports, 0):.4f}",
            f"{mean_loss(reports, -1):.4f}",
            f"{step_ms:.0f}",
            f"{max(0.0, step_ms - compute_ms):.0f}",
            "" if reported_ms is None else f"{reported_ms:.0f}",
            f"{sent / 1e6:.2f}",
        )
    return closing


def same_losses(one: Reports, other: Reports) -> bool:
    """Whether every loss of every rank is equal, bit for bit (JSON keeps a float's bits)."""
    return all(one[rank].losses == other[rank].losses for rank in one)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m commsched.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps per run (32)")
    parser.add_argument("--rate-mbit", type=float, default=600, help="link rate, Mbit/s (600)")
    parser.add_argument("--loopback", action="store_true", help="do not shape a link")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be more than the {WARM_UP_STEPS} steps that are not timed")
    if arguments.rate_mbit <= 0:
        parser.error("--rate-mbit must be positive")
    return arguments


def main() -> int:
    """Run the demo; return the exit code."""
    arguments = parse_arguments()
    # As an exception SIGTERM runs the clean-up too: no rank and no namespace stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False)
    with choose_place(arguments.rate_mbit, arguments.loopback) as place:
        console.print(f"link: {place.about}", markup=False, soft_wrap=True)
        if os.getloadavg()[0] > (os.cpu_count() or 1):
            console.print("others keep this machine busy: expect noise in the times")
        try:
            results = measure(place.link, arguments.steps, console)
        except RankError as failure:
            console.print(f"the demo failed: {failure}", markup=False, soft_wrap=True)
            return 2
    console.print(table(results, arguments.steps, place.ranks_counted))
    for run, reports in results.items():
        if reports[0].inactive:
            console.print(f"{run}: not active, {reports[0].inactive}", markup=False)
    equal = all(same_losses(results["plain DDP"], results[run]) for run in EXACT)
    verdict = "yes" if equal else "no"
    console.print(f"losses of plain DDP and both exact runs equal, bit for bit: {verdict}")
    console.print("in your own job, after wrapping the model:")
    console.print(ONE_LINE, soft_wrap=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
