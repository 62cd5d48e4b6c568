"""Order: whatever the delays, all ranks issue the same tasks in the same order."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from commsched import policies
from commsched.engine import Engine
from commsched.group import Membership
from commsched.jobs import Job, Progress
from commsched.layout import BucketSpec, ParamSpec, cut
from commsched.plan import Plan, Task
from commsched.planner import Begin
from commsched.profile import Profile
from commsched.settings import Settings
from tests.distributed import ranks

BUCKETS, ITERATIONS = 40, 25  # 1000 tasks and more


def shuffled(profile: Profile, settings: Settings) -> Plan:
    """A policy whose order has nothing to do with readiness."""
    layout = profile.layout
    chunks = list(cut(layout, settings.chunk_bytes, settings.fusion_bytes))
    random.Random(len(chunks)).shuffle(chunks)
    tasks = tuple(Task(i, "all_reduce", chunk, "none") for i, chunk in enumerate(chunks))
    return Plan("shuffled", layout, tasks, settings.credit_bytes)


def specs() -> list[BucketSpec]:
    rng = random.Random(1)
    return [
        BucketSpec((ParamSpec(f"p{i}", rng.choice([3, 50, 700])),), "float32")
        for i in range(BUCKETS)
    ]


@pytest.mark.parametrize("policy", ["fifo", "shuffled"])
@ranks(2, timeout_s=100)
def test_issue_order_is_equal_under_random_delays(rank: int, policy: str) -> None:
    policies._POLICIES["shuffled"] = "tests.test_order:shuffled"
    settings = Settings(
        policy=policy, chunk_mb=0.001, fusion_mb=0.0003, credit_mb=0.004, timeout_s=60.0
    )
    engine = Engine(Membership(dist.group.WORLD), settings, None)
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
            assert torch.equal(job.result, torch.full_like(job.result, key + 50.0 + iteration))
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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@ranks(2)
def test_integer_buckets_are_divided_after_the_sum(rank: int, dtype: torch.dtype) -> None:
    engine = Engine(Membership(dist.group.WORLD), Settings(codec="bf16", timeout_s=30.0), None)
    name = str(dtype).removeprefix("torch.")
    job = Job(
        0, BucketSpec((ParamSpec("p", 3),), name), torch.tensor([1, 7, -9], dtype=dtype), Progress()
    )
    engine.submit(job, Begin())
    engine.wait(job.done.is_set)
    engine.close()
    assert job.result.tolist() == [1, 7, -9]


@ranks(2)
def test_credit_bounds_what_is_in_flight(rank: int) -> None:
    settings = Settings(chunk_mb=0.01, credit_mb=0.02, fusion_mb=0.0, timeout_s=30.0)
    engine = Engine(Membership(dist.group.WORLD), settings, None)
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
    engine.close()
    assert len(seen) == 20
    assert max(seen) <= settings.credit_bytes
    assert max(seen) > settings.chunk_bytes  # and more than one at a time
