"""Flight: the tasks of one lane that are on the wire, and those that have come back."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from commsched.blame import CollectiveError, blaming
from commsched.exchange import Transfer
from commsched.jobs import Run
from commsched.lane import Lane
from commsched.packer import Packer
from commsched.plan import Plan, Task
from commsched.tracing.captions import Captions
from commsched.tracing.ranges import profiled
from commsched.tracing.tracer import SILENT, Silent

__all__ = ["Flight"]

HISTORY = 4096  # issued tasks remembered, for tests and for a look at a stuck job


class Flight:
    """Encodes, issues and decodes tasks. On the engine's thread, which decides which and when.

    Args:
        packer: encodes and decodes.
        tracer: told of what is done.

    Attributes:
        issued: plan digest and index of the last tasks, in the order in which they were issued.
        last: the task issued last. Not its run: that holds gradients.
        wire_bytes: sent since the start, by our own count.
    """

    def __init__(self, packer: Packer, tracer: Silent = SILENT) -> None:
        self.issued: deque[tuple[str, int]] = deque(maxlen=HISTORY)
        self.last: tuple[Plan, Task] | None = None
        self.wire_bytes = 0
        self._packer = packer
        self._tracer = tracer
        self._captions = Captions()
        self._runs: list[Run] = []
        self._arrived: deque[tuple[Run, torch.Tensor]] = deque()

    def on_the_wire(self) -> bool:
        """Whether any task is."""
        return bool(self._runs)

    def over(self) -> bool:
        """Whether all that was issued has come back and is decoded."""
        return not self._runs and not self._arrived

    def bytes_on_the_wire(self) -> int:
        """Encoded bytes of the tasks on the wire."""
        return sum(run.task.wire_bytes for run in self._runs)

    def has_room(self, run: Run) -> bool:
        """Whether credit allows one more."""
        used = self.bytes_on_the_wire()
        return not used or used + run.task.wire_bytes <= run.plan.credit_bytes

    def encode(self, run: Run) -> Transfer:
        """What it sends; nothing is done twice."""
        if run.transfer is None:
            with blaming(run), self._region("encode", run):
                run.transfer = self._packer.pack(run)
        return run.transfer

    def _region(self, name: str, run: Run) -> AbstractContextManager[object]:
        tracer = self._tracer
        return tracer.region(name, "engine", partial(self._captions.of, run), step=tracer.step)

    def issue(self, run: Run, lane: Lane) -> None:
        """Put it on the wire."""
        transfer = self.encode(run)
        run.stages = transfer.start(lane.group)
        self.last = run.plan, run.task
        run.sequence = lane.sequence
        run.issued_s = time.monotonic()
        lane.sequence += 1
        self.issued.append((run.plan.digest, run.task.index))
        self.wire_bytes += transfer.sent_bytes
        self._runs.append(run)
        with profiled("comm"):
            lane.watch(run, next(run.stages))
        if self._tracer.on:
            caption, step = self._captions.of(run), self._tracer.step
            self._tracer.queued(run.ready_s, run.issued_s, caption, step=step)

    def on_collective(
        self, lane: Lane, run: Run, future: torch.futures.Future[Any], at_s: float = 0.0
    ) -> None:
        """A collective of it is done, and was so at `at_s`.

        Raises:
            CollectiveError: or has failed.
        """
        assert run.stages is not None
        try:
            tensors = future.value()
        except Exception as error:
            raise CollectiveError(run, str(error).strip()) from None
        try:
            work = run.stages.send(tensors)
        except StopIteration as stop:
            self._runs.remove(run)
            self._arrived.append((run, stop.value))
            self._landed(run, at_s)
        else:
            lane.watch(run, work)

    def _landed(self, run: Run, at_s: float) -> None:
        run.arrived_s = at_s
        if self._tracer.on:
            caption, step = self._captions.of(run), self._tracer.step
            self._tracer.flight(run.issued_s, at_s, caption, step=step)

    def decode_next(self) -> Run | None:
        """Decode the next task that has come back into its buckets; None if there is none."""
        if not self._arrived:
            return None
        run, total = self._arrived.popleft()
        with blaming(run), self._region("decode", run):
            self._packer.unpack(run, total)
        run.done = True
        return run

    def check_deadline(self, timeout_s: float) -> None:
        """Raise if a task has been on the wire for longer than `timeout_s` seconds.

        Raises:
            CollectiveError: one has.
        """
        run = min(self._runs, key=lambda run: run.issued_s)
        late_s = time.monotonic() - run.issued_s
        if late_s > timeout_s:
            raise CollectiveError(run, f"not done {late_s:.1f} s after it was issued")

    def clear(self) -> None:
        """Let go of everything: it holds gradients."""
        self._runs.clear()
        self._arrived.clear()
