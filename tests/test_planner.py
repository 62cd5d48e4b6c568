"""Planner: codecs begin where they are due, and are refused where they cost more than they save."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched import codecs, planner
from commsched.flight import Flight
from commsched.planner import Planner, Verdict
from commsched.profile import Link
from commsched.rules import parse_rules
from commsched.settings import Settings
from tests.compare import assert_equal_on_all_ranks
from tests.distributed import ranks
from tests.mixed import registered
from tests.parity import assert_same, mlp, mlp_loss

GIGABIT = Link(1e-3, 8e-9)
LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


# ---------------------------------------------------------------- when codecs begin


@pytest.mark.parametrize(
    ("chosen", "step"),
    [
        ({"codec": "fp16"}, 0),
        ({"codec": "coarse"}, 2),  # its own start
        ({"codec": "twice"}, 3),
        ({"codec": "coarse", "codec_start_step": 0}, 0),
        ({"codec": "coarse", "codec_start_step": 17}, 17),
        ({"codec": "fp16", "codec_start_step": 9}, 9),
        ({"codec": "none", "codec_rules": "head=twice"}, 3),
    ],
)
def test_a_codec_begins_with_its_own_step_or_the_chosen_one(
    chosen: dict[str, Any], step: int
) -> None:
    plans = Planner(Settings(**chosen), 2)
    for now in range(30):
        plans.begin(now)
        wanted = Settings(**chosen) if now >= step else None
        rules = parse_rules(plans.active.codec_rules)
        lossy = {plans.active.codec, *(codec for _, codec in rules)} - {"none"}
        assert bool(lossy) == (now >= step), now
        if wanted is not None:
            assert plans.active.codec == wanted.codec
            assert rules == parse_rules(wanted.codec_rules)


def test_a_verdict_is_saved_and_read_again() -> None:
    both = frozenset({"twice:scale=2", "coarse"})
    verdict = Verdict(both, 2, frozenset({"coarse"}), "slow")
    assert Verdict.from_dict(verdict.to_dict()) == verdict
    assert verdict.to_dict() == {
        "priced": ["coarse", "twice:scale=2"],
        "world_size": 2,
        "refused": ["coarse"],
        "reason": "slow",
    }


def test_each_codec_begins_with_its_own_step() -> None:
    plans = Planner(Settings(codec="fp16", codec_rules="head=evens"), 2)
    for now in range(6):
        plans.begin(now)
        assert plans.active.codec == "fp16"
        assert parse_rules(plans.active.codec_rules) == (("head", "evens" if now >= 4 else "none"),)


# ---------------------------------------------------------------- on real ranks

SIZES = {"chunk_mb": 0.004, "fusion_mb": 0.001, "credit_mb": 0.016, "timeout_s": 30.0}


@dataclass
class Told:
    """What a training did: codecs on the wire in each step, and warnings."""

    codecs: dict[int, set[str]]
    issued: list[tuple[int, int, str]]
    warnings: list[str]
    params: list[torch.Tensor]
    report: Any
    verdict: Verdict | None


@contextmanager
def watching(issued: list[tuple[int, int, str]]) -> Iterator[None]:
    """Note the step, index and codec of every task that is issued."""
    issue = Flight.issue

    def spy(self: Flight, run: Any, lane: Any) -> None:
        issued.append((run.step, run.task.index, run.task.codec))
        issue(self, run, lane)

    with mock.patch.object(Flight, "issue", spy):
        yield


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def trained(rank: int, steps: int, defer: bool = False, hooked: bool = True, **chosen: Any) -> Told:
    torch.manual_seed(7)
    model = DDP(mlp(), bucket_cap_mb=0.01, gradient_as_bucket_view=defer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    listener = Listener()
    logging.getLogger("commsched").addHandler(listener)
    issued: list[tuple[int, int, str]] = []
    state = None
    with watching(issued):
        if hooked:
            own = {} if defer else {"policy": "fifo"}  # the automatic mode measures the real link
            chosen = {**SIZES, "codec_min_numel": 64, **own, **chosen}
            state = commsched.attach(model, optimizer=optimizer if defer else None, **chosen)
        for step in range(steps):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            mlp_loss(model, step, rank).backward()
            optimizer.step()
        if state is not None:
            state.synchronize()
    logging.getLogger("commsched").removeHandler(listener)
    used: dict[int, set[str]] = {step: set() for step in range(steps)}
    for step, _, codec in issued:
        used[step].add(codec)
    params = [param.detach().clone() for param in model.module.parameters()]
    report, verdict = None, None
    if state is not None:
        report = state.report()
        verdict = state._session.engine.planner.verdict  # type: ignore[union-attr]
        state.close()
    return Told(used, issued, listener.said, params, report, verdict)


def assert_told_alike(told: Told) -> None:
    """Every rank issued the same tasks, step by step."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, told.issued)
    assert all(row == rows[0] for row in rows)
    assert_equal_on_all_ranks(told.params)


def assert_begins_at(told: Told, start: int, codec: str) -> None:
    for step, used in told.codecs.items():
        assert used == ({"none"} if step < start else {codec, "none"}), (step, used)


@contextmanager
def priced(coding_s: float, link: Link = GIGABIT) -> Iterator[mock.Mock]:
    """As if encoding took so long, and the link were that one."""
    with (
        mock.patch.object(planner, "coding_s", return_value=coding_s) as measured,
        mock.patch.object(planner, "probe_link", return_value=link),
    ):
        yield measured


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
@ranks(2)
def test_a_codec_begins_at_exactly_that_step_on_all_ranks(
    rank: int, start: int, defer: bool
) -> None:
    """Step 0 has DDP's first buckets, step 1 others; later ones have a plan that must change."""
    with registered(), mock.patch.object(planner, "coding_s", side_effect=AssertionError("priced")):
        told = trained(rank, 10, defer, codec="coarse", codec_start_step=start, codec_force=True)
        assert_begins_at(told, start, "coarse")
        assert_told_alike(told)
        assert told.verdict is None
        assert told.report.codec == "coarse"


@pytest.mark.parametrize(("codec", "start"), [("coarse", 2), ("twice", 3)])
@ranks(2)
def test_without_a_step_the_codec_chooses(rank: int, codec: str, start: int) -> None:
    with registered():
        told = trained(rank, 6, codec=codec, codec_force=True)
        assert_begins_at(told, start, codec)
        assert_told_alike(told)


@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_before_it_begins_gradients_are_exact(rank: int, defer: bool) -> None:
    with registered():
        plain = trained(rank, 5, hooked=False)
        told = trained(rank, 5, defer, codec="coarse", codec_start_step=5, codec_force=True)
        assert_same(told.params, plain.params)
        lossy = trained(rank, 5, defer, codec="coarse", codec_start_step=4, codec_force=True)
        assert any(not torch.equal(a, b) for a, b in zip(lossy.params, plain.params, strict=True))


@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_a_codec_that_costs_more_than_it_saves_is_never_used(rank: int, defer: bool) -> None:
    with registered(), priced(1.0) as measured:
        plain = trained(rank, 10, hooked=False)
        told = trained(rank, 10, defer, codec="coarse", codec_start_step=6)
        assert set().union(*told.codecs.values()) == {"none"}
        assert_same(told.params, plain.params)
        assert_told_alike(told)
        assert measured.call_count == 1
        assert measured.call_args.args == ("coarse", 2, True)
        assert told.verdict is not None
        assert told.verdict.refused == {"coarse"}
        assert told.report.codec == "none"
        mine = [text for text in told.warnings if "gradients travel exactly" in text]
        assert len(mine) == (1 if rank == 0 else 0)
        if rank == 0:
            assert "codec coarse takes" in mine[0]
            assert "codec_force=True" in mine[0]


@ranks(2)
def test_what_began_early_is_priced_once_warm_and_ends_then(rank: int) -> None:
    with registered(), priced(1.0) as measured:
        told = trained(rank, 10, codec="coarse", codec_start_step=2)
        for step, used in told.codecs.items():
            assert used == ({"coarse", "none"} if 2 <= step < 6 else {"none"}), step
        assert measured.call_count == 1
        assert_told_alike(told)


@pytest.mark.parametrize("start", [0, 6, 8])
@ranks(2)
def test_a_codec_that_saves_more_than_it_costs_is_kept(rank: int, start: int) -> None:
    with registered(), priced(1e-9) as measured:  # saves 4 ns a byte
        told = trained(rank, 10, codec="coarse", codec_start_step=start)
        assert_begins_at(told, start, "coarse")
        assert_told_alike(told)
        assert measured.call_count == 1
        assert told.verdict == Verdict(frozenset({"coarse"}), 2)
        assert told.report.codec == "coarse"
        assert not [text for text in told.warnings if "exactly" in text]


@ranks(2)
def test_a_forced_codec_is_used_whatever_it_costs(rank: int) -> None:
    with registered(), priced(1.0) as measured:
        told = trained(rank, 9, codec="coarse", codec_force=True)
        assert_begins_at(told, 2, "coarse")
        assert measured.call_count == 0
        assert told.verdict is None
        assert not [text for text in told.warnings if "exactly" in text]


@ranks(2)
def test_ranks_that_measure_differently_come_to_one_verdict(rank: int) -> None:
    with registered(), priced(1.0 if rank == 0 else 0.0):
        told = trained(rank, 9, codec="coarse", codec_start_step=6)
        assert_told_alike(told)
        verdicts: list[Any] = [None, None]
        dist.all_gather_object(verdicts, told.verdict)
        assert verdicts[0] == verdicts[1] is not None


@ranks(2)
def test_only_the_codec_that_costs_too_much_is_refused(rank: int) -> None:
    """Each codec of the rules is priced by itself."""

    def cost(codec: str, world_size: int, feedback: bool) -> float:
        return 1.0 if codec == "coarse" else 0.0

    rules = "0.*=coarse;2.weight=evens"
    with (
        registered(),
        priced(0.0),
        mock.patch.object(planner, "coding_s", side_effect=cost) as measured,
    ):
        told = trained(rank, 9, codec="fp16", codec_rules=rules, codec_start_step=2)
        assert told.codecs[1] == {"none"}
        assert told.codecs[5] == {"coarse", "evens", "fp16"}
        assert told.codecs[6] == told.codecs[8] == {"none", "evens", "fp16"}
        assert {call.args[0] for call in measured.call_args_list} == {"coarse", "evens", "fp16"}
        assert told.verdict is not None
        assert told.verdict.refused == {"coarse"}
        assert_told_alike(told)


@ranks(2)
def test_exact_gradients_are_not_priced(rank: int) -> None:
    with priced(1.0) as measured:
        told = trained(rank, 9, codec="none")
        assert measured.call_count == 0
        assert told.verdict is None


@pytest.mark.parametrize("codec", LOSSY)
@ranks(2, timeout_s=100)
def test_every_codec_is_priced_for_real_in_a_running_job(rank: int, codec: str) -> None:
    """Whatever the verdict is, on a loopback link: all ranks come to the same one and go on."""
    torch.set_num_threads(1)
    told = trained(rank, 9, codec=codec)
    assert told.verdict is not None
    assert told.verdict.refused in (frozenset(), frozenset({codec}))
    assert bool(told.verdict.reason) == bool(told.verdict.refused)
    assert told.codecs[8] == (
        {"none"} if told.verdict.refused else {codec, "none"} & told.codecs[8]
    )
    assert_told_alike(told)
