"""Codecs' state: resumed bit for bit, accepted elsewhere without loss, refused if wrong."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from commsched import codecs, planner
from commsched.checkpoint import Checkpoint
from commsched.errors import CommSchedError
from commsched.memory import Memory
from tests.distributed import ranks

STATEFUL = [name for name in codecs.names() if codecs.get(name).lossy]
SIZES = {"chunk_mb": 0.004, "fusion_mb": 0.001, "credit_mb": 0.02, "codec_min_numel": 64}


class Run:
    """A small training whose every part can be saved and made anew."""

    def __init__(self, codec: str, width: int = 40, defer: bool = False, **settings: Any) -> None:
        torch.manual_seed(3)
        layers = [nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 48), nn.ReLU()]
        self.model = DDP(
            nn.Sequential(*layers, nn.Linear(48, 4)),
            bucket_cap_mb=settings.pop("bucket_cap_mb", 0.01),
            gradient_as_bucket_view=True,
            **settings.pop("ddp", {}),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        chosen = {"codec": codec, "codec_start_step": 2, "codec_force": True, **SIZES, **settings}
        self.state = commsched.State(optimizer=self.optimizer if defer else None, **chosen)
        self.model.register_comm_hook(self.state, commsched.hook)

    def train(self, steps: range, rank: int) -> Run:
        for step in steps:
            torch.manual_seed(100 * step + rank)
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 16)).square().mean().backward()
            self.optimizer.step()
        return self

    def save(self, gather: bool = False) -> bytes:
        file = io.BytesIO()
        state = self.state.state_dict(gather=gather)
        parts = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "commsched": state}, file)
        return file.getvalue()

    def load(self, saved: bytes, **options: Any) -> Run:
        data = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.module.load_state_dict(data["model"])
        self.optimizer.load_state_dict(data["optimizer"])
        self.state.load_state_dict(data["commsched"], **options)
        return self

    def params(self) -> list[torch.Tensor]:
        self.state.synchronize()
        return [param.detach().clone() for param in self.model.module.parameters()]

    def close(self) -> None:
        self.state.close()


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(our, their), (index, float((our - their).abs().max()))


def assert_equal_on_all_ranks(params: list[torch.Tensor]) -> None:
    flat = torch.cat([param.flatten() for param in params])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    for row in rows[1:]:
        assert torch.equal(row, rows[0])


@pytest.mark.parametrize("codec", STATEFUL)
@ranks(2)
def test_a_resumed_run_goes_on_bit_for_bit(rank: int, codec: str) -> None:
    whole = Run(codec).train(range(11), rank)
    begun = Run(codec).train(range(6), rank)
    saved = begun.save()
    begun.close()
    resumed = Run(codec).load(saved).train(range(6, 11), rank)
    assert_equal(resumed.params(), whole.params())
    assert_equal_on_all_ranks(resumed.params())
    exact = Run("none").train(range(11), rank)
    assert any(not torch.equal(a, b) for a, b in zip(exact.params(), whole.params(), strict=True))
    for run in (whole, resumed, exact):
        run.close()


@pytest.mark.parametrize(
    "options",
    [
        {"fusion_mb": 1.0},
        {"fusion_mb": 1.0, "chunk_mb": 4.0, "credit_mb": 16.0},
        {"fusion_mb": 1.0, "ddp": {"find_unused_parameters": True}},
        {"fusion_mb": 0.008, "codec_rules": "2.*=none;0.bias=int8"},
        {"codec_start_step": 6},
        {"codec_start_step": 7},
        {"codec_start_step": 0},
    ],
)
@ranks(2)
def test_also_where_buckets_are_fused_and_when_the_codec_begins(
    rank: int, options: dict[str, Any]
) -> None:
    """DDP's first buckets are others than its later ones: the resumed run must not mind."""
    whole = Run("sign", **options).train(range(11), rank)
    begun = Run("sign", **options).train(range(6), rank)
    saved = begun.save()
    begun.close()
    resumed = Run("sign", **options).load(saved).train(range(6, 11), rank)
    assert_equal(resumed.params(), whole.params())
    whole.close()
    resumed.close()


@ranks(2)
def test_saved_and_resumed_at_every_step(rank: int) -> None:
    run = Run("sign", fusion_mb=1.0, codec_start_step=3)
    saved = [run.train(range(step, step + 1), rank).save() for step in range(7)]
    last = run.params()
    run.close()
    for step in range(6):
        resumed = Run("sign", fusion_mb=1.0, codec_start_step=3).load(saved[step])
        assert_equal(resumed.train(range(step + 1, 7), rank).params(), last)
        resumed.close()


@pytest.mark.parametrize("policy", ["fifo", "priority", "rs_ag"])
@ranks(2)
def test_many_deferred_steps_with_kinds_mixed(rank: int, policy: str) -> None:
    """An exact bias between two encoded weights: no gradient may pass for summed too early."""
    run = Run("int8", defer=True, policy=policy, chunk_mb=0.02).train(range(20), rank)
    assert_equal_on_all_ranks(run.params())
    run.close()


@pytest.mark.parametrize("defer", [False, True])
@ranks(2)
def test_a_late_rank_saves_the_same_plan(rank: int, defer: bool) -> None:
    """The plan is agreed on after the sums are done: one rank must not save before that."""
    run = Run("sign", defer=defer, **({"policy": "fifo"} if defer else {}))
    for step in range(3):
        run.train(range(step, step + 1), rank)
        if rank == 0:
            time.sleep(0.3)
        digests: list[Any] = [None, None]
        dist.all_gather_object(digests, Checkpoint.from_dict(run.state.state_dict()).digest)
        assert digests[0] == digests[1]
    run.close()


@ranks(2)
def test_force_and_another_codec_on_resume(rank: int) -> None:
    """A verdict holds for what it judged."""
    with mock.patch.object(planner, "coding_s", return_value=1.0):  # never worth it
        run = Run("int8", codec_force=False).train(range(9), rank)
        saved = run.save()
        assert run.state.report().codec == "none"
        run.close()
        same = Run("int8", codec_force=False).load(saved).train(range(9, 10), rank)
        assert same.state.report().codec == "none"
        forced = Run("int8").load(saved).train(range(9, 10), rank)
        assert forced.state.report().codec == "int8"
    with mock.patch.object(planner, "coding_s", return_value=0.0):  # nothing dearer
        other = Run("sign", codec_force=False).load(saved).train(range(9, 11), rank)
        assert other.state.report().codec == "sign"
        assert other.state.state_dict()["verdict"]["priced"] == ["sign"]
    for one in (same, forced, other):
        one.close()


@pytest.mark.parametrize("codec", ["sign", "powersgd"])
@ranks(2)
def test_with_a_handed_over_optimizer_too(rank: int, codec: str) -> None:
    options = {"defer": True, "policy": "fifo"}  # another order for each measuring would round anew
    whole = Run(codec, **options).train(range(14), rank)
    begun = Run(codec, **options).train(range(9), rank)
    saved = begun.save()
    begun.close()
    resumed = Run(codec, **options).load(saved).train(range(9, 14), rank)
    assert_equal(resumed.params(), whole.params())
    whole.close()
    resumed.close()


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1"])
@ranks(2)
def test_back_to_a_checkpoint_in_a_living_run(rank: int, codec: str, defer: bool) -> None:
    options = {"defer": True, "policy": "fifo", "fusion_mb": 1.0} if defer else {}
    run = Run(codec, **options).train(range(5), rank)
    saved = run.save()
    first = run.train(range(5, 9), rank).params()
    again = run.load(saved).train(range(5, 9), rank).params()
    assert_equal(again, first)
    run.close()


@ranks(2)
def test_one_gathered_dictionary_serves_all_ranks(rank: int) -> None:
    whole = Run("sign").train(range(9), rank)
    begun = Run("sign").train(range(5), rank)
    saved: list[Any] = [begun.save(gather=True)]
    begun.close()
    dist.broadcast_object_list(saved, 0)  # as if only rank 0 had written a file
    resumed = Run("sign").load(saved[0]).train(range(5, 9), rank)
    assert_equal(resumed.params(), whole.params())
    whole.close()
    resumed.close()


@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.05", "powersgd", "dgc"])
@ranks(2)
def test_other_sizes_are_accepted_and_lose_nothing(rank: int, codec: str) -> None:
    begun = Run(codec).train(range(6), rank)
    saved = begun.save()
    kept = begun.state.state_dict()["slots"][rank]
    begun.close()
    other = Run(codec, chunk_mb=0.002, bucket_cap_mb=0.02).load(saved)
    assert kept["error"]
    torch.testing.assert_close(other.state.state_dict()["slots"][rank], kept, rtol=0, atol=0)
    other.train(range(6, 9), rank)
    assert_equal_on_all_ranks(other.params())
    after = other.state.state_dict()["slots"][rank]["error"]
    assert set(after) == set(kept["error"])
    other.close()


@ranks(2)
def test_what_four_ranks_kept_is_shared_out_to_two(rank: int) -> None:
    run = Run("int8").train(range(4), rank)
    saved = run.state.state_dict(gather=True)
    run.close()
    four = {**saved, "world_size": 4, "slots": {r: saved["slots"][r % 2] for r in range(4)}}
    total = 2 * (saved["slots"][0]["error"]["0.weight"] + saved["slots"][1]["error"]["0.weight"])
    memory = Memory()
    Checkpoint.from_dict(four).restore(memory, rank, 2)
    mine = memory.slots()["error"]["0.weight"]
    dist.all_reduce(mine)
    assert total.any()
    torch.testing.assert_close(mine, total)
    other = Run("int8")
    other.state.load_state_dict(four)
    other.train(range(4, 8), rank)
    assert_equal_on_all_ranks(other.params())
    other.close()


@ranks(2)
def test_a_list_of_all_ranks_dictionaries_is_a_gathered_one(rank: int) -> None:
    run = Run("sign").train(range(4), rank)
    own: list[Any] = [None, None]
    dist.all_gather_object(own, run.state.state_dict())
    merged = Checkpoint.from_dict(own).to_dict()
    torch.testing.assert_close(merged["slots"], run.state.state_dict(gather=True)["slots"])
    run.close()


@ranks(2)
def test_errors_can_be_dropped(rank: int) -> None:
    run = Run("sign").train(range(4), rank)
    saved = run.state.state_dict()
    run.close()
    assert saved["slots"][rank]["error"]
    other = Run("sign")
    other.state.load_state_dict(saved, errors="drop")
    assert other.state.state_dict()["slots"] == {rank: {}}
    assert other.state.state_dict()["step"] == 3
    other.train(range(4, 6), rank)
    assert_equal_on_all_ranks(other.params())
    with pytest.raises(CommSchedError, match="keep"):
        other.state.load_state_dict(saved, errors="some")
    other.close()


@ranks(2)
def test_another_models_state_is_refused(rank: int) -> None:
    run = Run("sign").train(range(4), rank)
    saved = run.state.state_dict()
    run.close()
    other = Run("sign", width=41)
    with pytest.raises(CommSchedError, match=r"another model: 0\.bias, 0\.weight, 2\.weight"):
        other.state.load_state_dict(saved)
    other.close()


@ranks(2, fresh=True)
def test_ranks_that_did_not_load_the_same_are_told(rank: int) -> None:
    run = Run("sign").train(range(4), rank)
    saved = run.state.state_dict()
    run.close()
    other = Run("sign", timeout_s=10.0)
    if rank == 1:
        other.state.load_state_dict(saved)
    with pytest.raises(CommSchedError, match="resumed is"):
        other.train(range(4, 5), rank)


@pytest.mark.parametrize("saved", [{}, {"format": 99}, {"format": 1}, [{"format": 1, "x": 2}], []])
def test_something_else_is_refused(saved: Any) -> None:
    with pytest.raises(CommSchedError, match="state_dict"):
        commsched.State(codec="bf16").load_state_dict(saved)


@ranks(2)
def test_states_of_two_steps_do_not_mix(rank: int) -> None:
    run = Run("sign").train(range(4), rank)
    first = run.state.state_dict()
    second = run.train(range(4, 5), rank).state.state_dict()
    with pytest.raises(CommSchedError, match="different runs or steps"):
        run.state.load_state_dict([first, second])
    run.close()


@ranks(2)
def test_before_the_first_step_there_is_nothing_to_save(rank: int) -> None:
    fresh = Run("sign")
    saved = fresh.state.state_dict(gather=True)
    assert saved["step"] == -1
    assert saved["slots"] == {}
    fresh.state.load_state_dict(saved)  # and that loads
    begun = fresh.train(range(3), rank).params()
    fresh.close()
    again = Run("sign").train(range(3), rank)
    assert_equal(again.params(), begun)
    again.close()


@ranks(2)
def test_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    place: list[Any] = [str(tmp_path)]
    dist.broadcast_object_list(place, 0)
    whole = Run("sign").train(range(9), rank)
    begun = Run("sign").train(range(5), rank)
    dcp.save(
        {
            "model": begun.model.module.state_dict(),
            "optimizer": begun.optimizer.state_dict(),
            "commsched": commsched.Stateful(begun.state),
        },
        checkpoint_id=place[0],
    )
    begun.close()
    resumed = Run("sign")
    parts = {
        "model": resumed.model.module.state_dict(),
        "optimizer": Run("none").train(range(1), rank).optimizer.state_dict(),
        "commsched": commsched.Stateful(resumed.state),
    }
    dcp.load(parts, checkpoint_id=place[0])
    resumed.model.module.load_state_dict(parts["model"])
    resumed.optimizer.load_state_dict(parts["optimizer"])
    resumed.train(range(5, 9), rank)
    assert_equal(resumed.params(), whole.params())
    whole.close()
    resumed.close()
