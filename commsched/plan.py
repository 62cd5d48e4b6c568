"""Plan: the total order of all tasks of one iteration. Frozen, printable, JSON both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

from commsched.codecs import get as get_codec
from commsched.errors import CommSchedError
from commsched.exchange import sent_share
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece, digest_of, first_names

__all__ = ["MOST_IN_FLIGHT", "Plan", "Task", "agree"]

MOST_IN_FLIGHT = 6  # tasks of a policy's own choice; as many threads a lane has


@dataclass(frozen=True)
class Task:
    """One step on the wire for one chunk.

    `op` is the collective: one of a codec's `ops`. With codec none it is "all_reduce", or
    "reduce_scatter", which leaves each rank the sum of its own shard, and later in the plan
    "all_gather" of the same chunk, which gives every rank all shards. `round` counts the tasks of
    a chunk, which follow each other in the plan, though not at once.
    """

    index: int
    op: str
    chunk: Chunk
    codec: str
    round: int = 0

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes of the encoded chunk (before the exchange's own factor: see `sent_bytes`)."""
        return get_codec(self.codec).wire(self.chunk, self.round).nbytes

    def sent_bytes(self, world_size: int) -> float:
        """Bytes that a rank sends, on average over the ranks."""
        return self.wire_bytes * sent_share(self.op, world_size)


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
        return tuple(_covers(self.layout, task.chunk) for task in self.tasks)

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


def _covers(layout: Layout, chunk: Chunk) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for piece in chunk.pieces:  # a bucket may have several
        found[piece.bucket] = found.get(piece.bucket, ()) + _params_in(layout, piece)
    return found


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
    whole = Chunk(pieces, chunk["dtype"], chunk["sparse"])
    return Task(item["index"], item["op"], whole, item["codec"], item["round"])


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
            said = [_described(param) for param in (our_param, their_param)]
            return f"holds {said[0]} where rank 0 has {said[1]}"
    raise AssertionError("the buckets are equal")


def _described(param: ParamSpec | None) -> str:
    if param is None:
        return "nothing"
    shape = "x".join(map(str, param.shape))
    return f"{param.name} ({param.numel}{f': {shape}' if len(param.shape) > 1 else ''})"
