"""What the training thread and the engine hand each other: jobs; and what the engine makes of them.

A job is one bucket of one iteration; a run is one task of one iteration, over one or more jobs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from commsched.codecs import Codec
from commsched.codecs import get as get_codec
from commsched.errors import CommSchedError, fresh
from commsched.exchange import Stages, Transfer
from commsched.layout import BucketSpec, Chunk
from commsched.parcel import Rounds
from commsched.plan import Plan, Task

__all__ = ["Job", "Poison", "Progress", "Run", "Timing"]


TOUCHED = (
    "gradients were changed between backward() and the deferred step, while they were being "
    "summed: by a backward() that the DDP model's forward did not come before, or through a tensor "
    "taken from p.grad before. Take p.grad anew each time, use state.clip_grad_norm_(max_norm), or "
    "call state.synchronize() after backward(): from there on gradients are whole and may be "
    "changed. Or leave optimizer= out"
)


class Poison(torch.Tensor):
    """A result that raises `error` when the reducer uses it.

    The reducer turns an exception of a future into a RuntimeError of its own; one that comes out of
    a tensor operation it lets through, with its type, and stays usable afterwards.
    """

    error: BaseException

    @staticmethod
    def __new__(cls, like: torch.Tensor, error: BaseException) -> Poison:
        """A tensor of `like`'s shape and dtype, without memory."""
        make: Any = torch.Tensor._make_wrapper_subclass
        poison: Poison = make(cls, like.size(), dtype=like.dtype, device=like.device)
        poison.error = error
        return poison

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Whatever is done with it, raise."""
        leaves = tree_leaves((args, kwargs))
        raise fresh(next(leaf.error for leaf in leaves if isinstance(leaf, Poison)))


class Progress:
    """How far the communication of one backward is.

    Args:
        slack: the share of its tasks that may still be on their way when `near` is set.

    The engine's thread counts; the training thread waits for `near`.
    """

    def __init__(self, slack: float = 0.0) -> None:
        self.near = threading.Event()
        self._slack = slack
        self._tasks = 0
        self._left = 0
        self._complete = False

    def add_task(self) -> None:
        """One more task is known."""
        self._tasks += 1
        self._left += 1

    def task_done(self) -> None:
        """A task is done."""
        self._left -= 1
        self._check()

    def end(self) -> None:
        """All tasks are known."""
        self._complete = True
        self._check()

    def _check(self) -> None:
        if self._complete and self._left <= self._slack * self._tasks:
            self.near.set()


@dataclass(slots=True)
class Timing:
    """When one bucket came and when it was averaged (time.monotonic). Outlives its job.

    `waited_s` is how long the training thread stood still for it, where that is not at the end of
    backward.
    """

    spec: BucketSpec
    ready_s: float
    done_s: float = 0.0
    waited_s: float | None = None


class Job:
    """One bucket of one iteration, from the hook's call until its gradients are averaged.

    The training thread makes it; after submitting it only the engine's thread writes to it, or
    whoever fails the engine. `version` and `visible` are the training thread's.

    Args:
        key: equal for equal buckets of one model, on this rank.
        spec: what the bucket holds.
        buffer: the bucket's gradients.
        progress: of the backward it belongs to.
        deferred: nobody waits in the reducer: its future is complete from the start.
    """

    def __init__(
        self,
        key: int,
        spec: BucketSpec,
        buffer: torch.Tensor,
        progress: Progress,
        deferred: bool = False,
    ) -> None:
        self.key = key
        self.spec = spec
        self.result = buffer
        # Same memory, another version counter: that of `buffer` is the one of every `p.grad` in
        # it, and tells whether the user has changed a gradient.
        self.buffer = buffer if spec.sparse else buffer.data
        self.version = buffer._version
        self.visible = not deferred  # whole, and the training program knows it
        self.progress = progress
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.tasks_left = 0
        self.timing = Timing(spec, time.monotonic())
        self.place: int | None = None  # in the plan's layout, where the plan knows it
        self._placed = False  # its tasks are known
        self._left = [0] * len(spec.params)  # tasks that carry each parameter
        self._deferred = deferred
        if deferred:
            self.timing.waited_s = 0.0
            self.future.set_result(buffer)

    def has(self, index: int) -> bool:
        """Whether the gradient at that place is whole, or never will be."""
        return self.error is not None or (self._placed and self._left[index] == 0)

    def complete(self) -> bool:
        """Whether all its gradients are whole, or never will be."""
        return self.error is not None or (self._placed and self.tasks_left == 0)

    def raise_error(self) -> None:
        """Raise what it has failed with, if it has."""
        if self.error is not None:
            raise fresh(self.error)

    def refuse_touched(self) -> None:
        """Raise if a gradient in it was changed since the hook's call, by other hands than ours.

        Raises:
            CommSchedError: says what to do instead.
        """
        if self.result._version != self.version:
            raise CommSchedError(TOUCHED)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Where each parameter begins and ends in the buffer, in elements."""
        stop = 0
        for param in self.spec.params:
            start, stop = stop, stop + param.numel
            yield start, stop

    def placed(self) -> None:
        """All tasks that carry a part of it are known."""
        self._placed = True

    def add_task(self, params: Iterable[int]) -> None:
        """One more task carries a part of it, of the parameters at these places."""
        self.tasks_left += 1
        for index in params:
            self._left[index] += 1
        self.progress.add_task()

    def task_done(self, params: Iterable[int]) -> None:
        """One of its tasks is done."""
        self.tasks_left -= 1
        for index in params:
            self._left[index] -= 1

    def finish(self, error: BaseException | None = None) -> None:
        """Hand the result, or the error, to whoever waits. Once only."""
        result = self.result
        if error is not None:
            self.progress.near.set()
        self.error = error
        self.timing.done_s = time.monotonic()
        if not self._deferred:
            self.future.set_result(result if error is None else Poison(self.result, error))
        self.done.set()


@dataclass(eq=False)
class Run:
    """One task of one iteration, as it goes through the engine."""

    task: Task
    plan: Plan
    missing: set[int]  # plan bucket indices whose gradients have not come
    jobs: dict[int, Job] = field(default_factory=dict)
    step: int = 0  # which iteration
    rounds: Rounds | None = None  # averages its chunk; the same for all tasks of a chunk
    transfer: Transfer | None = None  # what it sends
    following: Transfer | None = None  # what the chunk's next task sends
    stages: Stages | None = None
    sequence: int = 0  # how many tasks this lane had issued before it
    issued_s: float = 0.0
    arrived_s: float = 0.0
    unknown: bool = False  # the first task of a bucket that no agreed plan holds
    after: Run | None = None  # the chunk's task before it
    done: bool = False

    @property
    def ready(self) -> bool:
        """Whether it may be issued."""
        return not self.missing and (self.after is None or self.after.done)

    @property
    def ready_s(self) -> float:
        """When all its gradients were there (time.monotonic)."""
        before_s = 0.0 if self.after is None else self.after.arrived_s
        return max([before_s, *(job.timing.ready_s for job in self.jobs.values())])

    @property
    def covers(self) -> dict[int, tuple[int, ...]]:
        """The places of the parameters it carries, by plan bucket index."""
        return self.plan.covers[self.task.index]

    @property
    def chunk(self) -> Chunk:
        """What it really carries: the task's chunk without the buckets that never came."""
        chunk = self.task.chunk
        present = tuple(piece for piece in chunk.pieces if piece.bucket in self.jobs)
        return Chunk(present, chunk.dtype, chunk.sparse)

    @property
    def codec(self) -> Codec:
        """The task's codec."""
        return get_codec(self.task.codec)

    def views(self) -> list[torch.Tensor]:
        """The bucket ranges it carries, in order."""
        return [
            self.jobs[piece.bucket].buffer[piece.start : piece.start + piece.numel]
            for piece in self.chunk.pieces
        ]
