"""Running one command per rank to its end: a time limit, fail-fast, and a verdict per rank."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.links import Links, loopback_links, shaped_links, why_unavailable

__all__ = ["RankResult", "launch", "launch_program", "open_links", "require_shaped"]

_ROOT = Path(__file__).resolve().parents[1]
_TAIL_LINES = 60  # room for the stacks of all threads
_GRACE_S = 3.0


@dataclass
class RankResult:
    """How one rank ended.

    Attributes:
        rank: the rank.
        status: `ok`, `exit code N`, `signal NAME`, `hung` (killed at the time limit), or
            `stopped` (killed because another rank had failed).
        seconds: its lifetime.
        tail: the last lines it printed on stderr.
    """

    rank: int
    status: str = "running"
    seconds: float = 0.0
    tail: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """The fields as JSON-ready values."""
        return asdict(self)


def open_links(
    ranks: int, rate_mbit: float | None, loopback: bool, mtu_bytes: int = 1500
) -> AbstractContextManager[Links]:
    """Loopback links when asked for, shaped (or, with no rate, unshaped) ones otherwise."""
    return loopback_links(ranks) if loopback else shaped_links(ranks, rate_mbit, mtu_bytes)


def require_shaped() -> None:
    """Raises ValueError, which says what to do, where links cannot be shaped."""
    reason = why_unavailable()
    if reason is not None:
        raise ValueError(f"no shaped links here ({reason}); use --loopback")


def launch(
    links: Links,
    argv: Sequence[str] | Callable[[int], Sequence[str]],
    time_limit_s: float | None,
    env: Mapping[str, str] | None = None,
    echo: Callable[[int, str, bool], None] | None = None,
    dump_stacks: bool = False,
) -> list[RankResult]:
    """Runs `argv` once per rank until all have ended or one has failed.

    Args:
        links: where the ranks run.
        argv: the command, or a function from rank to command.
        time_limit_s: seconds after which the ranks still running are killed; None for no limit.
        env: more variables for every rank.
        echo: called with (rank, line, is_stderr) for each line printed, from reader threads.
        dump_stacks: send SIGUSR1 to the ranks before killing them (they must handle it, for
            instance by `faulthandler.register`).
    """
    start_s = time.monotonic()
    results = [RankResult(rank) for rank in range(links.ranks)]
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for rank in range(links.ranks):
            command = argv(rank) if callable(argv) else argv
            child = links.popen(
                rank,
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            children.append(child)
            readers += _read(child, results[rank], echo)
        _watch(children, results, start_s, time_limit_s)
    finally:
        _end(children, dump_stacks)
        for reader in readers:
            reader.join(timeout=_GRACE_S)
    return results


def launch_program(
    links: Links,
    module: str,
    config: Any,
    folder: str,
    time_limit_s: float,
    echo: Callable[[int, str, bool], None] | None = None,
) -> list[RankResult]:
    """Runs ``module.main(config file, folder)`` once per rank; see `launch`.

    Args:
        links: where the ranks run.
        module: of this repository.
        config: a dataclass, which the program reads as JSON.
        folder: for that file, and for what the ranks write.
        time_limit_s: as of `launch`.
        echo: as of `launch`.
    """
    path = Path(folder, "config.json")
    path.write_text(json.dumps(asdict(config)))
    program = f"import sys; from {module} import main; main(*sys.argv[1:])"
    return launch(
        links,
        [sys.executable, "-c", program, str(path), folder],
        time_limit_s,
        # c10d warns about every address without a host name, which these all are.
        env={"PYTHONPATH": str(_ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        echo=echo,
        dump_stacks=True,
    )


def _read(
    child: subprocess.Popen[str],
    result: RankResult,
    echo: Callable[[int, str, bool], None] | None,
) -> list[threading.Thread]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def read(is_stderr: bool) -> None:
        stream = child.stderr if is_stderr else child.stdout
        assert stream is not None
        for line in stream:
            if is_stderr:
                tail.append(line.rstrip("\n"))
                result.tail = list(tail)
            if echo is not None:
                echo(result.rank, line.rstrip("\n"), is_stderr)

    threads = [threading.Thread(target=read, args=(flag,), daemon=True) for flag in (False, True)]
    for thread in threads:
        thread.start()
    return threads


def _watch(
    children: list[subprocess.Popen[str]],
    results: list[RankResult],
    start_s: float,
    time_limit_s: float | None,
) -> None:
    """Fills in the verdicts; returns when all have ended, one has failed, or time is up."""
    failed_at_s: float | None = None
    while any(result.status == "running" for result in results):
        now_s = time.monotonic()
        for child, result in zip(children, results, strict=True):
            code = child.poll()
            if result.status == "running" and code is not None:
                result.status, result.seconds = _verdict(code), now_s - start_s
                if code and failed_at_s is None:
                    failed_at_s = now_s
        late = time_limit_s is not None and now_s - start_s > time_limit_s
        # The grace lets the others report the same failure in their own words first.
        if late or (failed_at_s is not None and now_s - failed_at_s > _GRACE_S):
            for result in results:
                if result.status == "running":
                    result.status = "stopped" if failed_at_s is not None else "hung"
                    result.seconds = now_s - start_s
            return
        time.sleep(0.02)


def _verdict(code: int) -> str:
    if code == 0:
        return "ok"
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def _end(children: list[subprocess.Popen[str]], dump_stacks: bool) -> None:
    alive = [child for child in children if child.poll() is None]
    if alive and dump_stacks:
        for child in alive:
            child.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
    for child in alive:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # popen made it the leader of its group
    for child in alive:
        child.wait()


def _worst(results: list[RankResult]) -> int:
    """The exit code to hand on: the first failure's, 124 for a time limit (as `timeout` does)."""
    codes = []
    for result in results:
        word, _, value = result.status.rpartition(" ")
        if word == "exit code":
            codes.append(int(value))
        elif word == "signal":
            codes.append(128 + signal.Signals[value])
        elif result.status == "hung":
            codes.append(124)
    return max(codes, default=0)


def main() -> int:
    """The command line of `bench/links.py`."""
    parser = argparse.ArgumentParser(
        description="Run a command once per rank, each on a network link of its own."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, help="egress rate; not shaped when left out")
    parser.add_argument("--mtu-bytes", type=int, default=1500, help="1500 or, jumbo, 9000")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no shaping")
    parser.add_argument("--time-limit-s", type=float, help="kill all ranks after this long")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and arguments")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given")
    lock = threading.Lock()

    def echo(rank: int, line: str, is_stderr: bool) -> None:
        with lock:  # whole lines only
            print(f"[rank {rank}] {line}", file=sys.stderr if is_stderr else sys.stdout, flush=True)

    try:
        with open_links(
            options.ranks, options.rate_mbit, options.loopback, options.mtu_bytes
        ) as links:
            results = launch(links, command, options.time_limit_s, echo=echo)
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        print(f"links: {error}", file=sys.stderr)
        return 1
    for result in results:
        if result.status != "ok":
            print(f"rank {result.rank}: {result.status}", file=sys.stderr)
    return _worst(results)
