"""Plain: torch's own all-reduce of each bucket, where nothing we could do is faster.

The training thread scales each bucket and starts its all-reduce on DDP's group in the hook call, as
torch's own hook does; a thread waits for them in that order. No plan and no engine: what is
reported, and how errors reach the training program, is as it is with them.

Not on another thread, though scaling takes a pass over the gradients that DDP without a hook has in
its copy into the bucket: with find_unused_parameters DDP itself sums on this group right after the
last hook call, and all ranks must start the same sums in the same order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commsched.engine import Engine
from commsched.exchange import wire_bytes
from commsched.group import abandon
from commsched.jobs import Job
from commsched.layout import first_names
from commsched.outstanding import TICK_S
from commsched.packer import divided_first, real
from commsched.tracing.tracer import SILENT, Silent

__all__ = ["Plain"]


class Plain:
    """All-reduces the buckets of one model on DDP's own group.

    Not our group: only the engine's thread may use that.

    Args:
        group: DDP's.
        engine: counts the jobs, and tells the other ranks when one fails.
        timeout_s: the longest that a bucket may take.
        tracer: is told of buckets.

    Attributes:
        wire_bytes: sent since the start, by our own count.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        engine: Engine,
        timeout_s: float,
        tracer: Silent = SILENT,
    ) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._engine = engine
        self._timeout_s = timeout_s
        self._tracer = tracer
        self.wire_bytes = 0
        self._works: queue.SimpleQueue[tuple[Job, dist.Work] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job, place: int) -> None:
        """Start summing a bucket.

        Args:
            job: the bucket.
            place: among those of this step.

        Raises:
            CommSchedError: the engine has failed, or was closed.
        """
        self._engine.watch(job)
        job.add_task(range(len(job.spec.params)))
        job.placed()
        job.place = place
        self._trace("ready", job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="commsched-plain", daemon=True)
            self._thread.start()
        with torch.no_grad():  # backward(create_graph=True) turns it on
            self._start(job)

    def retire(self) -> None:
        """End the thread once nothing is outstanding; does not wait."""
        self._works.put(None)

    def close(self) -> None:
        """End the thread."""
        self.retire()
        if self._thread is not None:
            self._thread.join(5 * TICK_S)

    def _start(self, job: Job) -> None:
        if job.spec.sparse:
            job.buffer = job.buffer * (1.0 / self._size)
        elif divided_first(job.buffer.dtype):
            job.buffer.mul_(1.0 / self._size)
        self.wire_bytes += wire_bytes(job.buffer, self._size)
        try:
            work = self._group.allreduce([real(job.buffer)])
        except RuntimeError as error:
            self._fail(job, str(error).strip())
        else:
            self._works.put((job, work))

    def _wait(self) -> None:
        while (item := self._works.get()) is not None:
            job, work = item
            began_s = time.monotonic()
            while not work.is_completed() and not job.done.is_set():
                with contextlib.suppress(RuntimeError):  # late, or failed: see below
                    work.wait(timedelta(seconds=TICK_S))
                    break
                self._look(job, time.monotonic() - began_s)
            if not work.is_completed():
                # Given up. torch's destructor of the group would join a thread that is stuck.
                abandon(self._group)
            elif not job.done.is_set():
                self._finish(job, work)
            del item, job, work  # they hold gradients

    def _look(self, job: Job, waited_s: float) -> None:
        """It is late."""
        self._engine.look_at_peers()
        if waited_s > self._timeout_s:
            self._fail(job, f"not done after {waited_s:.1f} s")

    def _finish(self, job: Job, work: dist.Work) -> None:
        try:
            (total,) = work.get_future().value()
        except Exception as error:
            self._fail(job, str(error).strip())
            return
        if job.spec.sparse:
            job.result = total
        elif not divided_first(total.dtype):
            with torch.no_grad():
                total.div_(self._size, rounding_mode="trunc")
        self._trace("comm", job)
        self._engine.summed(job, range(len(job.spec.params)))

    def _trace(self, what: str, job: Job) -> None:
        tracer, begin_s = self._tracer, job.timing.ready_s
        if not tracer.on:
            return
        names = first_names(param.name for param in job.spec.params)
        args: dict[str, Any] = {"step": tracer.step, "bytes": job.spec.nbytes, "params": names}
        if what == "ready":
            tracer.instant(what, "buckets", begin_s, bucket=job.place, **args)
        else:
            sent = wire_bytes(job.buffer, self._size)
            args |= {"op": "all_reduce", "codec": "none", "sent_bytes": sent}
            tracer.flight(begin_s, time.monotonic(), bucket=[job.place], **args)

    def _fail(self, job: Job, why: str) -> None:
        names = first_names(param.name for param in job.spec.params)
        self._engine.lose(f"torch's all-reduce of the bucket of {names} failed: {why}")
