"""Between buckets and the wire: what each run sends, and where what comes back goes.

On the engine's thread. How a chunk is averaged is a generator with one transfer for each of its
tasks: a codec's `rounds`, or one of those here, for gradients that travel as they are.
"""

from __future__ import annotations

from functools import partial

import torch

from commsched import exchange
from commsched.exchange import Transfer
from commsched.jobs import Run
from commsched.memory import Memory
from commsched.parcel import Parcel, Rounds, resumed

__all__ = ["Packer", "divided_first", "real"]


class Packer:
    """Turns ready runs into transfers, and finished ones into averaged gradients.

    Args:
        rank: of this process, among `world_size`.
        world_size: the number of ranks.
        memory: what codecs keep.
        feedback: "1" or "0": with error feedback or without; "auto": as each codec needs it.
    """

    def __init__(self, rank: int, world_size: int, memory: Memory, feedback: str = "auto") -> None:
        self._memory = memory
        self._feedback = feedback
        self._rank = rank
        self._world_size = world_size
        self._pool = exchange.Pool()

    def pack(self, run: Run) -> Transfer:
        """What to send for `run`."""
        if run.after is None:
            run.rounds = self._rounds(run)
            return next(run.rounds)
        run.rounds = run.after.rounds
        assert run.after.following is not None
        return run.after.following

    def unpack(self, run: Run, result: torch.Tensor) -> None:
        """Go on with `result`, what the exchange returned; in the end the buckets hold means."""
        assert run.rounds is not None
        run.following = resumed(run.rounds, result)

    def _rounds(self, run: Run) -> Rounds:
        chunk, codec = run.chunk, run.codec
        if chunk.sparse:
            return self._sparse(run)
        if codec.name == "none":
            return self._split(run) if run.task.op == "reduce_scatter" else self._exact(run)
        parcel = Parcel(
            chunk,
            tuple(run.plan.layout.spans(chunk)),
            run.views(),
            self._rank,
            self._world_size,
            run.step,
            self._memory,
            codec.keeps_errors(self._feedback),
            self._pool,
        )
        return codec.rounds(parcel)

    def _sparse(self, run: Run) -> Rounds:
        (job,) = run.jobs.values()
        wire = job.buffer * (1.0 / self._world_size)
        sent = exchange.wire_bytes(wire, self._world_size)
        job.result = yield Transfer(wire, partial(exchange.sparse_all_reduce, wire=wire), sent)

    def _exact(self, run: Run) -> Rounds:
        """All bits, summed where they lie where that is one piece of a bucket."""
        views = run.views()
        flat = self._gathered(views)
        yield exchange.summed(real(flat), self._world_size)
        self._scatter(flat, views)

    def _split(self, run: Run) -> Rounds:
        """The same in two halves. In between the shard of the sum lies at its place."""
        views = run.views()
        flat = self._gathered(views)
        wire = real(flat)
        sent = exchange.wire_bytes(wire, self._world_size, "all_gather")
        for half in (exchange.reduce_scatter, exchange.all_gather):
            yield Transfer(wire, partial(half, wire=wire, pool=self._pool), sent)
        self._scatter(flat, views)

    def _gathered(self, views: list[torch.Tensor]) -> torch.Tensor:
        # Divide before the sum, by multiplying with the reciprocal, exactly as DDP does without a
        # hook: bit-equal results, and half-precision sums stay in range.
        flat = views[0]
        if len(views) > 1:
            flat = self._pool.take(flat.dtype, sum(view.numel() for view in views))
            torch._foreach_copy_(_split_like(flat, views), views)
        return flat.mul_(1.0 / self._world_size) if divided_first(flat.dtype) else flat

    def _scatter(self, flat: torch.Tensor, views: list[torch.Tensor]) -> None:
        if not divided_first(flat.dtype):
            flat.div_(self._world_size, rounding_mode="trunc")
        if len(views) > 1:
            torch._foreach_copy_(views, _split_like(flat, views))
            self._pool.give(flat)


def _split_like(flat: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(flat, [view.numel() for view in views]))


def real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, as 1-D numbers that are not complex."""
    # gloo's all-to-all takes no complex tensors, and a sum has no need to know.
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def divided_first(dtype: torch.dtype) -> bool:
    """Whether a mean is the sum of parts divided before; else the sum is divided."""
    # Integers cannot be divided first: 1/2 + 1/2 would be 0.
    return dtype.is_floating_point or dtype.is_complex
