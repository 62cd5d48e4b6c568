"""What the training thread and the engine hand each other: jobs; and what the engine makes of them.

A job is one bucket of one iteration; a run is one task of one iteration, over one or more jobs.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from commsched.codecs import Codec
from commsched.codecs import get as get_codec
from commsched.exchange import Stages
from commsched.layout import BucketSpec, Chunk
from commsched.plan import Plan, Task

__all__ = ["Job", "Run"]


class Job:
    """One bucket of one iteration, from the hook's call until its gradients are averaged.

    The training thread makes it and waits for `done`; after submitting it only the engine's
    thread writes to it.
    """

    def __init__(self, key: int, spec: BucketSpec, buffer: torch.Tensor) -> None:
        self.key = key  # equal for equal buckets of one model, on this rank
        self.spec = spec
        self.buffer = buffer
        self.result = buffer
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.tasks_left = 0
        self.ready_s = time.monotonic()
        self.done_s = 0.0

    def finish(self, error: BaseException | None = None) -> None:
        """Hand the result, or the error, to whoever waits. Once only."""
        self.error = error
        self.done_s = time.monotonic()
        self.future.set_result(self.result)
        self.done.set()

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """The future's continuation: DDP only sees errors that a continuation raises."""
        if self.error is not None:
            raise self.error
        return future.value()


@dataclass(eq=False)
class Run:
    """One task of one iteration, as it goes through the engine."""

    task: Task
    plan: Plan
    missing: set[int]  # plan bucket indices whose gradients have not come
    jobs: dict[int, Job] = field(default_factory=dict)
    flat: torch.Tensor | None = None  # the chunk's gradients, 1-D
    wire: torch.Tensor | None = None  # what travels; `flat` itself for codec none
    stages: Stages | None = None
    sequence: int = 0  # how many tasks this lane had issued before it
    issued_s: float = 0.0

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

    @property
    def cost(self) -> int:
        """Bytes of credit it takes."""
        return self.task.wire_bytes

    def views(self) -> list[torch.Tensor]:
        """The bucket ranges it carries, in order."""
        return [
            self.jobs[piece.bucket].buffer[piece.start : piece.start + piece.numel]
            for piece in self.chunk.pieces
        ]
