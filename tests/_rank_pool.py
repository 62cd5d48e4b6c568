"""The parent's side of the multi-rank test harness: processes and pools.

Tests use ``tests.distributed``; this module is what it is built on. The other
end of the socket is ``_rank_worker.py``; it is forked by ``_rank_nursery.py``.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from tests._rank_nursery import Forked, fork
from tests._rank_verdict import Verdict, report

START_TIMEOUT_S = 90.0  # processes, `import torch` on a busy machine, rendezvous
GROUP_TIMEOUT_S = 600.0
PING_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 20.0  # from the end of a body to the end of its fresh process
CLOSE_TIMEOUT_S = 5.0
DUMP_TIMEOUT_S = 2.0
DUMP_STILL = 5  # polls in a row in which no dump grew: a busy machine may stop in one
POLL_S = 0.02  # only for noticing deaths: a result wakes the parent at once
DUMP_SIGNAL = signal.SIGUSR2  # see _rank_worker.py
TAIL_BYTES = 65_536
_WORKER = Path(__file__).resolve().with_name("_rank_worker.py")
# A snapshot: a pool must not inherit what one test's monkeypatch happened to set.
_ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class _Worker:
    """One rank's process as the parent sees it."""

    def __init__(self, rank: int, world_size: int, port: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self.outcome: dict[str, Any] | None = None
        self.ended_at = 0.0  # when the outcome came
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.conn, theirs = Pipe()
        everything = {
            **_ENV,
            "RANK": str(rank),  # these as torchrun sets them
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **env,
        }
        # What is asked for must be there when torch is imported.
        start = _started if env else _forked
        self.process = start(rank, everything, theirs.fileno(), self.log.fileno())
        theirs.close()
        boot = {
            "rank": rank,
            "world_size": world_size,
            "port": port,
            "parent_pid": getattr(self.process, "parent_pid", os.getpid()),
            "sys_path": sys.path,
            "start_timeout_s": START_TIMEOUT_S,
            "group_timeout_s": GROUP_TIMEOUT_S,
        }
        self.send(boot)

    def send(self, message: object) -> None:
        self.outcome = None
        self.log_start = self.log_size()
        with contextlib.suppress(OSError):  # dead already: collect() will say so
            self.conn.send_bytes(pickle.dumps(message))

    def poll(self, until_exit: bool) -> bool:
        """Reads the outcome, if there is one; returns whether the rank is done."""
        dead = self.process.poll() is not None  # asked before reading: no last message is missed
        if self.outcome is None and not self.conn.closed:
            try:
                if self.conn.poll():
                    self.outcome = pickle.loads(self.conn.recv_bytes())
                    self.ended_at = time.monotonic()
            except (EOFError, OSError):
                self.conn.close()
        return dead or (self.outcome is not None and not until_exit)

    def failed(self) -> bool:
        if self.outcome is not None and self.outcome["status"] != "ok":
            return True
        code = self.process.poll()
        return code is not None and (self.outcome is None or code != 0)

    def log_size(self) -> int:
        return os.fstat(self.log.fileno()).st_size

    def log_tail(self, start: int) -> str:
        end = self.log_size()  # pread: the file position is shared with the process
        start = max(start, end - TAIL_BYTES)
        return os.pread(self.log.fileno(), end - start, start).decode(errors="replace")

    def verdict(self, seconds: float) -> Verdict:
        outcome, code = dict(self.outcome or {"status": "exit"}), self.process.poll()
        outcome.pop("leaked", None)
        if outcome.get("value") is not None:
            outcome["value"] = pickle.loads(outcome["value"])
        if code is not None and code < 0:
            outcome.update(status="signal", signal=signal.Signals(-code).name)
        elif code is not None:
            outcome["exit_code"] = code
            if code != 0 and outcome["status"] == "ok":
                outcome["status"] = "exit"
        tail = self.log_tail(self.log_start)
        return Verdict(**{"rank": self.rank, "seconds": seconds, "stderr": tail, **outcome})

    def kill(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.conn.close()
        self.log.close()


def _started(
    rank: int, env: Mapping[str, str], conn: int, log: int
) -> subprocess.Popen[bytes] | Forked:
    return subprocess.Popen(
        [sys.executable, "-u", str(_WORKER), str(conn)],
        env=env,
        cwd=_WORKER.parent.parent,
        pass_fds=[conn],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is pytest's; one killpg gets grandchildren
    )


def _forked(
    rank: int, env: Mapping[str, str], conn: int, log: int
) -> subprocess.Popen[bytes] | Forked:
    with open(os.devnull) as nothing:
        return fork(rank, _ENV, env, (nothing.fileno(), log, conn))


class Pool:
    """``world_size`` processes joined in a gloo default group over loopback."""

    def __init__(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        import torch.distributed as dist

        # Served from here: no port to race for, and it outlives any rank, as torchrun's does.
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self.workers.append(_Worker(rank, world_size, self.store.port, env or {}))
            verdicts = self._collect(START_TIMEOUT_S, grace_s=1.0, until_exit=False)
            if any(verdict.status != "ok" for verdict in verdicts):
                raise RuntimeError(report(f"cannot start {world_size} ranks", verdicts))
        except BaseException:
            self.kill()
            raise

    def run(self, job: dict[str, Any], timeout_s: float, grace_s: float) -> list[Verdict]:
        """Runs a job on all ranks; kills the pool unless it is as good as new afterwards."""
        try:
            self._send(("run", job))
            verdicts = self._collect(timeout_s, grace_s, until_exit=job["fresh"])
            if job["fresh"] or not self._consistent(verdicts):
                self.kill()
                return verdicts
            self._send(("ping", None))
            pings = self._collect(PING_TIMEOUT_S, grace_s=1.0, until_exit=False)
        except BaseException:  # Ctrl-C, pytest-timeout: the ranks are still busy
            self.kill()
            raise
        if all(ping.status == "ok" for ping in pings):
            return verdicts
        self.kill()
        if verdicts[0].status != "ok":
            return verdicts
        broken = "; ".join(str(ping) for ping in pings if ping.status != "ok")
        text = f"the body returned but left the default group unusable: {broken}"
        spoilt: Any = {"status": "raised", "error_type": "GroupUnusableError", "error_text": text}
        return [replace(p, value=v.value, **spoilt) for p, v in zip(pings, verdicts, strict=True)]

    def _consistent(self, verdicts: list[Verdict]) -> bool:
        leaked = any(worker.outcome and worker.outcome["leaked"] for worker in self.workers)
        return not leaked and {v.status for v in verdicts} in ({"ok"}, {"raised"})

    def _send(self, message: object) -> None:
        for worker in self.workers:
            worker.send(message)

    def _collect(self, timeout_s: float, grace_s: float, until_exit: bool) -> list[Verdict]:
        started = time.monotonic()
        pending, failed, failed_at = list(self.workers), None, 0.0

        def limit(worker: _Worker) -> tuple[float, str]:
            if worker.outcome is not None:  # a busy machine must not make its exit a hang
                return worker.ended_at + EXIT_TIMEOUT_S, f"{EXIT_TIMEOUT_S:g} s later"
            if failed is not None and failed_at + grace_s < started + timeout_s:
                reason = f"no result {grace_s:g} s after rank {failed.rank} failed"
                return failed_at + grace_s, reason
            return started + timeout_s, f"no result within {timeout_s:g} s"

        while True:
            pending = [worker for worker in pending if not worker.poll(until_exit)]
            if failed is None:
                failed = next((worker for worker in self.workers if worker.failed()), None)
                failed_at = time.monotonic()
            left_s = max((limit(worker)[0] for worker in pending), default=0.0) - time.monotonic()
            if left_s <= 0:
                break
            conns = [w.conn for w in pending if w.outcome is None and not w.conn.closed]
            if conns:
                wait(conns, timeout=min(POLL_S, left_s))
            else:
                time.sleep(min(POLL_S, left_s))
        seconds = time.monotonic() - started
        hung = _stop_hung([(worker, limit(worker)[1]) for worker in pending], seconds)
        return [hung.get(worker.rank) or worker.verdict(seconds) for worker in self.workers]

    def usable(self) -> bool:
        """Whether all ranks are there, idle."""
        return bool(self.workers) and all(w.process.poll() is None for w in self.workers)

    def kill(self) -> None:
        """Ends every process at once; idempotent."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def close(self) -> None:
        """Lets idle ranks exit by themselves, then kills what is left."""
        self._send(("close", None))
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


def _stop_hung(hung: list[tuple[_Worker, str]], seconds: float) -> dict[int, Verdict]:
    """Asks hung ranks for the stacks of all their threads, then kills them."""
    starts = [worker.log_size() for worker, _ in hung]
    for worker, _ in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, DUMP_SIGNAL)
    deadline, last, still = time.monotonic() + DUMP_TIMEOUT_S, starts, 0
    while hung and still < DUMP_STILL and time.monotonic() < deadline:
        time.sleep(POLL_S)
        sizes = [worker.log_size() for worker, _ in hung]
        begun = all(size > start for size, start in zip(sizes, starts, strict=True))
        still, last = (still + 1 if begun and sizes == last else 0), sizes
    verdicts = {}
    for (worker, reason), start in zip(hung, starts, strict=True):
        stacks, outcome = worker.log_tail(start), worker.outcome or {}
        if outcome:
            error = f"{outcome.get('error_type')}: {outcome.get('error_text')}"
            ended = "returned" if outcome["status"] == "ok" else f"raised {error}"
            reason = f"the body {ended}, but the process was still there {reason}"
        verdicts[worker.rank] = Verdict(
            worker.rank,
            "hung",
            error_type=outcome.get("error_type", ""),
            error_text=reason,
            traceback=stacks,
            seconds=seconds,
            stderr=worker.log_tail(worker.log_start).removesuffix(stacks),
        )
        worker.kill()
    return verdicts
