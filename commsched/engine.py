"""The engine: one thread that issues a plan's tasks, in its order, as they become ready.

Order is the engine's whole point. gloo pairs collectives by the order in which each rank issues
them; two ranks that disagree mix up gradients silently or abort. So one thread issues, from one
queue, in plan order; a task that is not ready makes the ones behind it wait.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch

from commsched import codecs
from commsched.blame import CollectiveError, explained
from commsched.checkpoint import Checkpoint
from commsched.errors import CommSchedError
from commsched.flight import Flight
from commsched.group import Membership
from commsched.iterations import Iterations
from commsched.jobs import Job, Progress, Run
from commsched.lane import Lane
from commsched.memory import Memory
from commsched.outstanding import TICK_S, Outstanding
from commsched.packer import Packer
from commsched.planner import Begin, Planner
from commsched.rules import parse_allow, used
from commsched.settings import Settings
from commsched.tracing.tracer import SILENT, Silent
from commsched.tuning.trials import Search

__all__ = ["CLOSED", "Engine"]

CLOSED = "this commsched.State is closed; wrap the model in a new DDP, with a new State"

logger = logging.getLogger("commsched")
T = TypeVar("T")


class Engine:
    """Runs the iterations of one model on one lane.

    The training thread calls the public methods; everything else happens on the engine's thread,
    which the queue feeds. What both sides touch is in `_outstanding`.
    """

    def __init__(
        self,
        member: Membership,
        settings: Settings,
        memory: Memory,
        optimizer: bool = False,
        resumed: Checkpoint | None = None,
        search: Search | None = None,
        tracer: Silent = SILENT,
    ) -> None:
        self.settings = settings
        self.tracer = tracer
        # What may differ between ranks though settings are equal.
        self._done = {
            "optimizer": optimizer,
            "resumed": resumed.digest if resumed else "nothing",
            # In them ranks compare their clocks.
            "trace_steps (empty where trace is not set)": tracer.steps,
        }
        may_use = [*used(settings), *parse_allow(settings.allow)]
        if not all(codecs.get(codec).bitwise for codec in may_use):
            self._done["torch.get_num_threads()"] = torch.get_num_threads()
            self._done["CPU capability"] = torch.backends.cpu.get_cpu_capability()
        self._memory = memory
        self.planner = Planner(settings, len(member.ranks), resumed, search)
        self._flight = Flight(
            Packer(member.rank, len(member.ranks), memory, settings.error_feedback), tracer
        )
        self._lane: Lane | None = None
        self._tasks = 0  # of a lane that was left
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outstanding = Outstanding()
        self._beat_s = time.monotonic()  # when the engine's thread was last seen to move
        self._stopping = threading.Event()
        self._announce = False
        self._retiring = False
        self._iterations = Iterations(self.planner, memory, self._outstanding, tracer)
        self._thread = threading.Thread(
            target=self._main, args=(member,), name="commsched-engine", daemon=True
        )
        self._thread.start()

    @property
    def wire_bytes(self) -> int:
        """Bytes sent since the start, by our own count."""
        return self._flight.wire_bytes

    @property
    def tasks(self) -> int:
        """Tasks issued since the start, and conversations held."""
        lane = self._lane  # the engine's thread may be leaving it
        return self._tasks if lane is None else lane.sequence

    @property
    def failed(self) -> bool:
        """Whether it has stopped for another reason than `close`."""
        error = self._outstanding.error
        return error is not None and str(error) != CLOSED

    @property
    def issued(self) -> list[tuple[str, int]]:
        """The tasks issued last, in order: digest of the plan, index in it."""
        return list(self._flight.issued)

    # ---- called by the training thread -----------------------------------------------------

    def submit(self, job: Job, begins: Begin | None = None) -> None:
        """Hand over a bucket.

        Args:
            job: the bucket.
            begins: given with the first one of a new iteration.

        Raises:
            CommSchedError: the engine has failed, or was closed.
        """
        self._outstanding.add(job)
        self._queue.put(partial(self._on_ready, job, begins))

    def watch(self, job: Job) -> None:
        """Take part in waiting for a bucket that is summed elsewhere (see `plain`).

        Raises:
            CommSchedError: the engine has failed, or was closed.
        """
        self._beat_s = time.monotonic()  # nothing is asked of the engine's thread
        self._outstanding.add(job)

    def count_step(self) -> None:
        """A step begins whose buckets are all summed elsewhere."""
        self._queue.put(self._count)

    def summed(self, job: Job, params: Iterable[int]) -> None:
        """It is summed: all its parameters."""
        job.task_done(params)
        self._outstanding.finish(job)
        job.progress.task_done()
        self._outstanding.tell()

    def look_at_peers(self) -> None:
        """Something summed elsewhere is late: has another rank failed?"""
        self._queue.put(self._look_at_peers)

    def lose(self, what: str) -> None:
        """Something summed elsewhere has failed: fail, naming the ranks that are missing."""
        self._queue.put(partial(self._lose, what))

    def raise_error(self) -> None:
        """Raise what the engine has failed with, if it has."""
        self._outstanding.raise_error()

    def end(self, progress: Progress) -> None:
        """No more buckets will come in this iteration: send what was waiting to be fused."""
        self._queue.put(partial(self._iterations.on_end, progress))

    def wait(self, done: Callable[[], object]) -> None:
        """Wait until `done()` is true, or the engine has failed.

        Ctrl-C works while waiting. `done` must become true by something the engine's thread does.
        """
        self._outstanding.wait(done, self._check_alive)

    def _check_alive(self) -> None:
        silent_s = time.monotonic() - self._beat_s
        if not self._thread.is_alive() or silent_s > self.settings.timeout_s + 10 * TICK_S:
            last = self._flight.last
            what = "meeting the other ranks" if last is None else last[0].describe(last[1])
            self.fail(
                CommSchedError(
                    f"the engine has stood still for {silent_s:.0f} s; it was last at: {what}. "
                    "The job's store or a rank does not answer. The process must be restarted."
                )
            )

    def fail(self, error: BaseException, announce: bool = True) -> None:
        """Stop for good: every unfinished job gets `error`, and so does every later call.

        Args:
            error: what to say.
            announce: tell the other ranks, also where none of our tasks is under way.
        """
        self._announce = self._announce or announce
        self._stopping.set()
        self._outstanding.fail(error)
        self._queue.put(lambda: None)

    def synchronize(self) -> None:
        """Wait until every submitted job is finished.

        Raises:
            CommSchedError: one failed.
        """
        for job in self._outstanding.jobs():
            self.wait(job.done.is_set)
        self.raise_error()

    def ask(self, question: Callable[[Lane], T]) -> T:
        """Have the engine's thread answer, after all that was submitted so far.

        Once `synchronize` has returned, nothing is under way, and what the last iteration still
        had to agree on is agreed on. A question that needs the other ranks is a collective.

        Raises:
            CommSchedError: it failed, or other ranks did not take part.
        """
        answer: list[T] = []

        def hold() -> None:
            assert self._lane is not None
            answer.append(question(self._lane))
            self._outstanding.tell()

        self._queue.put(hold)
        self.wait(lambda: answer)
        self.raise_error()
        return answer[0]

    def retire(self) -> None:
        """Close as soon as nothing is outstanding; does not wait."""
        self._retiring = True
        self._queue.put(lambda: None)

    def close(self) -> None:
        """End the thread and the group. Unfinished jobs get an error. Safe to call again."""
        self.fail(CommSchedError(CLOSED), announce=False)
        # Garbage collection may run this on the engine's own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(3 * TICK_S)
            if self._thread.is_alive():
                logger.warning("the engine's thread is still waiting for other ranks")

    # ---- the engine's thread ---------------------------------------------------------------

    def _main(self, member: Membership) -> None:
        lane = None
        try:
            with torch.no_grad():
                self._lane = lane = Lane(
                    member, self.settings, self._stopping, self._post, self._done, self.tracer
                )
                while not self._stopping.is_set():
                    self._turn(lane)
        except BaseException as error:
            if not self._stopping.is_set():  # else whoever stopped us has told everybody
                self.fail(explained(error))
        if lane is not None:
            self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        if self._announce or self._flight.on_the_wire() or self._iterations.running.order:
            # Others wait for us, whoever stopped us: an error here, Ctrl-C, close().
            lane.announce(self._outstanding.error)
        if self._flight.on_the_wire():
            lane.group.abandon()
        lane.leave()
        self._tasks, self._lane = lane.sequence, None
        # They hold gradients.
        self._flight.clear()
        self._iterations.clear()

    def _turn(self, lane: Lane) -> None:
        try:
            event = self._queue.get(timeout=TICK_S if self._flight.on_the_wire() else None)
        except queue.Empty:
            event = partial(self._on_tick, lane)
        self._beat_s = time.monotonic()
        try:
            event()
        except CollectiveError as error:
            raise lane.lost(str(error), error.run.sequence) from None
        if self._stopping.is_set():
            return  # the buffers belong to the training program again
        self._pump(lane)
        while self._iterations.close(lane, self._flight.over()):
            self._pump(lane)
        if self._retiring and not self._outstanding.jobs():
            self.fail(CommSchedError(CLOSED), announce=False)

    def _pump(self, lane: Lane) -> None:
        """Issue what may go, then decode what has come, then encode the next one ahead.

        In this order the wire never waits for a decode, and the next task is encoded while the
        present ones travel.
        """
        self._issue_ready(lane)
        while (run := self._flight.decode_next()) is not None:
            self._finish(run)
            self._issue_ready(lane)
        head = self._iterations.running.head()
        if head is not None:
            self._flight.encode(head)

    def _issue_ready(self, lane: Lane) -> None:
        iteration = self._iterations.running
        while (run := iteration.head()) is not None and self._flight.has_room(run):
            iteration.order.popleft()
            if run.unknown:
                # Ranks with other buckets would sum different gradients, or crash gloo with a size
                # it does not expect. Checked here, in the lane's order, and only while buckets are
                # new.
                self.planner.compare(lane, run.plan.layout)
            self._flight.issue(run, lane)

    def _on_ready(self, job: Job, begins: Begin | None) -> None:
        assert self._lane is not None
        self._iterations.on_ready(self._lane, job, begins)

    def _post(self, lane: Lane, run: Run, future: torch.futures.Future[Any]) -> None:
        now_s = time.monotonic()  # the engine's thread may be busy
        self._queue.put(partial(self._flight.on_collective, lane, run, future, now_s))

    def _on_tick(self, lane: Lane) -> None:
        lane.check_peers()
        self._flight.check_deadline(self.settings.timeout_s)

    def _count(self) -> None:
        assert self._lane is not None
        # So that a rank that is a step behind shows on the board, and can be named as missing.
        self._lane.sequence += 1
        self._iterations.count()

    def _look_at_peers(self) -> None:
        assert self._lane is not None
        self._lane.check_peers()

    def _lose(self, what: str) -> None:
        assert self._lane is not None
        raise self._lane.lost(what, self._lane.sequence - 1)

    def _finish(self, run: Run) -> None:
        for bucket, job in run.jobs.items():
            job.task_done(run.covers[bucket])
            if job.tasks_left == 0:
                self._outstanding.finish(job)
            job.progress.task_done()
        self._outstanding.tell()
