"""Order: whatever the delays, all ranks issue the same tasks in the same order."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from commsched import policies
from commsched.engine import Engine
from commsched.group import Membership
from commsched.jobs import Job, Progress
from commsched.layout import BucketSpec, ParamSpec
from commsched.memory import Memory
from commsched.plan import Plan
from commsched.planner import Begin
from commsched.profile import Profile
from commsched.rules import tasks_of
from commsched.settings import Settings
from tests.distributed import ranks
from tests.mixed import registered

BUCKETS, ITERATIONS = 40, 25  # 1000 tasks and more


def shuffled(profile: Profile, settings: Settings) -> Plan:
    """A policy whose order has nothing to do with readiness; only a chunk's own tasks are in it."""
    layout = profile.layout
    rows = list(tasks_of(layout, settings, settings.chunk_bytes))
    turns = [at for at, tasks in enumerate(rows) for _ in tasks]
    random.Random(len(turns)).shuffle(turns)
    left = [iter(tasks) for tasks in rows]
    tasks = tuple(replace(next(left[at]), index=index) for index, at in enumerate(turns))
    return Plan("shuffled", layout, tasks, settings.credit_bytes)


def specs() -> list[BucketSpec]:
    rng = random.Random(1)
    return [
        BucketSpec((ParamSpec(f"p{i}", rng.choice([3, 50, 700])),), "float32")
        for i in range(BUCKETS)
    ]


@pytest.mark.parametrize("codec", ["none", "coarse", "twice", "evens"])
@pytest.mark.parametrize("policy", ["fifo", "shuffled"])
@ranks(2, timeout_s=100)
def test_issue_order_is_equal_under_random_delays(rank: int, policy: str, codec: str) -> None:
    """Also with two tasks a chunk, which wait for each other, and one that goes whole to all."""
    with registered():
        compare_orders(rank, policy, codec)


def compare_orders(rank: int, policy: str, codec: str) -> None:
    policies._POLICIES["shuffled"] = "tests.test_order:shuffled"
    settings = Settings(
        policy=policy,
        codec=codec,
        codec_min_numel=30,  # some are exact
        codec_start_step=0,
        codec_force=True,
        error_feedback="0",
        chunk_mb=0.001,
        fusion_mb=0.0003,
        credit_mb=0.004,
        timeout_s=60.0,
    )
    memory = Memory()
    engine = Engine(Membership(dist.group.WORLD), settings, memory)
    rng = random.Random(100 + rank)  # other delays on the other rank
    for iteration in range(ITERATIONS):
        jobs = []
        progress = Progress()
        for key, spec in enumerate(specs()):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 4e-3)
            buffer = torch.full((spec.numel,), float(key + 100 * rank + iteration))
            jobs.append(Job(key, spec, buffer, progress))
            engine.submit(jobs[-1], Begin() if key == 0 else None)
        engine.end(progress)
        engine.wait(progress.near.is_set)
        for key, job in enumerate(jobs):
            assert job.done.is_set()
            # The mean, and of this bucket: a swap of equal sizes would be silent otherwise.
            job.raise_error()
            mean = key + 50.0 + iteration
            if codec != "evens":
                assert torch.equal(job.result, torch.full_like(job.result, mean))
            else:  # a bucket may begin within a chunk: then its odd ones have travelled
                sent = job.result[::2] if job.result[0] else job.result[1::2]
                assert bool((sent == mean).all())
    issued = engine.issued
    assert engine.planner.made is not None
    plan = engine.planner.made.plan
    engine.close()
    assert len(issued) >= 1000
    theirs: list[list[tuple[str, int]]] = [[], []]
    dist.all_gather_object(theirs, issued)
    assert theirs[0] == theirs[1]
    planned = [index for digest, index in issued if digest == plan.digest]
    assert planned == list(range(len(plan.tasks))) * (ITERATIONS - 1)
    rounds = {task.round for task in plan.tasks}
    assert rounds == ({0, 1} if codec in ("coarse", "twice") else {0})
    assert {task.codec for task in plan.tasks} == ({codec} if codec == "evens" else {codec, "none"})
    assert memory.step == ITERATIONS - 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@ranks(2)
def test_integer_buckets_are_divided_after_the_sum(rank: int, dtype: torch.dtype) -> None:
    settings = Settings(codec="bf16", timeout_s=30.0)
    engine = Engine(Membership(dist.group.WORLD), settings, Memory())
    name = str(dtype).removeprefix("torch.")
    job = Job(
        0, BucketSpec((ParamSpec("p", 3),), name), torch.tensor([1, 7, -9], dtype=dtype), Progress()
    )
    engine.submit(job, Begin())
    engine.wait(job.done.is_set)
    job.raise_error()
    engine.close()
    assert job.result.tolist() == [1, 7, -9]
    odd = torch.div(torch.tensor([3, -3, 5]), 2, rounding_mode="trunc")
    engine = Engine(Membership(dist.group.WORLD), settings, Memory())
    buffer = torch.tensor([1, -1, 3], dtype=dtype) + torch.tensor([1, -1, -1], dtype=dtype) * rank
    job = Job(0, job.spec, buffer, Progress())
    engine.submit(job, Begin())
    engine.wait(job.done.is_set)
    job.raise_error()
    engine.close()
    assert job.result.tolist() == odd.tolist()


@ranks(2)
def test_credit_bounds_what_is_in_flight(rank: int) -> None:
    settings = Settings(chunk_mb=0.01, credit_mb=0.02, fusion_mb=0.0, timeout_s=30.0)
    engine = Engine(Membership(dist.group.WORLD), settings, Memory())
    seen: list[int] = []
    issue = engine._flight.issue

    def spy(run, lane):  # type: ignore[no-untyped-def]
        issue(run, lane)
        seen.append(engine._flight.bytes_on_the_wire())

    engine._flight.issue = spy  # type: ignore[method-assign]
    spec = BucketSpec((ParamSpec("p", 50_000),), "float32")
    job = Job(0, spec, torch.ones(50_000), Progress())
    engine.submit(job, Begin())
    engine.wait(job.done.is_set)
    job.raise_error()
    engine.close()
    assert len(seen) == 20
    assert max(seen) <= settings.credit_bytes
    assert max(seen) > settings.chunk_bytes  # and more than one at a time
