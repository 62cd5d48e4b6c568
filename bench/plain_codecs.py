"""What a user would write in plain torch instead of the sparse and the low-rank codecs.

For the speed only: results differ in ties, in order, and where gradients are not finite. The other
codecs need no such version, as each has one of its own, for where numba is missing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from commsched import codecs
from commsched.codecs import Codec
from commsched.codecs.dgc import Dgc
from commsched.codecs.lowrank import AcpSgd, PowerSgd
from commsched.codecs.topk import TopK, kept
from commsched.codecs.vote import Vote

__all__ = ["has_plain_rounds", "plain_operations", "plain_rounds"]

Action = Callable[[], object]


def plain_operations(codec: TopK, grad: torch.Tensor, error: torch.Tensor) -> dict[str, Action]:
    """Top-k's operations, by name. `error` is changed."""
    count = kept(grad.numel(), codec.ratio)
    out = torch.zeros_like(grad)
    indices = _largest(grad, count)
    values = grad[indices]

    def encode() -> None:
        torch.index_select(grad, 0, _largest(grad, count))

    def encode_feedback() -> None:
        error.add_(grad)
        chosen = _largest(error, count)
        torch.index_select(error, 0, chosen)
        error.index_fill_(0, chosen, 0.0)

    return {
        "encode": encode,
        "encode_feedback": encode_feedback,
        "decode": lambda: out.zero_().index_copy_(0, indices, values),
        "decode_add": lambda: out.index_add_(0, indices, values),
    }


def plain_rounds(text: str, grad: torch.Tensor, rows: int, size: int) -> Action:
    """All a rank computes to average `grad` with error feedback, but for what the wire does.

    Args:
        text: a codec with rounds of its own.
        grad: this rank's gradients, which become the average.
        rows: of the matrix that they are.
        size: the number of ranks; all send the same.
    """
    codec = codecs.get(text)
    if isinstance(codec, Dgc):
        return _dgc(codec, grad, size)
    if isinstance(codec, Vote):
        return _vote(codec, grad, size)
    if isinstance(codec, PowerSgd | AcpSgd):
        return _low_rank(codec, grad, rows, size)
    raise ValueError(f"no plain version of codec {codec} was written")


def has_plain_rounds(codec: Codec) -> bool:
    """Whether `plain_rounds` knows it."""
    return isinstance(codec, Dgc | Vote | PowerSgd | AcpSgd)


def _largest(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(x.abs(), count, sorted=False).indices


def _dgc(codec: Dgc, grad: torch.Tensor, size: int) -> Action:
    velocity, error = torch.zeros_like(grad), torch.zeros_like(grad)
    count = kept(grad.numel(), codec.ratio)

    def average() -> None:
        grad.mul_(1 / size)
        error.add_(velocity.mul_(codec.momentum).add_(grad))
        chosen = _largest(error, count)
        values = error[chosen]
        error.index_fill_(0, chosen, 0.0)
        velocity.index_fill_(0, chosen, 0.0)
        grad.zero_()
        for _ in range(size):
            grad.index_add_(0, chosen, values)

    return average


def _vote(codec: Vote, grad: torch.Tensor, size: int) -> Action:
    error = torch.zeros_like(grad)
    count = kept(grad.numel(), codec.ratio)

    def average() -> None:
        error.add_(grad.mul_(1 / size))
        ballots = _largest(error, count).repeat(size)
        votes = torch.bincount(ballots, minlength=grad.numel())
        winners = torch.topk(votes, count, sorted=False).indices
        values = error[winners]
        error.index_fill_(0, winners, 0.0)
        grad.zero_().index_copy_(0, winners, values)

    return average


def _low_rank(codec: PowerSgd | AcpSgd, grad: torch.Tensor, rows: int, size: int) -> Action:
    matrix = grad.view(rows, -1)
    error = torch.zeros_like(matrix)
    q = torch.randn(matrix.shape[1], codec.rank)

    def powersgd() -> None:
        error.add_(matrix.mul_(1 / size))
        p = torch.linalg.qr(error @ q).Q
        torch.mm(error.t(), p, out=q)
        torch.mm(p, q.t(), out=matrix)
        error.sub_(matrix)

    def acpsgd() -> None:
        """The half step that sends P: the other one is its mirror image."""
        error.add_(matrix.mul_(1 / size))
        basis = torch.linalg.qr(q).Q
        p = error @ basis
        torch.mm(p, basis.t(), out=matrix)
        error.sub_(matrix)

    return powersgd if isinstance(codec, PowerSgd) else acpsgd
