"""Averaging one chunk over simulated ranks, in one process: what codecs' `rounds` do on a lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commsched.codecs import Codec
from commsched.exchange import Pool, Transfer
from commsched.layout import Chunk, Piece, Span
from commsched.memory import Memory
from commsched.parcel import Parcel, resumed
from tests.simulated_group import exchanged

__all__ = ["World"]


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
            sent = [transfer for transfer in transfers if transfer is not None]
            for rank, transfer in enumerate(sent):
                self.sent_bytes[rank] += transfer.sent_bytes
            results = exchanged(sent)
            transfers = [resumed(r, result) for r, result in zip(each, results, strict=True)]
            assert all((t is None) == (number + 1 == len(self.codec.ops)) for t in transfers)
