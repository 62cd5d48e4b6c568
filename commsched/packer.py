"""Between buckets and the wire: scale, fuse, encode; decode, scatter. On the engine's thread."""

from __future__ import annotations

from collections import defaultdict

import torch

from commsched import exchange
from commsched.codecs.base import WireSpec
from commsched.codecs.feedback import ErrorFeedback
from commsched.jobs import Run

__all__ = ["Packer"]

KEPT_PER_SIZE = 4  # free buffers kept of one size: more than are ever encoded or decoded at once


class Packer:
    """Turns ready runs into wire tensors and finished ones back into averaged gradients.

    A dense chunk of one bucket with codec none is reduced where it lies: no copy, no memory.
    """

    def __init__(self, world_size: int, feedback: ErrorFeedback | None) -> None:
        self.world_size = world_size
        self.feedback = feedback
        self._free: dict[WireSpec, list[torch.Tensor]] = defaultdict(list)

    def pack(self, run: Run) -> torch.Tensor:
        """The tensor to send for `run`: the mean's share of this rank, encoded."""
        if run.task.chunk.sparse:
            (job,) = run.jobs.values()
            run.wire = job.buffer * (1.0 / self.world_size)
            return run.wire
        run.flat = self._gather(run)
        if run.codec.name == "none":
            run.wire = run.flat
            return run.wire
        wire = self._take(run.codec.wire(run.flat.numel(), run.flat.dtype))
        spans = list(run.plan.layout.spans(run.chunk)) if self.feedback is not None else []
        if self.feedback is not None:
            self.feedback.add(spans, run.flat)
        run.codec.encode(run.flat, wire)
        if self.feedback is not None:
            self.feedback.keep(spans, run.flat, run.codec, wire)
        run.wire = wire
        return wire

    def unpack(self, run: Run, total: torch.Tensor) -> None:
        """Write `total`, the summed wire tensor, into the run's buckets."""
        if run.task.chunk.sparse:
            (job,) = run.jobs.values()
            job.result = total
            return
        assert run.flat is not None
        assert run.wire is not None
        if run.wire is not run.flat:
            run.codec.decode(total, run.flat)
            self._give(run.wire)
        if not _divided_first(run.flat.dtype):
            run.flat.div_(self.world_size, rounding_mode="trunc")
        views = run.views()
        if len(views) > 1:
            torch._foreach_copy_(views, _split_like(run.flat, views))
            self._give(run.flat)

    def exchange_of(self, run: Run) -> exchange.Exchange:
        """How the run's wire tensor is summed."""
        name = "sparse_all_reduce" if run.task.chunk.sparse else run.codec.exchange
        return exchange.get(name)

    def _gather(self, run: Run) -> torch.Tensor:
        views = run.views()
        dtype = views[0].dtype
        # Divide before the sum, by multiplying with the reciprocal, exactly as DDP does without a
        # hook: bit-equal results, and half-precision sums stay in range.
        scale = 1.0 / self.world_size if _divided_first(dtype) else 1
        if len(views) == 1:
            return views[0].mul_(scale)
        flat = self._take(WireSpec(dtype, sum(view.numel() for view in views)))
        for view, piece in zip(views, _split_like(flat, views), strict=True):
            torch.mul(view, scale, out=piece)
        return flat

    def _take(self, spec: WireSpec) -> torch.Tensor:
        free = self._free[spec]
        return free.pop() if free else spec.empty()

    def _give(self, tensor: torch.Tensor) -> None:
        free = self._free[WireSpec(tensor.dtype, tensor.numel())]
        if len(free) < KEPT_PER_SIZE:
            free.append(tensor)


def _split_like(flat: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(flat, [view.numel() for view in views]))


def _divided_first(dtype: torch.dtype) -> bool:
    # Integers cannot be divided first: 1/2 + 1/2 would be 0.
    return dtype.is_floating_point or dtype.is_complex
