"""Microbenchmarks of what runs between the hook and the wire; no processes, no network.

python -m pytest bench/micro.py --benchmark-columns=min,median,stddev
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from commsched import codecs
from commsched.iteration import Iteration
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.packer import Packer
from commsched.plan import Plan
from commsched.policies import get as get_policy
from commsched.settings import Settings

CHUNK_NUMEL = 2**20  # 4 MB of float32: the default chunk
LAYOUT = Layout(
    tuple(
        BucketSpec(tuple(ParamSpec(f"layer{b}.{p}", 2**19) for p in range(12)), "float32")
        for b in range(5)
    )
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As torchrun sets it when several ranks share a machine."""
    torch.set_num_threads(1)


def _plan() -> Plan:
    return get_policy("fifo")(LAYOUT, Settings())


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_codec(benchmark: BenchmarkFixture, name: str, direction: str) -> None:
    """One chunk; GB/s of gradients in the extra column."""
    codec = codecs.get(name)
    grad = torch.randn(CHUNK_NUMEL)
    wire = codec.wire(grad.numel(), grad.dtype).empty()
    codec.encode(grad, wire)
    if direction == "encode":
        benchmark(codec.encode, grad, wire)
    else:
        benchmark(codec.decode, wire, grad)
    benchmark.extra_info["GB/s"] = grad.nbytes / 1e9 / benchmark.stats.stats.median


@pytest.mark.parametrize("name", codecs.names())
def test_pack_and_unpack(benchmark: BenchmarkFixture, name: str) -> None:
    """All that the engine's thread computes for one chunk, on two ranks."""
    layout = Layout((BucketSpec((ParamSpec("p", CHUNK_NUMEL),), "float32"),))
    plan = get_policy("fifo")(layout, Settings(codec=name))
    packer = Packer(2, None)
    buffer = torch.randn(CHUNK_NUMEL)

    def once() -> None:
        run = Run(plan.tasks[0], plan, set(), {0: Job(0, layout.buckets[0], buffer, Progress())})
        packer.unpack(run, packer.pack(run))

    benchmark(once)


def test_plan(benchmark: BenchmarkFixture) -> None:
    """Cutting 120 MB into chunks, with its digest."""
    benchmark(lambda: _plan().digest)


def test_iteration(benchmark: BenchmarkFixture) -> None:
    """The engine's bookkeeping of one step without a plan: five buckets, thirty tasks."""
    buffers = [torch.empty(bucket.numel) for bucket in LAYOUT.buckets]
    plan = _plan()

    def once() -> None:
        iteration = Iteration(lambda _: plan, None)
        for key, (spec, buffer) in enumerate(zip(LAYOUT.buckets, buffers, strict=True)):
            iteration.add(Job(key, spec, buffer, Progress()))
        iteration.end()
        while iteration.head() is not None:
            iteration.order.popleft()

    benchmark(once)
