"""vote: ranks vote on which gradients travel; these are averaged densely."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from commsched import exchange
from commsched.codecs import kernels
from commsched.codecs.base import Codec, Oracle, WireSpec
from commsched.codecs.topk import add_select, check_ratio, clear, gather, kept, scatter, select

if TYPE_CHECKING:
    from commsched.layout import Chunk
    from commsched.parcel import Parcel, Rounds

__all__ = ["Vote"]


def _start(seed: int, numel: int) -> int:
    """Where counting begins among equals: uniform."""
    return seed * numel >> 32


def _elect(ballots: torch.Tensor, start: int, votes: torch.Tensor, winners: torch.Tensor) -> None:
    """Fill `winners` with the indices named by most ballots.

    Of equal ones the first from `start` on and round, in that order.

    Args:
        ballots: a row of indices each, and one number more, which is no vote.
        start: where counting begins.
        votes: int32, one for each index: scratch.
        winners: int32.
    """
    kernel = kernels.load("select")
    if kernel is not None:
        kernel.elect(ballots.numpy(), start, votes.numpy(), winners.numpy())
        return
    places = (ballots[:, :-1].flatten() - start) % votes.numel()
    votes.zero_().index_add_(0, places, torch.ones_like(places))
    select(votes.view(torch.float32), winners)  # small integers are magnitudes
    winners.add_(start).remainder_(votes.numel())


def _alone(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    """Both rounds' wires of a rank that has no others, the first before the second."""
    assert isinstance(codec, Vote)
    magnitudes = grad.view(np.uint32) & 0x7FFFFFFF
    order = np.lexsort((np.arange(grad.size), -magnitudes.astype(np.int64)))
    indices = np.sort(order[: kept(grad.size, codec.ratio)]).astype(np.int32)
    ballot = np.append(indices, np.int32(not np.isfinite(grad).all()))
    winners = np.roll(indices, -np.searchsorted(indices, _start(seed, grad.size)))
    return np.concatenate([ballot.view(np.uint8), grad[winners].view(np.uint8)])


def _average_alone(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    words = wire.view(np.int32)
    indices, flag, values = np.split(words, [words.size // 2, words.size // 2 + 1])
    winners = np.roll(indices, -np.searchsorted(indices, _start(seed, numel)))
    out = np.zeros(numel, np.float32)
    out[winners] = np.nan if flag.any() else values.view(np.float32)
    return out


@dataclass(frozen=True)
class Vote(Codec):
    """The gradients that most ranks find large are averaged, and nothing else travels.

    Each rank votes for its largest gradients; as many of those with most votes are elected, on all
    ranks the same. Of equally many votes the first count, cyclically from a place drawn anew each
    step, or low indices would be favoured. The elected ones are summed by a ring all-reduce, so
    what a rank sends of them does not grow with the number of ranks, and the average is as sparse
    as what was sent. The votes are gathered, and do grow.

    The wires: first int32 indices, ascending, and 1 if any of this rank's gradients is not finite,
    else 0; then float32 values, in the order of election. If any rank said 1, the average is NaN
    where it is not 0, on every rank.

    Sources: majority-vote sparse SGD, as `topk` with one set of indices for all ranks.

    Attributes:
        ratio: the share of gradients that each rank votes for, and that is elected.
    """

    name = "vote"
    ops = ("gather", "all_reduce")
    oracle = Oracle(_alone, _average_alone)

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def prepare(self) -> None:
        """Compile."""
        x, error, indices = torch.ones(3), torch.zeros(3), torch.empty(1, dtype=torch.int32)
        select(x, indices)
        add_select(x, error, indices)
        gather(x, indices, error[:1])
        clear(x, indices, True)
        scatter(x[:1], indices, error)
        _elect(torch.zeros(1, 2, dtype=torch.int32), 0, torch.empty(3, dtype=torch.int32), indices)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """Votes, then values."""
        count = kept(chunk.numel, self.ratio)
        if round == 0:
            return WireSpec(torch.int32, count + 1)
        return WireSpec(torch.float32, count)

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        pool, size = parcel.pool, parcel.size
        grad, error = parcel.take(), parcel.slot("error")
        count = kept(grad.numel(), self.ratio)
        ballot = pool.take(torch.int32, count + 1)
        finite = _nominate(grad, error, ballot)
        ballots = pool.take(torch.int32, size * (count + 1))
        yield exchange.spread(ballot, ballots, [count + 1] * size, parcel.rank)

        votes, winners = pool.take(torch.int32, grad.numel()), pool.take(torch.int32, count)
        rows = ballots.view(size, count + 1)
        _elect(rows, _start(parcel.seed("vote"), grad.numel()), votes, winners)
        spoilt = bool(rows[:, -1].any())
        values = pool.take(torch.float32, count)
        gather(grad if error is None else error, winners, values)
        yield exchange.summed(values, size)

        scatter(values.fill_(math.nan) if spoilt else values, winners, grad)
        if error is not None:
            clear(error, winners, finite)
        for scratch in (ballot, ballots, votes, winners, values):
            pool.give(scratch)
        parcel.put(grad)


def _nominate(grad: torch.Tensor, error: torch.Tensor | None, ballot: torch.Tensor) -> bool:
    """Write this rank's votes, and whether its gradients are finite; returns that."""
    indices = ballot[:-1]
    finite = select(grad, indices) if error is None else add_select(grad, error, indices)
    ballot[-1] = not finite
    return finite
