"""Network links of a chosen rate between the ranks of one machine, or plain loopback.

Every rank gets a network namespace of its own, joined by a bridge, its egress shaped by
`tc tbf`. The namespaces have no names: each is held open by a small shell (the *holder*) that
waits on a pipe from this process. When this process ends, however it ends (SIGKILL included),
the pipe closes, the holder kills whatever still runs in its namespace and the kernel removes
namespace, veth and bridge. Nothing is ever made in the host's own namespace.

As a command, it runs one process per rank and prints each line with the rank before it:

    python bench/links.py --ranks 2 --rate-mbit 1000 -- python script.py args
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Links", "LinksError", "loopback_links", "shaped_links", "why_unavailable", "wire_bytes"]

INTERFACE = "eth0"
_OWNER = "BENCH_LINKS_OWNER"
_PORT = 29500  # always free: the namespaces are new
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where users have no path to `tc`
# One GSO packet (64 KiB and the headers of its segments) has to fit into the bucket, or tbf cuts
# it up at a great cost in CPU. A larger bucket would let whole small messages pass unshaped.
_BURST_BYTES = 80_000
_LATENCY_MS = 50
_HOLD = """echo ready; read _; n=$(readlink /proc/$$/ns/net)
for p in /proc/[0-9]*; do
  [ "$(readlink $p/ns/net)" = "$n" ] && [ $p != /proc/$$ ] && kill -9 ${p#/proc/}
done 2>/dev/null"""
_serial = itertools.count()


class LinksError(RuntimeError):
    """The links could not be made; the text says which command failed and how."""


@dataclass
class Links:
    """How to start each rank of one job on its link.

    Attributes:
        ranks: number of ranks.
        rate_mbit: egress rate of each rank in Mbit/s (headers count), None when not shaped.
        interface: name of the network interface the ranks use.
        master_addr: address of rank 0.
        master_port: free port at that address.
        owner: mark in the environment of every process started here; cleaning up looks for it.
    """

    ranks: int
    rate_mbit: float | None
    interface: str
    master_addr: str
    master_port: int
    owner: str
    _enter: list[list[str]]
    _children: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def is_loopback(self) -> bool:
        """True when all ranks share the loopback interface."""
        return self.interface == "lo"

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that `torch.distributed` and gloo need in `rank`."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": "1",
        }

    def popen(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        **popen_kwargs: Any,
    ) -> subprocess.Popen[Any]:
        """Starts `argv` as `rank` on its link. It is killed when the links are closed.

        The process leads a session of its own, so that Ctrl-C reaches only the parent, which
        then ends all ranks together; its `pid` is that of `argv` itself, not of a wrapper.

        Args:
            rank: which link, and which environment.
            argv: the command and its arguments.
            env: variables on top of `os.environ` and `environment(rank)`.
            **popen_kwargs: passed on to `subprocess.Popen`.
        """
        popen_kwargs.setdefault("start_new_session", True)
        variables = {**os.environ, **self.environment(rank), **(env or {}), _OWNER: self.owner}
        child = subprocess.Popen([*self._enter[rank], *argv], env=variables, **popen_kwargs)
        self._children.append(child)
        return child

    def close(self) -> None:
        """Kills every process started here, and what they started in turn."""
        _kill_marked(lambda owner: owner == self.owner)
        for child in self._children:
            child.wait()
        self._children.clear()


def wire_bytes() -> int:
    """Bytes this rank's interface has sent so far; on loopback, those of all ranks together."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", INTERFACE).split(",")[0]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LinksError(f"no interface {interface!r} in /proc/net/dev")


@functools.cache
def why_unavailable() -> str | None:
    """None when `shaped_links` works here, else what is missing. Found out by trying."""
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        with shaped_links(1, 1000.0):
            return None
    except (LinksError, OSError) as error:
        who = "root" if os.geteuid() == 0 else "not root, so tried `unshare --user --net`"
        return f"{who}: {error}"


@contextmanager
def shaped_links(ranks: int, rate_mbit: float | None, mtu_bytes: int = 1500) -> Iterator[Links]:
    """Makes one namespace per rank on a common bridge and removes all of it on exit.

    Only the egress is shaped: several ranks that send to the same one at once can exceed the
    rate at the receiver (a ring never does).

    Args:
        ranks: number of ranks, at most 250.
        rate_mbit: egress rate of every rank in Mbit/s, None for a veth as fast as it goes.
        mtu_bytes: largest packet. The rate counts headers: 1500 leaves 95.6 % of it to the
            data, 9000 leaves 99.2 %.

    Raises:
        LinksError: the kernel or the user's rights do not allow it; see `why_unavailable`.
    """
    if not 1 <= ranks <= 250:
        raise ValueError(f"ranks must be in 1..250, not {ranks}")
    with _owner() as owner, ExitStack() as holders:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        switch = holders.enter_context(_holder(["unshare", *user, "--net"]))
        inside = [] if not user else ["--user", "--preserve-credentials"]
        enter_user = ["nsenter", "--target", str(switch), *inside] if user else []
        pids = [
            holders.enter_context(_holder([*enter_user, "unshare", "--net"])) for _ in range(ranks)
        ]
        enter = [["nsenter", "--target", str(pid), *inside, "--net", "--"] for pid in pids]
        enter_switch = ["nsenter", "--target", str(switch), *inside, "--net", "--"]
        _run(enter_switch, "ip link add name br0 type bridge stp_state 0 mcast_snooping 0")
        _run(enter_switch, "ip link set br0 up")
        for rank, pid in enumerate(pids):
            _plug_in(enter_switch, enter[rank], rank, pid, rate_mbit, mtu_bytes)
        with _closing(
            Links(ranks, rate_mbit, INTERFACE, _address(0), _PORT, owner, enter)
        ) as links:
            yield links


@contextmanager
def loopback_links(ranks: int) -> Iterator[Links]:
    """The same interface over plain loopback: no shaping, no rights needed."""
    with _owner() as owner, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        enter: list[list[str]] = [[] for _ in range(ranks)]
        with _closing(Links(ranks, None, "lo", "127.0.0.1", port, owner, enter)) as links:
            yield links


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _plug_in(
    enter_switch: list[str],
    enter: list[str],
    rank: int,
    pid: int,
    rate_mbit: float | None,
    mtu_bytes: int,
) -> None:
    port = f"port{rank}"
    _run(enter_switch, f"ip link add name {port} type veth peer name {INTERFACE} netns {pid}")
    _run(enter_switch, f"ip link set {port} mtu {mtu_bytes} master br0 up")
    _run(enter, "ip link set lo up")
    _run(enter, f"ip address add {_address(rank)}/24 dev {INTERFACE}")
    _run(enter, f"ip link set {INTERFACE} mtu {mtu_bytes} up")
    # Reno on a link that never drops just keeps the queue full. BBR, the default on some
    # machines, empties the pipe for 200 ms every 10 s to measure, which would be noise here.
    _run(enter, "sysctl -q -w net.ipv4.tcp_congestion_control=reno", check=False)
    if rate_mbit is not None:
        shape = f"rate {round(rate_mbit * 1e6)}bit burst {_BURST_BYTES} latency {_LATENCY_MS}ms"
        _run(enter, f"tc qdisc add dev {INTERFACE} root tbf {shape}")


def _run(enter: list[str], command: str, check: bool = True) -> None:
    done = subprocess.run(
        [*enter, *command.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": _PATH},
    )
    if check and done.returncode:
        raise LinksError(f"`{command}` failed: {done.stderr.strip() or done.returncode}")


@contextmanager
def _holder(prefix: list[str]) -> Iterator[int]:
    """Holds one new namespace open; yields the process id to enter it by."""
    # A session of its own: Ctrl-C must not end the holder before this process has cleaned up.
    holder = subprocess.Popen(
        [*prefix, "sh", "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise LinksError(f"`{' '.join(prefix)}` failed: {holder.stderr.read().strip()}")
        yield holder.pid
    finally:
        holder.stdin.close()
        try:
            holder.wait(timeout=10)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()
        holder.stderr.close()


@contextmanager
def _closing(links: Links) -> Iterator[Links]:
    try:
        yield links
    finally:
        links.close()


@contextmanager
def _owner() -> Iterator[str]:
    """Removes leftovers of dead runs, makes SIGTERM an exception, yields this run's mark."""
    _kill_marked(_is_dead)
    mark = f"{os.getpid()}:{_start_ticks(os.getpid())}:{next(_serial)}"
    takes_signal = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if takes_signal:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield mark
    finally:
        if takes_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_dead(owner: str) -> bool:
    pid, started, _ = owner.split(":")
    return _start_ticks(int(pid)) != int(started)  # the time tells a reused process id apart


def _start_ticks(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])


def _kill_marked(chosen: Callable[[str], bool]) -> None:
    """Kills the processes whose environment bears the mark of a chosen owner."""
    needle = f"{_OWNER}=".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            marks = [v[len(needle) :].decode() for v in variables if v.startswith(needle)]
            if marks and int(path.parent.name) != os.getpid() and chosen(marks[0]):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except (OSError, ValueError):
            continue  # gone meanwhile, or another user's


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bench.launch import main

    sys.exit(main())
