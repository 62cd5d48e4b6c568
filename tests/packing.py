"""Packers of simulated ranks, in one process: what they send, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from commsched.exchange import Transfer
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec
from commsched.memory import Memory
from commsched.packer import Packer
from commsched.plan import Plan, Task
from commsched.policies import get as get_policy
from commsched.profile import Profile
from commsched.settings import MB, Settings
from tests.simulated_group import exchanged

__all__ = [
    "Simulated",
    "begin",
    "buffers_of",
    "collective",
    "constant_world",
    "layout_of",
    "mean",
    "plan_for",
    "rank_of",
    "send",
]

FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass
class Simulated:
    """One rank: its packer, and its buckets with the runs of one iteration over them."""

    packer: Packer
    memory: Memory
    jobs: list[Job]
    runs: list[Run] = field(default_factory=list)


COLLECTIVE = {"all_reduce": "all_reduce"}  # the others are all-to-alls


def plan_for(layout: Layout, codec: str, chunk: int, fusion: int, halves: bool = False) -> Plan:
    """What fifo plans, every gradient by `codec` where that supports it; chunks may be halved."""
    chosen = Settings(
        codec=codec, codec_rules=f"*={codec}", chunk_mb=chunk / MB, fusion_mb=fusion / MB
    )
    plan = get_policy("fifo")(Profile.unmeasured(layout, 2), chosen)
    if not halves:
        return plan
    tasks: list[Task] = []
    for op in ("reduce_scatter", "all_gather"):
        split = [t for t in plan.tasks if t.codec == "none" and t.chunk.dtype in FLOATS]
        tasks += [replace(t, op=op, round=int(op == "all_gather")) for t in split]
    tasks += [task for task in plan.tasks if task.chunk not in {t.chunk for t in tasks}]
    return replace(plan, tasks=tuple(replace(t, index=at) for at, t in enumerate(tasks)))


def rank_of(
    plan: Plan,
    buffers: Sequence[torch.Tensor],
    rank: int = 0,
    size: int = 1,
    feedback: str = "auto",
    like: Simulated | None = None,
) -> Simulated:
    """A rank with these buckets; with the packer and the memory of `like`, an earlier step's."""
    pairs = zip(plan.layout.buckets, buffers, strict=True)
    jobs = [Job(key, spec, buffer, Progress()) for key, (spec, buffer) in enumerate(pairs)]
    memory = Memory() if like is None else like.memory
    packer = Packer(rank, size, memory, feedback) if like is None else like.packer
    simulated = Simulated(packer, memory, jobs)
    before: dict[Chunk, Run] = {}
    for task in plan.tasks:
        members = {piece.bucket: jobs[piece.bucket] for piece in task.chunk.pieces}
        after = before.get(task.chunk)
        run = before[task.chunk] = Run(task, plan, set(), members, step=7, after=after)
        simulated.runs.append(run)
    return simulated


def send(world: list[Simulated]) -> None:
    """Average: whatever can be packed is, at once; then task after task, as on a lane."""
    for rank in world:
        for run in rank.runs:
            if run.after is None:
                run.transfer = rank.packer.pack(run)
    for runs in zip(*(rank.runs for rank in world), strict=True):
        transfers = [packed(rank.packer, run) for rank, run in zip(world, runs, strict=True)]
        check_sent(runs[0], transfers)
        for rank, run, result in zip(world, runs, collective(runs[0].task, transfers), strict=True):
            rank.packer.unpack(run, result)
            run.done = True
    for rank in world:
        last = {run.task.chunk: run for run in rank.runs}
        assert all(run.following is None for run in last.values())


def packed(packer: Packer, run: Run) -> Transfer:
    assert run.ready
    return run.transfer if run.after is None else packer.pack(run)  # type: ignore[return-value]


def check_sent(run: Run, transfers: list[Transfer]) -> None:
    """What transfers say they send is what the plan says, where all buckets came."""
    size = len(transfers)
    if run.task.chunk.sparse or run.chunk != run.task.chunk:
        return
    sent = sum(transfer.sent_bytes for transfer in transfers) / size
    spare = 8 * size if run.codec.lossy else 1  # each shard is encoded by itself
    assert run.task.sent_bytes(size) == pytest.approx(sent, abs=spare)


def collective(task: Task, transfers: list[Transfer]) -> list[torch.Tensor]:
    return exchanged(transfers, COLLECTIVE.get(task.op, "all_to_all"))


def layout_of(numels: Sequence[Sequence[int]], dtype: str = "float32") -> Layout:
    return Layout(
        tuple(
            BucketSpec(tuple(ParamSpec(f"b{i}.{j}", n) for j, n in enumerate(row)), dtype)
            for i, row in enumerate(numels)
        )
    )


def buffers_of(layout: Layout, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    buffers = []
    for spec in layout.buckets:
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            buffers.append(torch.randn(spec.numel, dtype=dtype, generator=generator))
        else:
            buffers.append(torch.randint(-50, 50, (spec.numel,), dtype=dtype, generator=generator))
    return buffers


def begin(
    layout: Layout, world_size: int, codec: str, chunk: int, fusion: int, halves: bool = False
) -> tuple[list[Simulated], list[list[torch.Tensor]]]:
    plan = plan_for(layout, codec, chunk, fusion, halves)
    before = [buffers_of(layout, rank) for rank in range(world_size)]
    world = [
        rank_of(plan, [buffer.clone() for buffer in row], rank, world_size)
        for rank, row in enumerate(before)
    ]
    return world, before


def constant_world(plan: Plan, world_size: int = 2) -> list[Simulated]:
    """Bucket i holds 8 (i + 1) + rank: the mean is 8 (i + 1) + 1/2."""
    return [
        rank_of(
            plan,
            [
                torch.full((s.numel,), 8.0 * (i + 1) + rank)
                for i, s in enumerate(plan.layout.buckets)
            ],
            rank,
            world_size,
        )
        for rank in range(world_size)
    ]


def mean(rows: list[torch.Tensor]) -> torch.Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total / len(rows)
