"""Rank processes without the wait for `import torch`: forked from processes that have it.

Importing takes more than a second of CPU in each rank, which a suite that starts hundreds cannot
afford. A nursery has one thread and has not touched torch's thread pools: it may fork. Ranks with
odd numbers come from another nursery than those with even ones: strings hash differently there, so
that what depends on the order of a set differs between ranks, as it does in life.

The parent's side is `fork`; run as a script, this is the nursery.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PRELOADED = (
    "hypothesis",
    "pytest",
    "_pytest.assertion.rewrite",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer's doing
    "commsched.session",
)
KINDS = 2
MESSAGE_BYTES = 2**16
_SELF = Path(__file__).resolve()


class Forked:
    """A process that a nursery has forked: what the pools use of `subprocess.Popen`."""

    def __init__(self, pid: int, nursery: _Nursery) -> None:
        self.pid = pid
        self.parent_pid = nursery.process.pid
        self._nursery = nursery

    def poll(self) -> int | None:
        """As `Popen.poll`."""
        return self._nursery.code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`."""
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self._nursery.code_of(self.pid, deadline)) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["a forked rank"], timeout or 0.0)
        return code


class _Nursery:
    """The parent's end of one nursery."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(_SELF), str(theirs.fileno()), str(os.getpid())],
            env=dict(env),
            cwd=_SELF.parent.parent,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._socket.send(pickle.dumps(sys.path))
        self._codes: dict[int, int] = {}  # of those that have ended

    def fork(self, env: Mapping[str, str], fds: tuple[int, int, int]) -> Forked:
        """A new rank process; `fds` become its stdin, its stdout and stderr, and its command's."""
        try:
            socket.send_fds(self._socket, [pickle.dumps(dict(env))], fds)
            while (pid := self._receive()) is None:
                pass
        except OSError as error:
            raise RuntimeError("the process that forks the ranks is gone") from error
        self._codes.pop(pid, None)  # numbers come again
        return Forked(pid, self)

    def code_of(self, pid: int, deadline: float = 0.0) -> int | None:
        """The exit code, negative for a signal; None while it runs, until the deadline."""
        left_s = max(0.0, deadline - time.monotonic())
        try:
            while pid not in self._codes and select.select([self._socket], [], [], left_s)[0]:
                self._receive()
        except OSError:  # the nursery is gone, and they with it
            return -signal.SIGKILL
        return self._codes.get(pid)

    def _receive(self) -> int | None:
        """Take one message; the pid if it is a new process's."""
        data = self._socket.recv(MESSAGE_BYTES)
        if not data:
            raise ConnectionResetError
        pid, code = pickle.loads(data)
        if code is None:
            return int(pid)
        self._codes[pid] = code
        return None

    def close(self) -> None:
        """End it, and whatever it has forked."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


_nurseries: dict[int, _Nursery] = {}


def fork(
    rank: int, common: Mapping[str, str], env: Mapping[str, str], fds: tuple[int, int, int]
) -> Forked:
    """A process that is about to run `_rank_worker.serve`.

    Args:
        rank: its number.
        common: the environment of all ranks, when this is first called; their nurseries' too.
        env: the environment of this one.
        fds: become its stdin, its stdout and stderr, and the end of its pipe to the parent.

    Raises:
        RuntimeError: the nursery is gone.
    """
    kind = rank % KINDS
    nursery = _nurseries.get(kind)
    if nursery is None or nursery.process.poll() is not None:
        nursery = _nurseries[kind] = _Nursery(common)
    return nursery.fork(env, fds)


def close() -> None:
    """End all nurseries; the next `fork` starts new ones."""
    while _nurseries:
        _nurseries.popitem()[1].close()


# ---- the nursery ---------------------------------------------------------------------------------


def _main() -> None:
    import importlib

    from _rank_worker import end_with_parent, serve

    end_with_parent(int(sys.argv[2]))
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    sys.path[:] = pickle.loads(requests.recv(MESSAGE_BYTES))
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what looks through all objects need not look at these in every rank
    conn = _tend(requests)
    serve(conn)  # here: to end as a script does, after the last line


def _tend(requests: socket.socket) -> int:
    """Fork until the parent goes. Returns in the children only: the pipe's descriptor."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        select.select([requests, read], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(read, MESSAGE_BYTES)
        _report_ends(requests)
        if not select.select([requests], [], [], 0)[0]:
            continue
        data, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            os.close(read)
            os.close(write)
            return _become_rank(requests, pickle.loads(data), fds)
        for fd in fds:
            os.close(fd)


def _report_ends(requests: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            with contextlib.suppress(BrokenPipeError):
                requests.send(pickle.dumps((ended[0], code)))


def _become_rank(requests: socket.socket, env: dict[str, str], fds: list[int]) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # one killpg gets grandchildren
    os.environ.clear()
    os.environ.update(env)
    stdin, output, conn = fds
    for fd, target in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    os.close(stdin)
    os.close(output)
    requests.send(pickle.dumps((os.getpid(), None)))  # by now it can be killed
    requests.close()
    return conn


if __name__ == "__main__":
    _main()
