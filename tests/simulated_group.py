"""The collectives of simulated ranks, in one process: each asks, then all are answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from commsched.exchange import Transfer

__all__ = ["exchanged"]


class _Member:
    """One rank's end: keeps the collective it is asked for until all have asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.call: tuple[Any, ...] = ()

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.call = ("all_reduce", tensor)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> Any:
        assert (out.numel(), inp.numel()) == (sum(out_sizes), sum(in_sizes))
        self.call = ("all_to_all", out.split(list(out_sizes)), inp.split(list(in_sizes)))


def exchanged(transfers: Sequence[Transfer], collective: str | None = None) -> list[torch.Tensor]:
    """What each rank's exchange returns. All must ask for the same collective, this one if given.

    Each starts one collective only.
    """
    members = [_Member(rank, len(transfers)) for rank in range(len(transfers))]
    stages = [one.start(member) for one, member in zip(transfers, members, strict=True)]
    for stage in stages:
        next(stage)
    (kind,) = {member.call[0] for member in members}
    assert kind == (collective or kind), (kind, collective)
    if kind == "all_reduce":
        answers = [[total] for total in _summed([member.call[1] for member in members])]
    else:
        answers = [_swapped(members, receiver) for receiver in members]
    results = []
    for stage, answer in zip(stages, answers, strict=True):
        with pytest.raises(StopIteration) as stop:
            stage.send(answer)
        results.append(stop.value.value)
    return results


def _summed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """As a ring does: the sum arrives in each rank's own tensor, if that is dense."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return [total if total.is_sparse else tensor.copy_(total) for tensor in tensors]


def _swapped(members: list[_Member], receiver: _Member) -> list[torch.Tensor]:
    for sender in members:
        sent, got = sender.call[2][receiver.rank], receiver.call[1][sender.rank]
        assert sent.numel() == got.numel()
        got.copy_(sent)
    return []
