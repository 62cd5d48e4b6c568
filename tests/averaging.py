"""Averaging one chunk over simulated ranks, in one process: what codecs' `rounds` do on a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commsched.codecs import Codec
from commsched.exchange import Pool, Transfer
from commsched.layout import Chunk, Piece, Span
from commsched.memory import Memory
from commsched.parcel import Parcel

__all__ = ["World"]


class _Rank:
    """A group's one member: keeps the collective it is asked for until all have asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.call: Any = None

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.call = ("sum", tensor)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
    ) -> Any:
        assert (out.numel(), inp.numel()) == (sum(out_sizes), sum(in_sizes))
        self.call = ("swap", out.split(list(out_sizes)), inp.split(list(in_sizes)))


class World:
    """Some ranks, each with its memory.

    Attributes:
        sent_bytes: by each rank in the last `average`, by its transfers' own count.
    """

    def __init__(self, codec: Codec, size: int, feedback: str = "auto") -> None:
        self.codec = codec
        self.size = size
        self.feedback = codec.keeps_errors(feedback)
        self.memories = [Memory() for _ in range(size)]
        self.pools = [Pool() for _ in range(size)]
        self.sent_bytes = [0] * size
        self.step = 0

    def average(self, rows: Sequence[torch.Tensor], rows_of: int = 0) -> list[torch.Tensor]:
        """Each rank's result for one chunk of one parameter. `rows` are left as they are.

        Args:
            rows: each rank's gradients, 1-D.
            rows_of: the parameter's first dimension, where it is a matrix.
        """
        numel = rows[0].numel()
        chunk = Chunk((Piece(0, 0, numel, rows_of),), "float32")
        spans = (Span("w", numel, 0, 0, numel),)
        grads = [row.clone() for row in rows]
        each = []
        for rank, grad in enumerate(grads):
            parcel = Parcel(
                chunk,
                spans,
                [grad],
                rank,
                self.size,
                self.step,
                self.memories[rank],
                self.feedback,
                self.pools[rank],
            )
            each.append(self.codec.rounds(parcel))
        self.sent_bytes = [0] * self.size
        self._drive(each)
        self.step += 1
        return grads

    def errors(self, name: str = "error") -> torch.Tensor:
        """The ranks' errors, summed, in float64."""
        kept = [memory.slots().get(name, {}).get("w") for memory in self.memories]
        return sum((error.double() for error in kept if error is not None), torch.zeros(1).double())

    def _drive(self, each: list[Any]) -> None:
        transfers: list[Transfer | None] = [next(rounds) for rounds in each]
        for number, _ in enumerate(self.codec.ops):
            results = self._collective([t for t in transfers if t is not None])
            transfers = [_go_on(r, result) for r, result in zip(each, results, strict=True)]
            assert all((t is None) == (number + 1 == len(self.codec.ops)) for t in transfers)

    def _collective(self, transfers: list[Transfer]) -> list[torch.Tensor]:
        ranks = [_Rank(rank, self.size) for rank in range(self.size)]
        stages = [t.start(rank) for t, rank in zip(transfers, ranks, strict=True)]
        for rank, one in enumerate(stages):
            next(one)
            self.sent_bytes[rank] += transfers[rank].sent_bytes
        _perform(ranks)
        return [_result(one) for one in stages]


def _go_on(rounds: Any, result: torch.Tensor) -> Any:
    try:
        return rounds.send(result)
    except StopIteration:
        return None


def _result(stages: Any) -> torch.Tensor:
    try:
        stages.send([])
    except StopIteration as stop:
        return stop.value
    raise AssertionError("an exchange starts one collective")


def _perform(ranks: list[_Rank]) -> None:
    kinds = {rank.call[0] for rank in ranks}
    assert len(kinds) == 1, kinds
    if kinds == {"sum"}:
        total = ranks[0].call[1].clone()
        for rank in ranks[1:]:
            total += rank.call[1]
        for rank in ranks:
            rank.call[1].copy_(total)
        return
    for receiver in ranks:
        for sender in ranks:
            sent = sender.call[2][receiver.rank]
            got = receiver.call[1][sender.rank]
            assert sent.numel() == got.numel()
            got.copy_(sent)
