"""Microbenchmarks of what runs between the hook and the wire; no processes, no network.

python -m pytest bench/micro.py --benchmark-columns=min,median,stddev
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from commsched import codecs
from commsched.iteration import Iteration, KnownPlan
from commsched.jobs import Job, Progress, Run
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.packer import Packer
from commsched.pending import mark_param, unmark
from commsched.plan import Plan
from commsched.policies import get as get_policy
from commsched.profile import Link, Profile
from commsched.settings import Settings
from commsched.simulate import simulate

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
    return get_policy("fifo")(Profile.unmeasured(LAYOUT, 2), Settings())


def _profile() -> Profile:
    """What a plan for the next forward is made from: backward in 0.5 s, forward in 0.25 s."""
    blank = Profile.unmeasured(LAYOUT, 2)
    count = len(blank.params)
    params = tuple(
        replace(param, ready_s=0.5 * at / count, use_s=0.25 * (1 - at / count))
        for at, param in enumerate(blank.params, 1)
    )
    ready_s = tuple(0.1 * (at + 1) for at in range(len(LAYOUT.buckets)))
    link = Link(alpha_s=1e-3, beta_s=8e-9)
    return Profile(LAYOUT, 2, ready_s, params, 0.25, 0.5, 0.01, link)


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
    if benchmark.stats is not None:  # None: --benchmark-disable
        benchmark.extra_info["GB/s"] = grad.nbytes / 1e9 / benchmark.stats.stats.median


@pytest.mark.parametrize("name", codecs.names())
def test_pack_and_unpack(benchmark: BenchmarkFixture, name: str) -> None:
    """All that the engine's thread computes for one chunk, on two ranks."""
    layout = Layout((BucketSpec((ParamSpec("p", CHUNK_NUMEL),), "float32"),))
    plan = get_policy("fifo")(Profile.unmeasured(layout, 2), Settings(codec=name))
    packer = Packer(2, None)
    buffer = torch.randn(CHUNK_NUMEL)

    def once() -> None:
        run = Run(plan.tasks[0], plan, set(), {0: Job(0, layout.buckets[0], buffer, Progress())})
        packer.unpack(run, packer.pack(run))

    benchmark(once)


def test_plan(benchmark: BenchmarkFixture) -> None:
    """Cutting 120 MB into chunks, with its digest."""
    benchmark(lambda: _plan().digest)


@pytest.mark.parametrize("policy", ["priority", "rs_ag"])
def test_plan_for_the_next_forward(benchmark: BenchmarkFixture, policy: str) -> None:
    """The same, in the order in which the next forward needs it."""
    profile = _profile()
    benchmark(lambda: get_policy(policy)(profile, Settings()))


def test_simulation(benchmark: BenchmarkFixture) -> None:
    """One step of that plan."""
    profile = _profile()
    plan = get_policy("priority")(profile, Settings())
    benchmark(lambda: simulate(plan, profile).step_s)


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
