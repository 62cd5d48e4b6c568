"""Recorder: what a step's events are worth, on a clock we turn; DDP's own times, on a real one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from commsched.layout import BucketSpec, Layout, ParamSpec
from commsched.model import Buckets
from commsched.recorder import WINDOW, Recorder, stats_order
from tests.distributed import ranks

MS = 1e-3
# As DDP fills them: the last layer first.
HEAD = BucketSpec((ParamSpec("head.bias", 10), ParamSpec("head.weight", 30)), "float32")
BODY = BucketSpec((ParamSpec("body", 60),), "float32")
NUMELS = {"head.bias": 10, "head.weight": 30, "body": 60}
ORDER = ("body", "head.weight", "head.bias")


class Clock:
    """Stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def go(self, ms: float) -> None:
        self.now_s += ms * MS

    def during(self, ms: float, tell: Callable[..., None], *args: Any) -> None:
        begin_s = self.now_s
        self.go(ms)
        tell(begin_s, self.now_s, *args)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(ORDER, clock)


def forward(recorder: Recorder, clock: Clock, waits_ms: float = 0, optimizer_ms: float = 0) -> None:
    """Reads body after 1 ms of computing and head.weight after 4, ends after 6."""
    recorder.forward_begins()
    clock.go(1)
    recorder.used("body")
    clock.during(waits_ms, recorder.waited)
    if optimizer_ms:
        clock.during(optimizer_ms, recorder.stepped, NUMELS)
    clock.go(3)
    recorder.used("head.weight")
    clock.during(waits_ms, recorder.waited)
    clock.go(2)
    recorder.forward_ends()


def backward(recorder: Recorder, clock: Clock, stats: list[int] | None = None) -> None:
    """The loss takes 1 ms, the head's gradients 2, the body's 7."""
    clock.go(3)
    recorder.bucket_ready(0, HEAD)
    clock.go(7)
    recorder.bucket_ready(1, BODY)
    recorder.backward_ends(stats)


def step(recorder: Recorder, clock: Clock, other_ms: float = 5) -> None:
    forward(recorder, clock)
    backward(recorder, clock)
    clock.during(4, recorder.waited)
    clock.during(2, recorder.stepped, NUMELS)
    clock.go(other_ms)


def ms(seconds: float) -> Any:
    return pytest.approx(seconds / MS, abs=1e-5)


# ---------------------------------------------------------------- one step


def test_a_step_has_its_parts(recorder: Recorder, clock: Clock) -> None:
    step(recorder, clock)
    assert recorder.steps == 0  # it lasts until the next forward begins
    recorder.forward_begins()
    assert recorder.steps == 1
    summary = recorder.summary()
    assert summary["buckets"] == [Layout((bucket,)).digest for bucket in (HEAD, BODY)]
    assert ms(summary["forward_s"]) == 6
    assert ms(summary["backward_s"]) == 10
    assert ms(summary["waited_s"]) == 4
    assert ms(summary["optimizer_s"]) == 2
    assert ms(summary["other_s"]) == 5
    assert ms(summary["step_s"]) == 27
    assert [ms(at) for at in summary["ready_s"]] == [3, 10]
    assert list(summary["params"]) == ["head.bias", "head.weight", "body"]
    assert summary["params"]["body"]["use_s"] == pytest.approx(1 * MS)
    assert summary["params"]["head.weight"]["use_s"] == pytest.approx(4 * MS)
    assert json.loads(json.dumps(summary)) == summary


def test_waits_and_the_optimizer_inside_forward_do_not_lengthen_it(
    recorder: Recorder, clock: Clock
) -> None:
    for _ in range(2):
        forward(recorder, clock, waits_ms=50, optimizer_ms=2)
        backward(recorder, clock)
        clock.go(5)
    recorder.forward_begins()
    summary = recorder.summary()
    assert ms(summary["forward_s"]) == 6
    assert ms(summary["backward_s"]) == 10
    assert ms(summary["waited_s"]) == 100
    assert ms(summary["optimizer_s"]) == 2
    assert ms(summary["other_s"]) == 5
    assert ms(summary["step_s"]) == 123
    assert ms(summary["params"]["head.weight"]["use_s"]) == 4


durations = st.lists(st.floats(0, 1000), min_size=9, max_size=9)


@given(durations, st.booleans())
@settings(deadline=None)
def test_the_parts_add_up_to_the_step(parts: list[float], deferred: bool) -> None:
    clock = Clock()
    recorder = Recorder(now=clock)
    for _ in range(2):
        recorder.forward_begins()
        clock.go(parts[0])
        clock.during(parts[1], recorder.waited)
        if deferred:
            clock.during(parts[2], recorder.stepped, NUMELS)
        clock.go(parts[3])
        recorder.forward_ends()
        clock.during(parts[4], recorder.waited)  # for a weight in the loss
        backward(recorder, clock)
        clock.during(parts[5], recorder.waited)
        if not deferred:
            clock.during(parts[2], recorder.stepped, NUMELS)
        clock.go(parts[6])
    recorder.forward_begins()
    assert recorder.steps == 2
    got = recorder.summary()
    assert ms(got["forward_s"]) == parts[0] + parts[3]
    assert ms(got["backward_s"]) == 10
    assert ms(got["optimizer_s"]) == parts[2]
    fields = ("forward_s", "backward_s", "other_s", "optimizer_s", "waited_s")
    assert got["step_s"] == pytest.approx(sum(got[field] for field in fields), abs=1e-8)


# ---------------------------------------------------------------- parameters


def test_the_optimizers_time_is_shared_by_size_call_by_call(
    recorder: Recorder, clock: Clock
) -> None:
    forward(recorder, clock)
    backward(recorder, clock)
    clock.during(4, recorder.stepped, {"head.bias": 10, "head.weight": 30})
    clock.during(9, recorder.stepped, {"body": 60})
    clock.during(8, recorder.stepped, {"body": 60, "of another model": 1000})
    recorder.forward_begins()
    params = recorder.summary()["params"]
    assert [ms(row["optimizer_s"]) for row in params.values()] == [1, 3, 17]


def test_the_optimizers_time_for_parameters_in_no_bucket_is_other(
    recorder: Recorder, clock: Clock
) -> None:
    forward(recorder, clock)
    backward(recorder, clock)
    clock.during(7, recorder.stepped, {"of another model": 1000})
    clock.during(3, recorder.stepped, {"body": 0})
    recorder.forward_begins()
    summary = recorder.summary()
    assert ms(summary["other_s"]) == 7
    assert ms(summary["optimizer_s"]) == 3


def test_only_a_forwards_first_reading_counts_and_it_ends_with_forward(
    recorder: Recorder, clock: Clock
) -> None:
    forward(recorder, clock)
    recorder.used("body")
    clock.go(1)
    recorder.used("head.bias")  # in the loss
    backward(recorder, clock)
    recorder.forward_begins()
    params = recorder.summary()["params"]
    assert ms(params["body"]["use_s"]) == 1
    assert ms(params["head.bias"]["use_s"]) == 6


def test_what_no_forward_read_has_no_time_of_use(recorder: Recorder, clock: Clock) -> None:
    forward(recorder, clock)
    backward(recorder, clock)
    recorder.used("head.bias")
    recorder.forward_begins()
    assert recorder.summary()["params"]["head.bias"]["use_s"] is None


@pytest.mark.parametrize(
    ("stats_ms", "ready_ms"),
    [
        # body, head.weight, head.bias; buckets are ready at 3 and 10.
        ([1010, 1002, 1001], [2, 3, 10]),
        ([1004, 1002, 1001], [2, 3, 10]),  # ours is the clock; theirs only says what came when
        ([1010, 1002, 900], [0, 3, 10]),  # it cannot have been before backward
        ([1001, 1009, 1008], [2, 3, 2]),  # the body's bucket waited for the head's
        ([1010, 1002], [3, 3, 10]),  # of other parameters than we know
        (None, [3, 3, 10]),
    ],
)
def test_a_parameters_own_readiness(
    recorder: Recorder, clock: Clock, stats_ms: list[int] | None, ready_ms: list[float]
) -> None:
    forward(recorder, clock)
    backward(recorder, clock, None if stats_ms is None else [at * 10**6 for at in stats_ms])
    recorder.forward_begins()
    params = recorder.summary()["params"]
    assert [ms(row["ready_s"]) for row in params.values()] == ready_ms


# ---------------------------------------------------------------- unusual steps


def test_accumulation_and_evaluation_belong_to_no_step(recorder: Recorder, clock: Clock) -> None:
    for _ in range(3):
        for _ in range(2):  # under no_sync: no buckets
            forward(recorder, clock)
            clock.go(1000)
        step(recorder, clock, other_ms=5)
    recorder.forward_begins()
    assert recorder.steps == 3
    summary = recorder.summary()
    assert ms(summary["step_s"]) == 27
    assert ms(summary["other_s"]) == 5
    assert ms(summary["optimizer_s"]) == 2


def test_deferred_steps_in_a_forward_without_a_backward_are_not_lost(
    recorder: Recorder, clock: Clock
) -> None:
    for _ in range(3):
        forward(recorder, clock, waits_ms=1, optimizer_ms=2)
        clock.go(10)
        forward(recorder, clock)
        backward(recorder, clock)
    recorder.forward_begins()
    summary = recorder.summary()
    assert ms(summary["optimizer_s"]) == 2
    assert ms(summary["waited_s"]) == 2
    assert ms(summary["step_s"]) == 16


def test_of_two_forwards_before_a_backward_the_last_counts(
    recorder: Recorder, clock: Clock
) -> None:
    forward(recorder, clock)
    clock.go(500)
    step(recorder, clock)
    recorder.forward_begins()
    assert recorder.steps == 1
    assert ms(recorder.summary()["forward_s"]) == 6


def raised_in_backward(recorder: Recorder, clock: Clock) -> None:
    forward(recorder, clock)
    recorder.bucket_ready(0, HEAD)


def raised_in_forward(recorder: Recorder, clock: Clock) -> None:
    recorder.forward_begins()
    backward(recorder, clock)


def backward_twice(recorder: Recorder, clock: Clock) -> None:
    step(recorder, clock)
    backward(recorder, clock)


def shadow_calls_of_join(recorder: Recorder, clock: Clock) -> None:
    recorder.restart()
    backward(recorder, clock)


@pytest.mark.parametrize(
    "unusual", [raised_in_backward, raised_in_forward, backward_twice, shadow_calls_of_join]
)
def test_what_does_not_fit_is_dropped(
    recorder: Recorder, clock: Clock, unusual: Callable[[Recorder, Clock], None]
) -> None:
    unusual(recorder, clock)
    clock.during(1000, recorder.waited)
    clock.during(1000, recorder.stepped, NUMELS)
    recorder.forward_begins()
    assert recorder.steps == 0
    assert recorder.summary() == {"steps": 0}
    step(recorder, clock)
    recorder.forward_begins()
    assert ms(recorder.summary()["step_s"]) == 27
    assert recorder.summary()["optimizer_s"] < 1


def test_a_backward_may_end_more_than_once(recorder: Recorder, clock: Clock) -> None:
    """Reentrant checkpointing: an inner backward's end is not the end."""
    forward(recorder, clock)
    clock.go(3)
    recorder.bucket_ready(0, HEAD)
    recorder.backward_ends()
    clock.go(7)
    recorder.bucket_ready(1, BODY)
    recorder.backward_ends()
    recorder.forward_begins()
    assert ms(recorder.summary()["backward_s"]) == 10


EVENTS: list[Callable[[Recorder, Clock], None]] = [
    lambda r, _: r.forward_begins(),
    lambda r, _: r.forward_begins(),
    lambda r, _: r.forward_ends(),
    lambda r, _: r.forward_ends(),
    lambda r, _: r.bucket_ready(0, HEAD),
    lambda r, _: r.bucket_ready(1, BODY),
    lambda r, _: r.backward_ends(),
    lambda r, _: r.backward_ends([30, 20, 10]),
    lambda r, c: c.during(3, r.waited),
    lambda r, c: c.during(2, r.stepped, NUMELS),
    lambda r, c: c.during(2, r.stepped, {}),
    lambda r, _: r.used("body"),
    lambda r, _: r.restart(),
]


@given(st.lists(st.tuples(st.integers(0, len(EVENTS) - 1), st.integers(0, 9)), max_size=120))
@settings(deadline=None)
def test_any_order_of_events_gives_a_sound_summary(events: list[tuple[int, int]]) -> None:
    clock = Clock()
    recorder = Recorder(ORDER, clock)
    for kind, pause_ms in events:
        EVENTS[kind](recorder, clock)
        clock.go(pause_ms)
    summary = json.loads(json.dumps(recorder.summary()))
    assert summary["steps"] == recorder.steps
    if not recorder.steps:
        return
    fields = ("step_s", "forward_s", "backward_s", "other_s", "optimizer_s", "waited_s")
    assert all(0 <= summary[field] < math.inf for field in fields)
    assert sorted(summary["ready_s"]) == summary["ready_s"]
    assert all(0 <= at <= summary["backward_s"] + 1e-9 for at in summary["ready_s"])
    for row in summary["params"].values():
        assert 0 <= row["ready_s"] <= summary["ready_s"][-1] + 1e-9
        assert row["use_s"] is None or row["use_s"] >= 0


# ---------------------------------------------------------------- many steps


def test_a_summary_is_of_the_last_steps_and_their_medians(recorder: Recorder, clock: Clock) -> None:
    for other_ms in (900, 900, 900, 900, 1, 2, 3, 800, 700):
        step(recorder, clock, other_ms)
    recorder.forward_begins()
    assert recorder.steps == 9
    assert WINDOW == 5
    assert ms(recorder.summary()["other_s"]) == 3


def test_other_buckets_begin_anew(recorder: Recorder, clock: Clock) -> None:
    for _ in range(3):
        step(recorder, clock)
    forward(recorder, clock)
    recorder.bucket_ready(7, BODY)
    recorder.backward_ends()
    recorder.forward_begins()
    assert recorder.steps == 1
    assert list(recorder.summary()["params"]) == ["body"]


def test_restart_forgets(recorder: Recorder, clock: Clock) -> None:
    step(recorder, clock)
    forward(recorder, clock)
    recorder.restart()
    backward(recorder, clock)
    recorder.forward_begins()
    assert recorder.summary() == {"steps": 0}


def test_drift(recorder: Recorder, clock: Clock) -> None:
    assert recorder.drift(1.0) == 1.0  # nothing is known
    for other_ms in (5, 32, 32):
        step(recorder, clock, other_ms)
    recorder.forward_begins()
    assert recorder.drift(27 * MS) == pytest.approx(2.0)
    assert recorder.drift(0.0) == 1.0


# ---------------------------------------------------------------- a real model


class Slow(torch.autograd.Function):
    """Its backward takes 10 ms."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return grad


class Odd(nn.Module):
    """Layers in another order than they are used; frozen, shared, ignored and root parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4)
        self.again = self.last
        self.middle = nn.Linear(4, 4, bias=False)
        self._ddp_params_and_buffers_to_ignore = ["first.bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Slow.apply(self.frozen(self.first(x)))
        x = Slow.apply(self.middle(x))
        return Slow.apply(self.again(x)) * self.scale


def record(ddp: DDP, steps: int) -> tuple[Recorder, list[Any]]:
    """Train with a hook that only measures."""
    recorder, buckets, stats = Recorder(stats_order(ddp)), Buckets(ddp), []

    def ended() -> None:
        stats.append(ddp.reducer.get_backward_stats())
        recorder.backward_ends(stats[-1])

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        recorder.bucket_ready(*buckets.recognise(bucket, bucket.buffer()))
        if bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(ended)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)
    for _ in range(steps):
        recorder.forward_begins()
        out = ddp(torch.ones(2, 4))
        recorder.forward_ends()
        time.sleep(0.03)
        out.sum().backward()
    recorder.forward_begins()
    return recorder, stats


@pytest.mark.parametrize("cap_mb", [25, 1e-9])
@ranks(2)
def test_ddps_times_are_in_our_order(cap_mb: float) -> None:
    ddp = DDP(Odd(), bucket_cap_mb=cap_mb)
    order = stats_order(ddp)
    assert order == ("scale", "last.weight", "first.weight", "middle.weight")
    recorder, stats = record(ddp, 4)
    assert all(isinstance(row, list) and len(row) == len(order) for row in stats)
    assert recorder.steps == 3  # DDP makes other buckets after the first
    params = recorder.summary()["params"]
    ready = {name: row["ready_s"] for name, row in params.items()}
    assert ready["scale"] < ready["last.weight"] - 5e-3
    assert ready["last.weight"] < ready["middle.weight"] - 5e-3
    assert ready["middle.weight"] < ready["first.weight"] - 5e-3
    # What DDP calls the backward's start is the end of forward, so loss computing is in.
    for name, at_ns in zip(order, stats[-1], strict=True):
        assert at_ns >= 29e6
        assert ready[name] > 29e-3
