"""Microbenchmarks of planning: what is computed seldom, between steps; no processes, no network.

python -m pytest bench/micro_planning.py --benchmark-columns=min,median,stddev

The model has 60 parameters in five buckets, 126 MB; a step takes 0.76 s, the link 1 Gbit/s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from commsched import policies
from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.profile import Link, Profile
from commsched.rules import parse_rules, used
from commsched.settings import Settings
from commsched.simulate import ddp, ideal, simulate
from commsched.tracing.tracer import Silent, Tracer
from commsched.tuning.candidates import candidates, predict

LAYOUT = Layout(
    tuple(
        BucketSpec(tuple(ParamSpec(f"layer{b}.{p}", 2**19) for p in range(12)), "float32")
        for b in range(5)
    )
)
RULES = "*.[048]=none;*.11=fp16"


def _profile() -> Profile:
    """Backward in 0.5 s, forward in 0.25 s."""
    blank = Profile.unmeasured(LAYOUT, 2)
    count = len(blank.params)
    params = tuple(
        replace(param, ready_s=0.5 * at / count, use_s=0.25 * (1 - at / count))
        for at, param in enumerate(blank.params, 1)
    )
    ready_s = tuple(0.1 * (at + 1) for at in range(len(LAYOUT.buckets)))
    return Profile(LAYOUT, 2, ready_s, params, 0.25, 0.5, 0.01, Link(1e-3, 8e-9))


PROFILE = _profile()


# ---- plans


@pytest.mark.parametrize("policy", policies.names())
def test_plan(benchmark: BenchmarkFixture, policy: str) -> None:
    """Cutting and ordering, with the digest that ranks compare."""
    make = policies.get(policy)
    benchmark(lambda: make(PROFILE, Settings()).digest)


def test_plan_with_rules(benchmark: BenchmarkFixture) -> None:
    """The same where every fourth parameter travels by another codec."""
    make, settings = policies.get("fifo"), Settings(codec="bf16", codec_rules=RULES)
    benchmark(lambda: make(PROFILE, settings).digest)


def test_rules(benchmark: BenchmarkFixture) -> None:
    """Reading rules, and listing the codecs they use."""
    settings = Settings(codec="bf16", codec_rules=RULES)
    benchmark(lambda: (parse_rules(RULES), used(settings)))


def test_plan_to_json_and_back(benchmark: BenchmarkFixture) -> None:
    """As it travels from rank 0 to the others."""
    plan = policies.get("priority")(PROFILE, Settings())
    benchmark(lambda: type(plan).from_json(plan.to_json()))


# ---- what if


@pytest.mark.parametrize("policy", policies.names())
def test_simulate(benchmark: BenchmarkFixture, policy: str) -> None:
    """One step of a plan."""
    plan = policies.get(policy)(PROFILE, Settings())
    benchmark(lambda: simulate(plan, PROFILE).step_s)


def test_simulate_ddp(benchmark: BenchmarkFixture) -> None:
    """One step of plain DDP."""
    benchmark(lambda: ddp(PROFILE).step_s)


def test_ideal(benchmark: BenchmarkFixture) -> None:
    """The bound that no plan can beat."""
    benchmark(lambda: ideal(PROFILE))


@pytest.mark.parametrize("allow", ["", "int8"])
def test_candidates(benchmark: BenchmarkFixture, allow: str) -> None:
    """Listing what automatic mode may choose; with a codec, how much of the model it is for."""
    allowed = (allow,) if allow else ()
    benchmark(lambda: candidates(PROFILE, Settings(), deferrable=True, allow=allowed))


def test_predict_all(benchmark: BenchmarkFixture) -> None:
    """Predicting each exact candidate's step."""
    found = candidates(PROFILE, Settings(), deferrable=True)
    benchmark(lambda: [predict(one, PROFILE).step_s for one in found])


# ---- traces: what one span costs the thread that reports it


@pytest.mark.parametrize("kind", ["silent", "outside", "inside"])
@pytest.mark.parametrize("event", ["span", "flight", "region"])
def test_trace(benchmark: BenchmarkFixture, tmp_path: Path, kind: str, event: str) -> None:
    """Without a trace, before its window of steps, and within it."""
    steps = "1000000:1000001" if kind == "outside" else "0:1000"
    tracer = Silent() if kind == "silent" else Tracer(str(tmp_path), 0, 1, steps)
    tracer.begin_step(0, "settled", "fifo", None, False, 0.0)
    args: dict[str, Any] = {"step": 0, "bucket": 1, "bytes": 4 * 2**20}

    def region() -> None:
        with tracer.region("encode", "engine", **args):
            pass

    actions = {
        "span": lambda: tracer.span("wait", "training", 1.0, 1.001, **args),
        "flight": lambda: tracer.flight(1.0, 1.001, **args),
        "region": region,
    }
    pedantic: Any = benchmark.pedantic
    pedantic(actions[event], rounds=50, iterations=40, warmup_rounds=2)
    tracer.close()
