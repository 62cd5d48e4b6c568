"""The live object behind one State once the first bucket has come: the training thread's side."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from commsched import policies
from commsched.checkpoint import Checkpoint, cut_by, gathered
from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.gauge import Gauge
from commsched.group import Membership, timeout_of
from commsched.jobs import Job, Progress
from commsched.lane import Lane
from commsched.memory import Memory
from commsched.model import Buckets
from commsched.observer import Observer, tracer_of
from commsched.overlap import Overlap
from commsched.plain import Plain
from commsched.planner import Begin
from commsched.recorder import Recorder, stats_order
from commsched.settings import Settings
from commsched.tuning.steering import Mode, Steering
from commsched.tuning.trials import Search

__all__ = ["Session"]

logger = logging.getLogger("commsched")

SLACK = 1 / 8  # so much is sent in about the time in which the reducer copies the rest


class _Step:
    """The buckets of one backward."""

    def __init__(self, slack: float, mode: Mode) -> None:
        self.progress = Progress(slack)
        self.jobs: list[Job] = []
        self.keys: list[int] = []
        self.graph_tasks: set[int] = set()  # autograd's ids, of those that have our callback
        self.mode = mode
        self.saw_last = False
        self.ended = False


class Session:
    """Takes DDP's buckets, gives them to the engine, and waits for them at the end of backward.

    It waits in Python, not in the reducer's C++, so that Ctrl-C works and the wait is measured. The
    callback that DDP's first hook call queues runs after all of backward's computing and before the
    reducer waits for its futures. With handed-over optimizers (`overlap`) it does not wait there,
    but where the next forward reads the parameters.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        settings: Settings,
        buckets: Buckets,
        optimizers: tuple[Optimizer, ...] = (),
        resumed: Checkpoint | None = None,
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        timeout_s = settings.timeout_s or timeout_of(process_group)
        auto, ddp = settings.policy == policies.AUTO, buckets.ddp
        policy = "fifo" if auto else settings.policy
        self.settings = settings = replace(settings, timeout_s=timeout_s, policy=policy)
        self.buckets = buckets
        self.memory = Memory()
        self._member = member = Membership(process_group, buckets.digest)
        if resumed is not None:
            resumed = self._restore(resumed)
        # Before any thread is started, since it may refuse.
        if optimizers:
            Overlap.refuse(ddp, optimizers)
        self.tracer = tracer_of(settings, member, buckets.digest, bool(optimizers))
        search = None
        if auto and ddp is not None:
            search = Search(fixed, bool(optimizers), buckets.digest)
        self.engine = Engine(
            member, settings, self.memory, bool(optimizers), resumed, search, self.tracer
        )
        self._plain = Plain(process_group, self.engine, timeout_s, self.tracer)
        self.overlap: Overlap | None = None
        self._meter: Overlap | Gauge | None = None
        self.steering: Steering | None = None
        if ddp is not None and optimizers:
            self._meter = self.overlap = Overlap(ddp, optimizers, self.engine, self.tracer)
        elif ddp is not None and (auto or settings.trace):
            self._meter = Gauge(ddp, Recorder(stats_order(ddp), tracer=self.tracer))
        if ddp is not None and self._meter is not None:
            defers, step = bool(optimizers) and not auto, self.memory.step
            self.steering = Steering(ddp, self.engine, self._meter.recorder, defers, step)
        self.observer = Observer(
            settings, member, self.engine, self._plain, self.steering, self.tracer
        )
        # A static graph's first hooks run in the reducer's last callback, which then waits in C++
        # at once; ours would come too late. Later ones must not wait: others may be needed first.
        in_callback = torch._C._current_autograd_node() is None
        self._wait_in_hook = ddp is not None and ddp.static_graph and in_callback
        # Where DDP leaves out unused buckets, or registers them late, it may never say "last".
        self._says_last_later = ddp is not None and not ddp.skip_all_reduce_unused_params
        self._says_last = self._says_last_later and not self._wait_in_hook
        # Without gradient_as_bucket_view the reducer ends with a copy of all gradients. Letting it
        # begin while the last tasks travel hides that copy.
        copies = ddp is not None and not ddp.gradient_as_bucket_view
        self._slack = SLACK if copies else 0.0
        self._step: _Step | None = None
        self._keys: list[int] = []  # of the latest step
        self._thread = threading.get_ident()  # the training thread

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """One hook call.

        Blocks in a static graph's first backward.
        """
        buffer = bucket.buffer()
        key, spec = self.buckets.recognise(bucket, buffer)
        # A bucket that comes again begins a new step: a backward that raised never ended its own.
        begins = self._begin() if self._step is None or key in self._step.keys else None
        step = self._step
        assert step is not None
        params = bucket.parameters()
        in_backward = self._queue_callback(step)
        deferred = False
        if self.overlap is not None and in_backward and step.mode.deferred:
            deferred = self.overlap.may_defer(params, spec, buffer)
        job = Job(key, spec, buffer, step.progress, deferred)
        step.jobs.append(job)
        step.keys.append(key)
        try:
            if self._meter is not None:
                self._meter.on_bucket(job, params, begins)
            if step.mode.plain:
                self._plain.submit(job, len(step.jobs) - 1)
            else:
                self.engine.submit(job, begins)
        except CommSchedError as error:
            self.engine.fail(error)
            if not in_backward:
                raise  # a joined rank drops the results, and an error in them
            job.finish(error)
        if bucket.is_last():
            step.saw_last = True
            self._end(step)
            self._step = None
        if self._wait_in_hook or (step.mode.plain and not in_backward):
            self._wait(job.done.is_set)
        return job.future

    def _begin(self) -> Begin:
        """A new step."""
        begins, mode, steering = Begin(), Mode(), self.steering
        if steering is not None:
            begins, mode = steering.begin(self._keys)
            steering.advise()
            if self.overlap is not None:
                self.overlap.begin(steering.phases.measuring)
        begins.step = self.observer.begun
        if self.tracer.clock_due(begins.step):
            mode = mode._replace(plain=False)  # ranks talk in the order of the engine's tasks
        if mode.plain:
            self.engine.count_step()
        self.observer.step_begins(mode)
        self._step = _Step(self._slack, mode)
        self._keys = self._step.keys
        return begins

    def _end(self, step: _Step) -> None:
        """All its buckets have come."""
        if step.mode.plain:
            step.progress.end()
        else:
            self.engine.end(step.progress)

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
        self._end(step)
        begin_s = time.monotonic()
        try:
            self._end_measured(step)
            self._wait_for(step)
            self.engine.raise_error()  # here too: not everything that wraps a hook uses its result
        except BaseException:
            ddp = self.buckets.ddp
            if ddp is not None:
                ddp.reducer._reset_state()  # it will not see the end of this backward
            raise
        self.observer.step_ends(step.jobs, begin_s)

    def _end_measured(self, step: _Step) -> None:
        if self._meter is not None:
            self._meter.end_of_backward()
        if self.overlap is None or self.steering is None:
            return
        if not all(self.steering.phases.knows(job.key) for job in step.jobs):
            self.overlap.deferred.make_whole()  # DDP may be about to replace the buckets

    def _wait_for(self, step: _Step) -> None:
        begin_s = time.monotonic()
        with self.tracer.region("wait", "training", step=self.tracer.step, bucket=None):
            if self.overlap is None:
                self._wait(step.progress.near.is_set)
            else:
                self._wait(lambda: all(job.done.is_set() for job in step.jobs if job.visible))
        if self._meter is not None:
            self._meter.recorder.waited(begin_s, time.monotonic())

    def _restore(self, resumed: Checkpoint) -> Checkpoint:
        """Fill the memory; what is needed besides."""
        resumed.refuse_other_model(self.buckets.numels)
        resumed.restore(self.memory, self._member.rank, len(self._member.ranks))
        return resumed.without_tensors()

    def checkpoint(self, gather: bool) -> Checkpoint:
        """What must be saved to go on from here.

        Args:
            gather: all ranks' slots, not only this one's. Collective.
        """
        self.synchronize()
        return self.engine.ask(partial(self._checkpoint, gather))

    def _checkpoint(self, gather: bool, lane: Lane) -> Checkpoint:
        member, planner, memory = self._member, self.engine.planner, self.memory
        slots = {member.rank: memory.slots()}
        if gather:
            own = slots[member.rank]
            rows = lane.agree("gathering errors", partial(gathered, own, lane.group))
            slots = dict(enumerate(rows))
        made, verdict = planner.made, planner.verdict
        return Checkpoint(
            world_size=len(member.ranks),
            step=memory.step,
            params=self.buckets.numels,
            settings=cut_by(planner.active),
            verdict=None if verdict is None else verdict.to_dict(),
            plan="" if made is None else made.plan.to_json(),
            tuning=None if planner.trials is None else planner.trials.to_save,
            factors={
                param: {name: tensor.clone() for name, tensor in factors.items()}
                for param, factors in memory.factors.items()
            },
            slots=slots,
        )

    def synchronize(self) -> None:
        """Wait for all sums, and run all recorded optimizer steps."""
        if self.overlap is not None:
            self.overlap.deferred.make_whole()
        self.engine.synchronize()

    def close(self) -> None:
        """Finish what was begun, if it can be, and end the thread and the group."""
        here = threading.current_thread()
        if here is not threading.main_thread() and here.ident != self._thread:
            # Garbage collection may run anywhere, also where the engine waits for this thread. The
            # model's parameters may live on: they will settle.
            self._plain.retire()
            self.engine.retire()
            return
        try:
            # Within a backward other ranks may wait for buckets that will never come.
            if self.overlap is not None and self._step is None:
                self.overlap.deferred.make_whole()
        except CommSchedError as error:
            logger.error("optimizer steps are lost: %s", error)
        finally:
            if self._meter is not None:
                self._meter.close()
            self.engine.close()
            self._plain.close()
            self.observer.close()

    def _wait(self, done: Callable[[], object]) -> None:
        """Wait until `done()`. An error is left to the jobs' results: they raise in the reducer."""
        try:
            self.engine.wait(done)
        except BaseException as error:  # Ctrl-C
            self.engine.fail(
                CommSchedError(f"interrupted by {type(error).__name__}; restart the process")
            )
            raise
