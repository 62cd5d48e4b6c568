"""Microbenchmarks of what runs between the hook and the wire; no processes, no network.

python -m pytest bench/micro.py --benchmark-columns=min,median,stddev
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from commsched import codecs
from commsched.codecs import ByteCodec, Codec, Summed
from commsched.exchange import Transfer
from commsched.iteration import Iteration, KnownPlan
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.memory import Memory
from commsched.packer import Packer
from commsched.pending import mark_param, unmark
from commsched.plan import Plan
from commsched.policies import get as get_policy
from commsched.profile import Profile
from commsched.settings import Settings

CHUNK_NUMEL = 2**20  # 4 MB of float32: the default chunk
SHAPE = (1024, 1024)
CHUNK = Chunk((Piece(0, 0, CHUNK_NUMEL, SHAPE[0]),), "float32")
LAYOUT = Layout(
    tuple(
        BucketSpec(tuple(ParamSpec(f"layer{b}.{p}", 2**19) for p in range(12)), "float32")
        for b in range(5)
    )
)
# Those that encode a chunk by itself; the others' work lies between their collectives.
LOCAL = [name for name in codecs.names() if isinstance(codecs.get(name), (ByteCodec, Summed))]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As torchrun sets it when several ranks share a machine."""
    torch.set_num_threads(1)


def _plan() -> Plan:
    return get_policy("fifo")(Profile.unmeasured(LAYOUT, 2), Settings())


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("direction", ["encode", "encode_feedback", "decode", "decode_add"])
def test_codec(benchmark: BenchmarkFixture, name: str, direction: str) -> None:
    """One chunk; GB/s of gradients in the extra column."""
    codec: Any = codecs.get(name)
    if not hasattr(codec, direction):
        pytest.skip("summed on the wire")
    codec.prepare()
    grad, error = torch.randn(CHUNK_NUMEL), torch.zeros(CHUNK_NUMEL)
    wire = codec.wire(CHUNK).empty()
    codec.encode(grad, wire)
    work = {
        "encode": lambda: codec.encode(grad, wire),
        "encode_feedback": lambda: codec.encode_feedback(grad, error, wire),
        "decode": lambda: codec.decode(wire, error),
        "decode_add": lambda: codec.decode_add(wire, error),
    }
    benchmark(work[direction])
    if benchmark.stats is not None:  # None: --benchmark-disable
        benchmark.extra_info["GB/s"] = grad.nbytes / 1e9 / benchmark.stats.stats.median


class _Echo:
    """Rank 0 of two, where the other one sends what this one sends."""

    rank, size = 0, 2

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """The sum is as if the other's were 0."""

    def all_to_all(
        self, out: torch.Tensor, inp: torch.Tensor, out_sizes: Sequence[int], _: Sequence[int]
    ) -> Any:
        """Costs a copy of what is sent: small, as it is encoded."""
        out.copy_(inp[: sum(out_sizes)])


def _result(transfer: Transfer) -> torch.Tensor:
    stages = transfer.start(_Echo())
    next(stages)
    try:
        stages.send([transfer.wire])
    except StopIteration as stop:
        result: torch.Tensor = stop.value
        return result
    raise AssertionError("an exchange starts one collective")


@pytest.mark.parametrize("name", codecs.names())
def test_pack_and_unpack(benchmark: BenchmarkFixture, name: str) -> None:
    """All that the engine's thread computes for one chunk, on two ranks."""
    codec: Codec = codecs.get(name)
    codec.prepare()
    layout = Layout((BucketSpec((ParamSpec("p", CHUNK_NUMEL, SHAPE),), "float32"),))
    plan = get_policy("fifo")(Profile.unmeasured(layout, 2), Settings(codec=name))
    assert [task.codec for task in plan.tasks] == [name] * len(codec.ops)
    packer = Packer(0, 2, Memory())
    grads = torch.randn(CHUNK_NUMEL)
    buffer = grads.clone()

    def once() -> None:
        job, after = Job(0, layout.buckets[0], buffer.copy_(grads), Progress()), None
        for task in plan.tasks:
            run = Run(task, plan, set(), {0: job}, after=after)
            packer.unpack(run, _result(packer.pack(run)))
            run.done, after = True, run

    benchmark(once)


@pytest.mark.parametrize("same", [True, False])
def test_memory(benchmark: BenchmarkFixture, same: bool) -> None:
    """A chunk's slot: found again; or cut anew, as when buckets have changed."""
    memory = Memory()
    rows = []
    for chunk_numel in (2**18, 2**18 if same else 2**17 + 64):
        chunks = [
            Chunk((Piece(0, start, min(chunk_numel, 2**19 - start)),), "float32")
            for start in range(0, 2**19, chunk_numel)
        ]
        rows.append([tuple(LAYOUT.spans(chunk)) for chunk in chunks])

    def once() -> None:
        for row in rows:
            for spans in row:
                memory.slot("error", spans)

    benchmark(once)


def test_pending(benchmark: BenchmarkFixture) -> None:
    """What deferring adds to one parameter's use: mark, a function that settles it, and back."""
    param = torch.nn.Parameter(torch.ones(1))

    class Owner:
        def settle(self, tensor: torch.Tensor) -> None:
            unmark(tensor)

    owner = Owner()

    def once() -> None:
        mark_param(param, owner)
        param.detach()

    benchmark(once)


def test_iteration(benchmark: BenchmarkFixture) -> None:
    """The engine's bookkeeping of one step: five buckets, thirty tasks."""
    buffers = [torch.empty(bucket.numel) for bucket in LAYOUT.buckets]
    known = KnownPlan(_plan(), {key: key for key in range(len(buffers))})

    def once() -> None:
        iteration = Iteration(lambda _: known.plan, known)
        for key, (spec, buffer) in enumerate(zip(LAYOUT.buckets, buffers, strict=True)):
            iteration.add(Job(key, spec, buffer, Progress()))
        iteration.end()
        while iteration.head() is not None:
            iteration.order.popleft()

    benchmark(once)
