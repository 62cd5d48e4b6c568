"""Parcel: one chunk of one iteration, as a codec sees it."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from commsched.exchange import Pool, Transfer
from commsched.layout import Chunk, Span
from commsched.memory import Memory

__all__ = ["Parcel", "Rounds", "resumed"]


# A codec's work on one chunk: yields a transfer for each of its `ops`, and is resumed with what
# the exchange returned. All of it runs on the engine's thread.
Rounds = Generator[Transfer, torch.Tensor, None]


@dataclass(frozen=True)
class Parcel:
    """One chunk of one iteration on one rank.

    Attributes:
        chunk: what it carries.
        spans: the parameters in it, in order.
        views: the ranges of the buckets it carries, in order.
        rank: of this process, among `size`.
        size: the number of ranks.
        step: which iteration; equal on all ranks.
        memory: what is kept from step to step.
        feedback: whether its slots are in use.
        pool: tensors to use and give back.
    """

    chunk: Chunk
    spans: tuple[Span, ...]
    views: Sequence[torch.Tensor]
    rank: int
    size: int
    step: int
    memory: Memory
    feedback: bool
    pool: Pool

    def take(self) -> torch.Tensor:
        """This rank's share of the mean: its gradients over the number of ranks, 1-D, float32.

        Contiguous. In the bucket itself where the chunk is one range of a float32 bucket, so that
        `put` has nothing to copy; the bucket then holds shares until `put`.
        """
        share = 1.0 / self.size
        numel = sum(view.numel() for view in self.views)
        if _one_range(self.views):
            return self.views[0].as_strided((numel,), (1,)).mul_(share)
        flat = self.pool.take(torch.float32, numel)
        for part, view in zip(self._split(flat), self.views, strict=True):
            if view.dtype == torch.float32:
                torch.mul(view, share, out=part)  # one pass
            else:
                part.copy_(view).mul_(share)
        return flat

    def put(self, mean: torch.Tensor) -> None:
        """Write the averaged gradients into the buckets. `mean` is what `take` returned."""
        if mean.data_ptr() == self.views[0].data_ptr():
            return
        torch._foreach_copy_(list(self.views), self._split(mean))
        self.pool.give(mean)

    def slot(self, name: str) -> torch.Tensor | None:
        """What is kept under that name for these gradients: 1-D, float32; zeros at first.

        "error" is what lossy encoding has dropped so far. None where there is no error feedback.
        """
        return self.memory.slot(name, self.spans) if self.feedback else None

    def seed(self, *salt: object) -> int:
        """32 bits for random numbers: of this step, this chunk and `salt`, the same on every rank.

        Put `rank` into the salt where ranks must differ. Independent of buckets' numbers, and of
        the process, so that a resumed run draws what the first one would have drawn.
        """
        span = self.spans[0]
        text = f"{self.step}:{span.param}:{span.param_start}:{salt}"
        return zlib.crc32(text.encode())

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(flat, [view.numel() for view in self.views]))


def resumed(rounds: Rounds, result: torch.Tensor) -> Transfer | None:
    """The next transfer, given what the exchange of the last one returned; None after the last."""
    try:
        return rounds.send(result)
    except StopIteration:
        return None


def _one_range(views: Sequence[torch.Tensor]) -> bool:
    """Whether they are float32 and follow each other in memory."""
    ends = [view.data_ptr() + view.nbytes for view in views]
    starts = [view.data_ptr() for view in views[1:]]
    storages = {view.untyped_storage().data_ptr() for view in views}
    return views[0].dtype == torch.float32 and ends[:-1] == starts and len(storages) == 1
