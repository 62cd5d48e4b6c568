"""Between buckets and the wire: scale, fuse, encode; decode, scatter. On the engine's thread."""

from __future__ import annotations

from functools import partial

import torch

from commsched import exchange
from commsched.codecs.feedback import ErrorFeedback
from commsched.jobs import Run

__all__ = ["Packer"]


class Packer:
    """Turns ready runs into wire tensors and finished ones back into averaged gradients.

    A dense chunk of one bucket with codec none is reduced where it lies: no copy, no memory but
    what an exchange receives into.

    A chunk's reduce_scatter leaves this rank's shard of the mean in the buckets themselves, at its
    place; its all_gather takes it from there. So nothing is kept between the two, whose runs must
    carry the same buckets. A lossy codec is applied in both, which needs one whose decoded values
    encode to themselves, as casts do.

    Args:
        world_size: the number of ranks.
        feedback: what keeps the errors of lossy codecs, if they are to be kept.
    """

    def __init__(self, world_size: int, feedback: ErrorFeedback | None) -> None:
        self.world_size = world_size
        self.feedback = feedback
        self._share = 1.0 / world_size
        self._pool = exchange.Pool()
        self._scratch = exchange.Pool()  # apart from the above: shards are smaller than chunks

    def pack(self, run: Run) -> torch.Tensor:
        """The tensor to send for `run`: this rank's share of the mean, encoded."""
        if run.task.chunk.sparse:
            (job,) = run.jobs.values()
            run.wire = job.buffer * self._share
            return run.wire
        run.flat = self._gather(run)
        if run.codec.name == "none":
            run.wire = _real(run.flat)
        else:
            spec = run.codec.wire(run.flat.numel(), run.flat.dtype)
            run.wire = self._pool.take(spec.dtype, spec.numel)
            self._encode(run, run.flat, run.wire)
        return run.wire

    def _encode(self, run: Run, flat: torch.Tensor, wire: torch.Tensor) -> None:
        if self.feedback is None or _is_mean(run):
            run.codec.encode(flat, wire)
            return
        spans = list(run.plan.layout.spans(run.chunk))
        self.feedback.add(spans, flat)
        run.codec.encode(flat, wire)
        self.feedback.keep(spans, flat, run.codec, wire)

    def unpack(self, run: Run, total: torch.Tensor) -> None:
        """Write `total`, what the exchange returned, into the run's buckets."""
        if run.task.chunk.sparse:
            (job,) = run.jobs.values()
            job.result = total
            return
        assert run.flat is not None
        assert run.wire is not None
        if run.codec.name != "none":
            run.codec.decode(total, run.flat)
            self._pool.give(run.wire)
        if not _divided_first(run.flat.dtype) and not _is_mean(run):
            run.flat.div_(self.world_size, rounding_mode="trunc")
        views = run.views()
        if len(views) > 1:
            torch._foreach_copy_(views, _split_like(run.flat, views))
            self._pool.give(run.flat)

    def exchange_of(self, run: Run) -> exchange.Exchange:
        """How the run's wire tensor is summed, or gathered."""
        if run.task.chunk.sparse:
            return exchange.get("sparse_all_reduce")
        if run.task.op == "reduce_scatter":
            return partial(exchange.reduce_scatter, pool=self._scratch)
        if run.task.op == "all_gather":
            return partial(exchange.all_gather, pool=self._scratch)
        return exchange.get(run.codec.exchange)

    def _gather(self, run: Run) -> torch.Tensor:
        # Divide before the sum, by multiplying with the reciprocal, exactly as DDP does without a
        # hook: bit-equal results, and half-precision sums stay in range.
        views = run.views()
        flat = views[0]
        if len(views) > 1:
            flat = self._pool.take(flat.dtype, sum(view.numel() for view in views))
            torch._foreach_copy_(_split_like(flat, views), views)
        scale = _divided_first(flat.dtype) and not _is_mean(run)
        return flat.mul_(self._share) if scale else flat


def _is_mean(run: Run) -> bool:
    # Its reduce_scatter has scaled it, and accounted for the codec's errors.
    return run.task.op == "all_gather"


def _split_like(flat: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(flat, [view.numel() for view in views]))


def _real(flat: torch.Tensor) -> torch.Tensor:
    # gloo's all-to-all takes no complex tensors, and a sum has no need to know.
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _divided_first(dtype: torch.dtype) -> bool:
    # Integers cannot be divided first: 1/2 + 1/2 would be 0.
    return dtype.is_floating_point or dtype.is_complex
