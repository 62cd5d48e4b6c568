"""Event simulation of a plan on a profile, and the bound that no plan can beat. Pure functions.

The clock starts where backward starts, which is where the last forward ended. All communication of
one iteration is over before its next backward begins, so one cycle tells everything.

The link is one serial lane: what is issued goes one after another at line rate, and a task's
latency alpha is hidden while tasks issued before it are still on the wire. Real transports share
the link between the few tasks in flight: their first one then ends later, their last one does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import torch

from commsched import codecs
from commsched.cutting import cut
from commsched.layout import Chunk, Piece
from commsched.plan import Plan, Task
from commsched.profile import ParamTimes, Profile

__all__ = ["TaskTimes", "Timeline", "ddp", "ideal", "link_seconds", "simulate"]


@dataclass(frozen=True)
class TaskTimes:
    """One task's times, in seconds since backward's start."""

    ready_s: float  # all it waits for is done: its buckets' hooks, or its chunk's reduce-scatter
    issued_s: float  # its turn in the plan has come and credit allows it
    begin_s: float  # its first byte is on the wire
    end_s: float  # it is decoded


@dataclass(frozen=True)
class Timeline:
    """What `simulate` predicts.

    Attributes:
        tasks: times of the plan's tasks, in its order.
        bucket_exposed_s: for each bucket of the layout, how long the training thread waits for it.
        compute_s: a step without any communication.
    """

    tasks: tuple[TaskTimes, ...]
    bucket_exposed_s: tuple[float, ...]
    compute_s: float

    @cached_property
    def exposed_s(self) -> float:
        """Exposed communication: how long the training thread waits in one step."""
        return sum(self.bucket_exposed_s)

    @property
    def step_s(self) -> float:
        """One full cycle: forward, backward, optimizer, the rest, and the waits."""
        return self.compute_s + self.exposed_s


def link_seconds(task: Task, profile: Profile) -> float:
    """How long a task's bytes keep the link of one rank busy, without latency."""
    return task.sent_bytes(profile.world_size) * profile.link.beta_s


NO_CODING: Mapping[str, float] = {}


def simulate(
    plan: Plan,
    profile: Profile,
    deferred: bool = True,
    coding_s: Mapping[str, float] = NO_CODING,
) -> Timeline:
    """Predict one step.

    Args:
        plan: what every rank issues; its layout must be the profile's.
        profile: the model and the link.
        deferred: the optimizer step of a parameter waits until just before the next forward reads
            it, and so does the training thread. False: it waits at the end of backward for all.
        coding_s: by codec, the seconds that the engine's one thread takes to encode and decode a
            byte of gradients (see `pricing.coding_s`). Codecs not in it are taken to be free. What
            this takes away from computing, where both share cores, is not predicted.
    """
    times = tuple(_on_the_wire(plan, profile, coding_s))
    waits = _waits_in_forward if deferred else _waits_after_backward
    exposed_s = [0.0] * len(profile.layout.buckets)
    for bucket, wait_s in waits(plan, profile, times):
        exposed_s[bucket] += wait_s
    return Timeline(times, tuple(exposed_s), profile.compute_s)


def _on_the_wire(
    plan: Plan, profile: Profile, coding_s: Mapping[str, float]
) -> Iterator[TaskTimes]:
    """Issue in plan order: the head waits until it is ready, then until credit allows it.

    One thread encodes, issues and decodes. Half of a codec's time is encoding, before a task can go
    (while those before it travel); the other half is decoding what has come.
    """
    rounds = {task.chunk: task.round + 1 for task in plan.tasks}
    now_s = free_s = 0.0
    used = 0
    in_flight: deque[tuple[float, int]] = deque()  # end, encoded bytes; also of some that ended
    before_s: dict[Chunk, float] = {}  # the end of each chunk's last task
    for task in plan.tasks:
        if task.round:
            ready_s = before_s[task.chunk]
        else:
            ready_s = max(profile.ready_s[piece.bucket] for piece in task.chunk.pieces)
        half_s = coding_s.get(task.codec, 0.0) * task.chunk.nbytes / rounds[task.chunk] / 2
        now_s = max(now_s, ready_s) + half_s
        while in_flight and used + task.wire_bytes > plan.credit_bytes:
            end_s, nbytes = in_flight.popleft()
            now_s = max(now_s, end_s)
            used -= nbytes
        begin_s = max(free_s, now_s + profile.link.alpha_s)
        free_s = begin_s + link_seconds(task, profile)
        in_flight.append((free_s, task.wire_bytes))
        used += task.wire_bytes
        before_s[task.chunk] = free_s + half_s
        yield TaskTimes(ready_s, now_s, begin_s, free_s + half_s)
        now_s += half_s


Waits = Iterator[tuple[int, float]]  # bucket, how long the training thread waits for it


def _waits_in_forward(plan: Plan, profile: Profile, times: Iterable[TaskTimes]) -> Waits:
    done_s: dict[str, float] = {}
    for task, task_times in zip(plan.tasks, times, strict=True):
        for span in plan.layout.spans(task.chunk):
            done_s[span.param] = max(done_s.get(span.param, 0.0), task_times.end_s)
    buckets = _bucket_of(profile)
    late_s = 0.0  # waited so far
    for param, due_s in _due(profile):
        wait_s = max(0.0, done_s.get(param.name, 0.0) - due_s - late_s)
        late_s += wait_s
        yield buckets[param.name], wait_s


def _waits_after_backward(plan: Plan, profile: Profile, times: Iterable[TaskTimes]) -> Waits:
    until_s = profile.backward_s
    for task, task_times in zip(plan.tasks, times, strict=True):
        wait_s = max(0.0, task_times.end_s - until_s)
        until_s += wait_s
        yield task.chunk.pieces[-1].bucket, wait_s


def _bucket_of(profile: Profile) -> Mapping[str, int]:
    buckets = enumerate(profile.layout.buckets)
    return {param.name: index for index, spec in buckets for param in spec.params}


def _due(profile: Profile) -> Iterator[tuple[ParamTimes, float]]:
    """Parameters in the order in which forward reads them, and when it does if it never waits."""
    begin_s = profile.backward_s + profile.other_s
    for param in sorted(profile.params, key=lambda param: param.use_s):
        yield param, begin_s + min(param.use_s, profile.forward_s)
        begin_s += param.optimizer_s


def ddp(profile: Profile) -> Timeline:
    """The prediction for plain DDP: one all-reduce a bucket, all waited for in backward."""
    layout = profile.layout
    chunks = cut(layout, max(1, layout.nbytes), 0)
    tasks = tuple(Task(at, "all_reduce", chunk, "none") for at, chunk in enumerate(chunks))
    return simulate(Plan("ddp", layout, tasks, layout.nbytes), profile, deferred=False)


def ideal(profile: Profile, codec: str = "none") -> float:
    """The step time that no plan can beat, with deferred steps or without.

    The schedule is infinitely divisible and preemptive, without latency and credit; a parameter's
    gradient may leave as soon as it is computed, whatever its bucket. If forward passed parameter
    ``j`` at ``d_j`` without waiting, and its gradient arrives at ``C_j``, the step takes
    ``compute_s + max(0, max_j(C_j - d_j))``: a wait delays all that follows, so that later waits
    shrink by it. Minimising that over preemptive schedules with release times is
    1|pmtn, r_j|L_max, which earliest due date first solves (Horn, 1974; Jackson's rule).
    """
    times = {param.name: (param.ready_s, due_s) for param, due_s in _due(profile)}
    jobs = []
    for index, spec in enumerate(profile.layout.buckets):
        for param in spec.params:
            if param.numel:
                own_s, due_s = times[param.name]
                # A hook is not called before its gradients are there: what contradicts is noise.
                release_s = min(own_s, profile.ready_s[index])
                jobs.append((release_s, due_s, _param_seconds(profile, index, param.numel, codec)))
    return profile.compute_s + max(0.0, _least_lateness(jobs))


def _param_seconds(profile: Profile, bucket: int, numel: int, codec: str) -> float:
    spec = profile.layout.buckets[bucket]
    chunk = Chunk((Piece(bucket, 0, numel),), spec.dtype, spec.sparse)
    fits = not spec.sparse and codecs.get(codec).supports(getattr(torch, spec.dtype))
    name = codec if fits else "none"
    tasks = (Task(0, op, chunk, name, at) for at, op in enumerate(codecs.get(name).ops))
    return sum(link_seconds(task, profile) for task in tasks)


def _least_lateness(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The smallest possible maximum lateness of (release, due, length), preemptive, one machine."""
    waiting: list[tuple[float, float]] = []  # due, what is left
    now_s, late_s = 0.0, float("-inf")
    arrivals = sorted(jobs)
    for at, (release_s, due_s, length_s) in enumerate(arrivals):
        now_s = max(now_s, release_s)
        heappush(waiting, (due_s, length_s))
        until_s = arrivals[at + 1][0] if at + 1 < len(arrivals) else float("inf")
        while waiting and now_s < until_s:
            due_s, left_s = heappop(waiting)
            if now_s + left_s > until_s:
                heappush(waiting, (due_s, now_s + left_s - until_s))
                now_s = until_s
            else:
                now_s += left_s
                late_s = max(late_s, now_s - due_s)
    return late_s
