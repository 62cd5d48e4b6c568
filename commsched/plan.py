"""Plan: the total order of all tasks of one iteration. Frozen, printable, JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

import torch

from commsched.codecs import get as get_codec
from commsched.errors import CommSchedError
from commsched.layout import BucketSpec, Chunk, Layout, Piece, digest_of, first_names

__all__ = ["MOST_IN_FLIGHT", "Plan", "Task", "agree"]

MOST_IN_FLIGHT = 6  # tasks of a policy's own choice; as many threads a lane has


@dataclass(frozen=True)
class Task:
    """One step on the wire for one chunk.

    `op` is "all_reduce"; or "reduce_scatter", which leaves each rank the sum of its own shard, and
    later in the plan "all_gather" of the same chunk, which gives every rank all shards.
    """

    index: int
    op: str
    chunk: Chunk
    codec: str

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of the encoded chunk (before the exchange's own factor, e.g. 2(n-1)/n)."""
        codec = get_codec(self.codec)
        return codec.wire(self.chunk.numel, getattr(torch, self.chunk.dtype)).nbytes


@dataclass(frozen=True)
class Plan:
    """What every rank issues in one iteration, in this order, whenever each task is ready.

    `credit_bytes` bounds the encoded bytes in flight at once (one task may always go).
    """

    policy: str
    layout: Layout
    tasks: tuple[Task, ...]
    credit_bytes: int

    @cached_property
    def digest(self) -> str:
        """Equal for equal plans, on any rank."""
        return digest_of(self._data())

    @cached_property
    def covers(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """For each task, which parameters it carries: their places in each bucket."""
        return tuple(
            {piece.bucket: _params_in(self.layout, piece) for piece in task.chunk.pieces}
            for task in self.tasks
        )

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reverses it exactly."""
        return json.dumps(self._data())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        data = json.loads(text)
        tasks = tuple(_task(item) for item in data["tasks"])
        layout = Layout.from_json(data["layout"])
        return cls(data["policy"], layout, tasks, data["credit_bytes"])

    def _data(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "layout": self.layout.to_json(),
            "tasks": [asdict(task) for task in self.tasks],
            "credit_bytes": self.credit_bytes,
        }

    def __str__(self) -> str:
        head = (
            f"plan {self.digest}: policy {self.policy}, {len(self.layout.buckets)} buckets, "
            f"{len(self.tasks)} tasks, {self.layout.nbytes / 2**20:.2f} MB of gradients"
        )
        return "\n".join([head, *(f"  {self.describe(task)}" for task in self.tasks)])

    def describe(self, task: Task) -> str:
        """One line on one task: what it carries and whose gradients those are."""
        chunk = task.chunk
        buckets = [piece.bucket for piece in chunk.pieces]
        where = f"bucket {buckets[0]}" if len(buckets) == 1 else f"buckets {buckets}"
        return (
            f"task {task.index}: {task.op} of {chunk.nbytes / 2**20:.3f} MB {chunk.dtype} "
            f"({task.codec}), {where}: {first_names(s.param for s in self.layout.spans(chunk))}"
        )


def _params_in(layout: Layout, piece: Piece) -> tuple[int, ...]:
    found, offset = [], 0
    for index, param in enumerate(layout.buckets[piece.bucket].params):
        if max(offset, piece.start) < min(offset + param.numel, piece.start + piece.numel):
            found.append(index)
        offset += param.numel
    return tuple(found)


def _task(item: dict[str, Any]) -> Task:
    chunk = item["chunk"]
    pieces = tuple(Piece(**piece) for piece in chunk["pieces"])
    return Task(
        item["index"], item["op"], Chunk(pieces, chunk["dtype"], chunk["sparse"]), item["codec"]
    )


class Control(Protocol):
    """What agreeing needs of a group: small byte strings, exchanged in the group's own order."""

    rank: int

    def all_gather_bytes(self, payload: bytes) -> list[bytes]: ...

    def broadcast_bytes(self, payload: bytes) -> bytes: ...


def agree(group: Control, layout: Layout, policy: Callable[[Layout], Plan]) -> Plan:
    """Rank 0's plan, after every rank has checked that it fits its own model.

    Collective: all ranks call it at the same place of the lane's order.

    Raises:
        CommSchedError: on every rank, when any rank's buckets differ from rank 0's, or the plan
            did not arrive as it was sent.
    """
    sent = policy(layout).to_json() if group.rank == 0 else ""
    plan = Plan.from_json(group.broadcast_bytes(sent.encode()).decode())
    problem = _difference(plan.layout, layout)
    verdict = json.dumps({"digest": plan.digest, "problem": problem})
    verdicts = [json.loads(data) for data in group.all_gather_bytes(verdict.encode())]
    problems = [
        f"rank {rank}: {item['problem']}"
        for rank, item in enumerate(verdicts)
        if item["problem"] is not None
    ]
    if problems:
        raise CommSchedError(
            "ranks have different gradients, so no common plan exists; make the model, its frozen "
            "parameters and DDP's arguments equal on all ranks. " + "; ".join(problems)
        )
    if len({item["digest"] for item in verdicts}) != 1:
        raise CommSchedError(f"plan digests differ between ranks: {verdicts}; restart the job")
    return plan


def _difference(theirs: Layout, ours: Layout) -> str | None:
    if theirs == ours:
        return None
    if len(theirs.buckets) != len(ours.buckets):
        return f"{len(ours.buckets)} buckets where rank 0 has {len(theirs.buckets)}"
    for index, (their, our) in enumerate(zip(theirs.buckets, ours.buckets, strict=True)):
        if their != our:
            return f"bucket {index} {_bucket_difference(their, our)}"
    return None


def _bucket_difference(their: BucketSpec, our: BucketSpec) -> str:
    kinds = [f"{'sparse' if spec.sparse else 'dense'} {spec.dtype}" for spec in (our, their)]
    if kinds[0] != kinds[1]:
        return f"is {kinds[0]} where rank 0 has {kinds[1]}"
    for our_param, their_param in zip_longest(our.params, their.params):
        if our_param != their_param:
            said = [f"{p.name} ({p.numel})" if p else "nothing" for p in (our_param, their_param)]
            return f"holds {said[0]} where rank 0 has {said[1]}"
    raise AssertionError("the buckets are equal")
