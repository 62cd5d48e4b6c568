"""The live object behind one State once the first bucket has come: the training thread's side."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from commsched import codecs
from commsched.codecs.feedback import ErrorFeedback
from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.group import Membership, timeout_of
from commsched.jobs import Job, Progress
from commsched.model import Buckets
from commsched.report import Exposure, Report
from commsched.settings import Settings

__all__ = ["Session"]

SLACK = 1 / 8  # so much is sent in about the time in which the reducer copies the rest


class _Step:
    """The buckets of one backward."""

    def __init__(self, slack: float) -> None:
        self.progress = Progress(slack)
        self.jobs: list[Job] = []
        self.keys: set[int] = set()
        self.graph_tasks: set[int] = set()  # autograd's ids, of those that have our callback
        self.saw_last = False
        self.ended = False


class Session:
    """Turns hook calls into jobs and waits for them at the end of backward.

    It waits in Python, not in the reducer's C++, so that Ctrl-C works and the wait is measured. The
    callback that DDP's first hook call queues runs after all of backward's computing and before the
    reducer waits for its futures.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, settings: Settings, buckets: Buckets
    ) -> None:
        timeout_s = settings.timeout_s or timeout_of(process_group)
        self.settings = settings = replace(settings, timeout_s=timeout_s)
        self.buckets = buckets
        self.exposure = Exposure()
        lossy = codecs.get(settings.codec).lossy
        feedback = ErrorFeedback() if lossy and settings.error_feedback else None
        self.engine = Engine(Membership(process_group, buckets.digest), settings, feedback)
        ddp = buckets.ddp
        # Where DDP leaves out unused buckets, or registers them late, it may never say "last".
        self._says_last_later = ddp is not None and not ddp.skip_all_reduce_unused_params
        self._says_last = self._says_last_later and not (ddp is not None and ddp.static_graph)
        # A static graph's first hooks run in the reducer's last callback, which then waits in C++
        # at once; ours would come too late.
        self._wait_in_hook = ddp is not None and ddp.static_graph
        # Without gradient_as_bucket_view the reducer ends with a copy of all gradients. Letting it
        # begin while the last tasks travel hides that copy.
        copies = ddp is not None and not ddp.gradient_as_bucket_view
        self._slack = SLACK if copies else 0.0
        self._step: _Step | None = None

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """One hook call. Never blocks, but for a static graph's first backward."""
        buffer = bucket.buffer()
        key, spec = self.buckets.recognise(bucket, buffer)
        # A bucket that comes again begins a new step: a backward that raised never ended its own.
        begins = self._step is None or key in self._step.keys
        step = _Step(self._slack) if begins or self._step is None else self._step
        self._step = step
        job = Job(key, spec, buffer, step.progress)
        step.jobs.append(job)
        step.keys.add(key)
        in_backward = self._queue_callback(step)
        try:
            self.engine.submit(job, begins)
        except CommSchedError as error:
            if not in_backward:
                raise  # a joined rank drops the results, and an error in them
            job.finish(error)
        if bucket.is_last():
            step.saw_last = True
            self.engine.end(step.progress)
            self._step = None
        if self._wait_in_hook:
            self._wait(job.done)
        return job.future

    def report(self) -> Report:
        """What was measured so far."""
        engine, plan = self.engine, self.engine.plan
        digest = None if plan is None else plan.digest
        settings = self.settings
        return self.exposure.report(engine.wire_bytes, settings.codec, settings.policy, digest)

    def _queue_callback(self, step: _Step) -> bool:
        """Have `_end_of_backward` called; False outside a backward (join's shadow calls).

        Once for each of autograd's graph tasks: reentrant checkpointing runs backwards within the
        backward, and a callback belongs to the one that is running.
        """
        graph_task: int = torch._C._current_graph_task_id()
        if graph_task == -1:
            return False
        if graph_task not in step.graph_tasks:
            step.graph_tasks.add(graph_task)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end_of_backward, step))
        return True

    def _end_of_backward(self, step: _Step) -> None:
        if step.ended or (self._says_last and not step.saw_last):
            return  # in an inner backward more buckets will come; after it all is done
        step.ended = True
        if self._step is step:
            self._step = None
        if self._wait_in_hook:
            self._wait_in_hook, self._says_last = False, self._says_last_later
        self.engine.end(step.progress)
        begin_s = time.monotonic()
        try:
            self._wait(step.progress.near)
            self.engine.raise_error()  # here too: not everything that wraps a hook uses its result
        except BaseException:
            ddp = self.buckets.ddp
            if ddp is not None:
                ddp.reducer._reset_state()  # it will not see the end of this backward
            raise
        self.exposure.add([job.timing for job in step.jobs], begin_s)

    def _wait(self, event: threading.Event) -> None:
        """Wait for `event`. An error is left to the jobs' results, which raise in the reducer."""
        try:
            self.engine.wait(event)
        except BaseException as error:  # Ctrl-C
            self.engine.fail(
                CommSchedError(f"interrupted by {type(error).__name__}; restart the process")
            )
            raise
