"""Outstanding jobs: what the training thread waits for, and the error they end with on failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commsched.errors import fresh
from commsched.jobs import Job

__all__ = ["TICK_S", "Outstanding"]

TICK_S = 1.0  # how often whoever waits looks at its deadline and at the board


class Outstanding:
    """The jobs nobody has finished yet. Shared by the training thread and the engine's.

    `_lock` guards `error` and the set of jobs, so that each job is finished exactly once, also when
    the engine fails between two submissions.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        # Re-entrant, both: garbage collection may run `fail` on a thread that holds them.
        self._lock = threading.RLock()
        self._news = threading.Condition(threading.RLock())
        self._jobs: set[Job] = set()

    def add(self, job: Job) -> None:
        """One more job.

        Raises:
            CommSchedError: the engine has failed, or was closed.
        """
        with self._lock:
            self.raise_error()
            self._jobs.add(job)

    def finish(self, job: Job) -> None:
        """Its gradients are averaged; nothing, if it has been given an error meanwhile."""
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
        job.finish()

    def fail(self, error: BaseException) -> None:
        """Every job gets `error`, or an earlier one, and so does every later call."""
        nobody: set[Job] = set()
        with self._lock:
            self.error = self.error or error.with_traceback(None)
            jobs, self._jobs = self._jobs, nobody
        for job in jobs:
            job.finish(self.error)
        self.tell()

    def raise_error(self) -> None:
        """Raise what the engine has failed with, if it has."""
        if self.error is not None:
            raise fresh(self.error)

    def jobs(self) -> list[Job]:
        """Those that are not finished."""
        with self._lock:
            return list(self._jobs)

    def tell(self) -> None:
        """Something that a `wait` may be about has happened."""
        with self._news:
            self._news.notify_all()

    def wait(self, done: Callable[[], object], tick: Callable[[], None]) -> None:
        """Wait until `done()` is true, or there is an error. Ctrl-C works.

        Args:
            done: becomes true by something that is followed by `tell`.
            tick: called every `TICK_S` seconds.
        """
        with self._news:
            while not done() and self.error is None:
                if not self._news.wait(TICK_S):
                    tick()
