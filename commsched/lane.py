"""Lane: where tasks are issued. Our own group, and what is known of the other ranks on it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commsched import codecs
from commsched.errors import CommSchedError, SettingsError
from commsched.group import Board, Group, Membership
from commsched.jobs import Run
from commsched.layout import Chunk, Piece
from commsched.outstanding import TICK_S
from commsched.plan import MOST_IN_FLIGHT
from commsched.settings import Settings
from commsched.tracing.tracer import SILENT, Silent
from commsched.version import __version__

__all__ = ["Lane"]

logger = logging.getLogger("commsched")
T = TypeVar("T")


class Lane:
    """One group and the count of tasks issued on it. Used by the engine's thread only."""

    def __init__(
        self,
        member: Membership,
        settings: Settings,
        stopping: threading.Event,
        post: Callable[[Lane, Run, torch.futures.Future[Any]], None],
        done: Mapping[str, Any] | None = None,
        tracer: Silent = SILENT,
    ) -> None:
        """Meet the other ranks, connect, and compare settings. Blocks.

        Args:
            member: the ranks.
            settings: for the deadline, the number of threads, and the comparison.
            stopping: ends every wait.
            post: told of each watched collective that is done, on the waiter's thread.
            done: what else must be alike on all ranks: for the comparison.
            tracer: told of conversations.

        Raises:
            CommSchedError: a rank has not come within the deadline.
            SettingsError: on every rank, when ranks have different settings.
        """
        self.member = member
        self.timeout_s = settings.timeout_s
        self.sequence = 0  # tasks issued on this lane since it was made
        self._stopping = stopping
        self._post = post
        self._tracer = tracer
        self._works: queue.SimpleQueue[tuple[Run, dist.Work] | None] = queue.SimpleQueue()
        own = {**settings.shared(), **(done or {}), "version": __version__}
        self._waiter = threading.Thread(target=self._wait, name="commsched-waiter", daemon=True)
        self.board = Board(member)
        try:
            self.board.join(settings.timeout_s, stopping.is_set)
            self.group = self.agree(
                "connecting",
                lambda: Group(member, self.board, _threads(settings), settings.timeout_s),
            )
            self.agree("comparing", lambda: _compare_settings(self.group, member, own))
        except BaseException as error:
            self.announce(error)
            raise
        self._waiter.start()

    def watch(self, run: Run, work: dist.Work) -> None:
        """Have `post` called when `work` is done. Those issued first are waited for first."""
        self._works.put((run, work))

    def leave(self) -> None:
        """End the waiter's thread."""
        self._works.put(None)
        self._waiter.join(5 * TICK_S)

    def _wait(self) -> None:
        # A thread, not a future's callback: that would run on gloo's thread, and one that comes
        # when a peer's process ends, while this interpreter is being torn down, crashes.
        while (item := self._works.get()) is not None:
            run, work = item
            while not work.is_completed() and not self._stopping.is_set():
                with contextlib.suppress(RuntimeError):  # late, or failed: its future says which
                    work.wait(timedelta(seconds=TICK_S))
            if not self._stopping.is_set():
                self._post(self, run, work.get_future())
            del item, run, work  # they hold gradients

    def agree(self, what: str, conversation: Callable[[], T]) -> T:
        """Hold `conversation`, a blocking one of all ranks, as one more task of the lane.

        Raises:
            CommSchedError: it failed; names the ranks that did not take part.
        """
        sequence, self.sequence = self.sequence, self.sequence + 1
        try:
            with self._tracer.region("agree", "engine", what=what, step=self._tracer.step):
                return conversation()
        except CommSchedError:
            raise
        except RuntimeError as error:
            raise self.lost(f"{what}: {error}", sequence) from error

    def check_peers(self) -> None:
        """Say where this rank is, and hear whether another one has failed.

        Raises:
            CommSchedError: another rank has failed.
        """
        try:
            self.board.say(self.sequence)
            said = self.board.failure()
        except RuntimeError:  # the store's host has gone; the collectives will tell
            logger.debug("the job's store does not answer", exc_info=True)
            return
        if said is not None:
            raise CommSchedError(f"{said}; restart the job")

    def lost(self, what: str, sequence: int) -> CommSchedError:
        """The error for a task that will not complete, with the ranks that are missing from it.

        Args:
            what: the task, its parameters, and what happened to it.
            sequence: how many tasks this lane had issued before it.
        """
        try:
            self.board.say(self.sequence)
            # Ranks that wait as we do get one tick to say so; who stays silent is missing.
            time.sleep(min(1.5 * TICK_S, self.timeout_s))
            missing = self.board.behind(sequence)
            whom = f"ranks that have not said they issued it: {missing or 'none'}"
        except Exception as error:
            whom = f"missing ranks unknown: the job's store does not answer ({error})"
        return CommSchedError(f"{what}. {whom}. The process must be restarted.")

    def announce(self, error: BaseException | None) -> None:
        """Log this rank's failure and tell the others, who need not wait for their deadline."""
        logger.error("rank %d: %s", self.member.global_rank, error)
        try:
            self.board.fail(str(error)[:2000])
        except Exception:
            logger.debug("could not tell the other ranks", exc_info=True)


def _threads(settings: Settings) -> int:
    # As many as tasks of the usual size may be in flight; each holds one while it travels.
    if not settings.chunk_bytes or not settings.credit_bytes:
        return MOST_IN_FLIGHT
    numel = max(1, settings.chunk_bytes // 4)
    chunk = Chunk((Piece(0, 0, numel, math.isqrt(numel)),), "float32")
    wire = codecs.get(settings.codec).wire(chunk)
    return max(2, min(16, settings.credit_bytes // max(1, wire.nbytes)))


def _compare_settings(group: Group, member: Membership, own: dict[str, Any]) -> None:
    rows = [json.loads(row) for row in group.all_gather_bytes(json.dumps(own).encode())]
    differences = []
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name) for row in rows]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            first, second = member.ranks[0], member.ranks[other]
            differences.append(
                f"{name} is {values[0]!r} on rank {first} and {values[other]!r} on rank {second}"
            )
    if differences:
        raise SettingsError(
            "ranks have different settings: " + "; ".join(differences) + ". Set them equally "
            "(keywords of State, or COMMSCHED_* in every rank's environment) and restart the job"
        )
