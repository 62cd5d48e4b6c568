"""The automatic mode in whole trainings: whatever it keeps, parameters are plain DDP's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched.errors import CommSchedError
from commsched.planner import Planner
from commsched.recorder import Recorder
from commsched.tuning import candidates, phases
from commsched.tuning.steering import Steering
from commsched.tuning.trials import Trials
from tests.compare import assert_equal_on_all_ranks
from tests.deferring import Training, differ
from tests.distributed import ranks
from tests.parity import CASES, assert_same, mlp, mlp_loss, train
from tests.trying import TUNED, as_if, winning

SYNCHRONOUS = ("ddp", "fifo")
DEFERRED = ("ddp", "fifo, deferred", "priority, deferred", "rs_ag, deferred", "fifo")


def outcome_of(state: commsched.State | None) -> dict[str, Any]:
    assert state is not None
    report = state.report()
    assert report.tuning is not None, report
    assert report.tuning["chosen"] == report.choice
    return report.tuning


def alike(value: object) -> bool:
    """Whether all ranks have the same."""
    rows: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return all(row == rows[0] for row in rows)


# ---------------------------------------------------------------- exact, whatever wins


@pytest.mark.parametrize("winner", DEFERRED)
@ranks(2)
def test_with_the_optimizer_handed_over(rank: int, winner: str) -> None:
    ours, plain = Training(policy="auto"), Training(plain=True)
    names, waiting = [], []
    with as_if(winning(winner)) as tried:
        for step in range(TUNED + 5):
            ours.step(rank)
            plain.step(rank)
            waiting.append(ours.pending() > 0)
            names.append(ours.state._session.steering.choice)  # type: ignore[union-attr]
            if step % 5 == 0:
                assert not differ(ours.values(), plain.values()), step
    tuning = outcome_of(ours.state)
    assert tuning["chosen"] == winner
    assert tried[0] == "ddp"
    assert set(tried) >= set(DEFERRED)
    assert alike(names)  # all ranks switch in the same step
    assert waiting[-1] is ("deferred" in winner)
    assert names[-1] == names[TUNED] == winner
    assert not differ(ours.values(), plain.values())
    ours.close()


@pytest.mark.parametrize("winner", SYNCHRONOUS)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize(
    "name", ["mlp", "odd-many-buckets", "find-unused", "static-graph", "sparse", "accumulation"]
)
@ranks(2)
def test_without_the_optimizer(rank: int, name: str, bucket_view: bool, winner: str) -> None:
    case, view = CASES[name], {"gradient_as_bucket_view": bucket_view}
    # Real chunk sizes: a user's are left as they are, and there would be less to try.
    settings = {"chunk_mb": 0.0, "fusion_mb": 0.001, "credit_mb": 0.0}
    theirs, _ = train(case, "adamw", TUNED, rank, None, **view)
    with as_if(winning(winner)):
        ours, state = train(case, "adamw", TUNED, rank, settings, **view)
    assert_same(ours, theirs)
    assert outcome_of(state)["chosen"].startswith(winner)
    assert state is not None
    report = state.report()
    assert report.deferred_steps == 0
    assert report.wire_bytes_per_step > 0
    assert state.metrics()["commsched/steps"] == TUNED
    state.close()


@pytest.mark.parametrize("winner", DEFERRED)
@ranks(4)
def test_four_ranks_hold_the_same(rank: int, winner: str) -> None:
    ours, plain = Training(policy="auto"), Training(plain=True)
    with as_if(winning(winner)):
        for _ in range(TUNED):
            ours.step(rank)
            plain.step(rank)
    assert outcome_of(ours.state)["chosen"] == winner
    assert_equal_on_all_ranks(ours.values())
    assert_same(ours.values(), plain.values(), rtol=1e-4)
    ours.close()


class Buffered(nn.Module):
    """DDP broadcasts its buffers in every forward, on its own group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("winner", ["ddp", "priority, deferred"])
@ranks(2)
def test_buffers_evaluation_and_clipping_in_between(rank: int, winner: str) -> None:
    ours, plain = Training(Buffered, policy="auto"), Training(Buffered, plain=True)
    with as_if(winning(winner)):
        for step in range(TUNED):
            for one in (ours, plain):
                one.backward(rank)
                if step % 3 == 0:
                    torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
                one.optimizer.step()
                if step % 4 == 0:
                    one.model.eval()
                    with torch.no_grad():
                        one.model(torch.ones(3, 24))
                    one.model.train()
    assert outcome_of(ours.state)["chosen"] == winner
    assert not differ(ours.values(), plain.values())
    for our, their in zip(ours.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(our, their)
    ours.close()


@pytest.mark.parametrize("winner", ["ddp", "fifo"])
@ranks(2)
def test_uneven_inputs(rank: int, winner: str) -> None:
    """A joined rank answers hooks outside of any backward, in plain mode too."""

    def trained(hooked: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = DDP(mlp(), bucket_cap_mb=0.01)
        state = commsched.attach(model, fusion_mb=0.001) if hooked else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([model]):
            for step in range(TUNED + (12 if rank == 0 else 4)):
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                mlp_loss(model, step, rank).backward()
                optimizer.step()
        if state is not None:
            assert outcome_of(state)["chosen"].startswith(winner)
            state.close()
        return [param.detach().clone() for param in model.module.parameters()]

    with as_if(winning(winner)):
        ours = trained(hooked=True)
    assert_same(ours, trained(hooked=False))


@ranks(2)
def test_buckets_that_change_from_step_to_step_are_never_tried_on(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(
        nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]),
        bucket_cap_mb=0.01,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )
    state = commsched.attach(model)
    for step in range(20):
        model.zero_grad()
        used = model.module[step % 3]  # type: ignore[index]
        with mock.patch.object(
            nn.ModuleList, "forward", lambda _, x, used=used: used(x), create=True
        ):
            model(torch.ones(2, 64)).sum().backward()
    assert state.report().tuning is None
    assert state._session is not None
    assert state._session.steering is not None
    assert state._session.steering.phases.unsteady
    state.close()


# ---------------------------------------------------------------- lossy only where allowed


@pytest.mark.parametrize("allow", ["", "int8"])
@ranks(2)
def test_a_codec_is_chosen_only_if_allowed(rank: int, allow: str) -> None:
    def seconds(name: str) -> float:
        return 0.01 if "int8" in name else 0.1

    ours = Training(policy="auto", allow=allow, codec_min_numel=64)
    plain = Training(plain=True)
    # As if nothing that is sent were ever hidden: then all that is large would be compressed.
    with as_if(seconds) as tried, mock.patch.object(candidates, "HIDDEN", -1.0):
        for _ in range(TUNED):
            ours.step(rank)
            plain.step(rank)
    tuning, report = outcome_of(ours.state), ours.state.report()  # type: ignore[union-attr]
    assert any("int8" in name for name in tried) is bool(allow)
    assert ("int8" in tuning["chosen"]) is bool(allow)
    assert differ(ours.values(), plain.values()) is bool(allow)
    assert bool(report.tuning["rows"][0]["codec"] != "none") is bool(allow)  # type: ignore[index]
    assert_equal_on_all_ranks(ours.values())
    ours.close()


@ranks(2)
def test_an_allowed_codec_is_tried_only_once_it_has_begun(rank: int) -> None:
    ours = Training(policy="auto", allow="int8", codec_min_numel=64, codec_start_step=20)
    with (
        as_if(lambda name: 0.01 if "int8" in name else 0.1) as tried,
        mock.patch.object(candidates, "HIDDEN", -1.0),
    ):
        for _ in range(18):
            ours.step(rank)
        assert tried == []
        for _ in range(TUNED):
            ours.step(rank)
    assert "int8" in outcome_of(ours.state)["chosen"]
    ours.close()


@ranks(2)
def test_what_a_rejected_codec_has_kept_is_forgotten(rank: int) -> None:
    """It is of old gradients: nobody must add it to new ones."""

    def kept() -> dict[str, Any]:
        assert ours.state is not None
        return ours.state._session.memory.slots()  # type: ignore[union-attr]

    ours = Training(policy="auto", allow="topk", codec_min_numel=64)
    had = 0
    with as_if(winning("ddp")) as tried, mock.patch.object(candidates, "HIDDEN", -1.0):
        for _ in range(TUNED):
            ours.step(rank)
            had += bool(kept())
    assert any("topk" in name for name in tried)
    assert had > 0
    assert outcome_of(ours.state)["chosen"] == "ddp"
    assert not kept()
    ours.close()


@ranks(2)
def test_a_lossy_candidate_must_beat_the_exact_ones_clearly(rank: int) -> None:
    ours = Training(policy="auto", allow="int8", codec_min_numel=64)
    with (
        as_if(lambda name: 0.0995 if "int8" in name else 0.1) as tried,
        mock.patch.object(candidates, "HIDDEN", -1.0),
    ):
        for _ in range(TUNED):
            ours.step(rank)
    assert any("int8" in name for name in tried)
    assert "int8" not in outcome_of(ours.state)["chosen"]
    ours.close()


@ranks(2)
def test_a_policy_of_the_users_is_used_as_it_is(rank: int) -> None:
    with as_if(winning("rs_ag, deferred")) as tried:
        ours = Training(policy="fifo").run(rank, TUNED)
    assert tried == []
    assert ours.state is not None
    report = ours.state.report()
    assert report.tuning is None
    assert report.policy == report.choice == "fifo"
    ours.close()


# ---------------------------------------------------------------- what is said


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


@pytest.mark.parametrize(
    ("winner", "level"), [("ddp", logging.WARNING), ("rs_ag, deferred", logging.INFO)]
)
@ranks(2)
def test_one_line_tells_what_was_chosen_and_why(rank: int, winner: str, level: int) -> None:
    said, logger = Said(), logging.getLogger("commsched")
    logger.addHandler(said)
    before = logger.level
    logger.setLevel(logging.INFO)
    with as_if(winning(winner)):
        ours = Training(policy="auto")
        for _ in range(TUNED):
            ours.step(rank)
    logger.setLevel(before)
    logger.removeHandler(said)
    lines = [(at, line) for at, line in said.lines if line.startswith("automatic mode keeps")]
    assert [at for at, _ in lines] == ([level] if rank == 0 else [])
    assert ours.state is not None
    text = str(ours.state.report())
    assert f"automatic mode keeps {winner}" in text
    for name in DEFERRED:
        assert name in text
    ours.close()


# ---------------------------------------------------------------- kept, and resumed


def tuned(rank: int, file: str, steps: int = TUNED, **settings: Any) -> tuple[Training, list[str]]:
    ours = Training(policy="auto", tuning_file=file, **settings)
    with as_if(winning("rs_ag, deferred")) as tried:
        for _ in range(steps):
            ours.step(rank)
    return ours, tried


@ranks(2)
def test_a_later_run_of_the_same_job_tries_nothing(rank: int, tmp_path: Path) -> None:
    file = str(tmp_path / "tuned.json")
    first, tried = tuned(rank, file)
    assert tried
    first.close()
    dist.barrier()
    second, tried = tuned(rank, file, 20)
    assert tried == []
    kept = json.loads(Path(file).read_text())["outcome"]
    assert json.loads(json.dumps(outcome_of(second.state))) == kept
    assert second.pending() > 0
    second.close()
    dist.barrier()
    other, tried = tuned(rank, file, credit_mb=0.032)  # another job
    assert tried
    other.close()


@ranks(2)
def test_a_job_is_told_by_its_values(rank: int, tmp_path: Path) -> None:
    """Not by who has set them, nor by what says where this run leaves its files."""
    file = str(tmp_path / "tuned.json")
    first, tried = tuned(rank, file)
    assert tried
    first.close()
    dist.barrier()
    fusion_mb = first.state.settings.fusion_mb  # type: ignore[union-attr]
    for alike in ({"fusion_mb": fusion_mb}, {"timeout_s": 77.0, "trace": str(tmp_path)}):
        second, tried = tuned(rank, file, 20, **alike)
        assert tried == [], alike
        second.close()


@ranks(2)
def test_any_error_of_rank_0_is_heard_by_all(rank: int) -> None:
    def fails(self: Trials, *_: object) -> None:
        raise ZeroDivisionError("by test")

    with (
        mock.patch.object(Trials, "_new_tuner", fails),
        pytest.raises(CommSchedError, match="automatic mode failed: ZeroDivisionError: by test"),
    ):
        Training(policy="auto", timeout_s=60.0).run(rank, 20)


@ranks(2)
def test_where_nothing_can_be_measured_nothing_is_tried(rank: int) -> None:
    said, logger = Said(), logging.getLogger("commsched")
    logger.addHandler(said)
    unmeasured = mock.patch.object(Recorder, "summary", return_value={"steps": 0})
    with unmeasured, as_if(winning("rs_ag, deferred")) as tried:
        ours = Training(policy="auto")
        for _ in range(20):
            ours.step(rank)
    logger.removeHandler(said)
    assert tried == []
    assert [line for _, line in said.lines if "could not be measured" in line] == (
        ["this model's steps could not be measured: nothing is tried"] if rank == 0 else []
    )
    ours.close()


@ranks(2)
def test_a_damaged_file_is_an_error_that_says_so(rank: int, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    if rank == 0:
        file.write_text('{"job": ')
    dist.barrier()
    with pytest.raises(CommSchedError, match=r"tuning_file=.*cannot be read.*remove it"):
        tuned(rank, str(file), 20)


@ranks(2)
def test_a_file_that_cannot_be_written_stops_nothing(rank: int) -> None:
    ours, tried = tuned(rank, "/proc/nowhere/tuned.json")
    assert tried
    assert outcome_of(ours.state)["chosen"] == "rs_ag, deferred"
    ours.close()


@ranks(2)
def test_a_resumed_run_goes_on_with_what_was_chosen(rank: int) -> None:
    with as_if(winning("rs_ag, deferred")) as tried:
        ours = Training(policy="auto")
        for _ in range(TUNED):
            ours.step(rank)
        assert ours.state is not None
        saved = ours.state.state_dict()
        ours.close()
        count = len(tried)
        for same in (True, False):
            again = Training(policy="auto", **({} if same else {"credit_mb": 0.032}))
            assert again.state is not None
            again.state.load_state_dict(saved)
            for _ in range(20):
                again.step(rank)
            assert (len(tried) == count) is same
            again.close()


@ranks(2)
def test_a_static_graph_that_runs_already_does_not_wait_for_single_buckets(rank: int) -> None:
    """Its first backward is another one, but that was before the session began."""
    graph, settings = {"static_graph": True}, {"policy": "auto", "fusion_mb": 1.0, "chunk_mb": 4.0}
    ours, plain = Training(ddp=graph, **settings), Training(ddp=graph, plain=True)
    for step in range(20):
        assert ours.state is not None
        if step == 8:
            ours.state.load_state_dict(ours.state.state_dict())
        ours.step(rank)
        plain.step(rank)
    assert not differ(ours.values(), plain.values())
    ours.close()


# ---------------------------------------------------------------- and again


@ranks(2)
def test_ranks_try_again_together_when_steps_drift(rank: int) -> None:
    """From plain DDP, whose steps the engine does not see, to another candidate."""
    drift = [1.0]
    winner = ["ddp"]

    def drifted(self: Any) -> float:
        return drift[0] if rank == 0 else 1.5 * drift[0]

    names: list[str] = []
    with (
        as_if(lambda name: winning(winner[0])(name)) as tried,
        mock.patch.object(phases, "CHECK", 6),
        mock.patch.object(Steering, "_drift", drifted),
    ):
        ours, plain = Training(policy="auto"), Training(plain=True)
        ours.step(rank)  # the phases begin with the first bucket
        plain.step(rank)
        for step in range(2 * TUNED):
            if step == TUNED:
                assert outcome_of(ours.state)["chosen"] == "ddp"
                drift[0], winner[0] = 2.0, "priority, deferred"
                count = len(tried)
            if step > TUNED and len(tried) > count:
                drift[0] = 0.9
            ours.step(rank)
            plain.step(rank)
            names.append(ours.state._session.steering.choice)  # type: ignore[union-attr]
    assert outcome_of(ours.state)["chosen"] == "priority, deferred"
    assert not differ(ours.values(), plain.values())
    assert alike(names)
    ours.close()


@ranks(2)
def test_a_users_codec_that_begins_late_is_waited_for(rank: int) -> None:
    """Nothing is tried before, or what is found would not hold."""
    ours = Training(policy="auto", codec="bf16", codec_start_step=20)
    begun: list[int] = []
    start = Planner._try

    def spy(self: Planner, lane: Any, begins: Any, profile: Any) -> None:
        if begins.measured is not None:
            begun.append(self._step)
        start(self, lane, begins, profile)

    with mock.patch.object(Planner, "_try", spy), as_if(winning("rs_ag, deferred")) as tried:
        for _ in range(20 + TUNED):
            ours.step(rank)
    assert begun[0] == 20
    assert "ddp" not in tried  # the user's codec is not taken away
    assert ours.state is not None
    assert ours.state.report().codec == "bf16"
    ours.close()
