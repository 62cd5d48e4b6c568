"""Between buckets and the wire: scale, fuse, encode; decode, scatter. On the engine's thread."""

from __future__ import annotations

from collections import defaultdict

import torch

from commsched import exchange
from commsched.codecs.base import WireSpec
from commsched.codecs.feedback import ErrorFeedback
from commsched.jobs import Run

__all__ = ["Packer"]


class Packer:
    """Turns ready runs into wire tensors and finished ones back into averaged gradients.

    A dense chunk of one bucket with codec none is reduced where it lies: no copy, no memory.
    """

    def __init__(self, world_size: int, feedback: ErrorFeedback | None) -> None:
        self.world_size = world_size
        self.feedback = feedback
        self._share = 1.0 / world_size
        self._free: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        self._largest: dict[torch.dtype, int] = defaultdict(int)

    def pack(self, run: Run) -> torch.Tensor:
        """The tensor to send for `run`: this rank's share of the mean, encoded."""
        if run.task.chunk.sparse:
            (job,) = run.jobs.values()
            run.wire = job.buffer * self._share
            return run.wire
        run.flat = self._gather(run)
        if run.codec.name == "none":
            run.wire = run.flat
        else:
            run.wire = self._take(run.codec.wire(run.flat.numel(), run.flat.dtype))
            self._encode(run, run.flat, run.wire)
        return run.wire

    def _encode(self, run: Run, flat: torch.Tensor, wire: torch.Tensor) -> None:
        if self.feedback is None:
            run.codec.encode(flat, wire)
            return
        spans = list(run.plan.layout.spans(run.chunk))
        self.feedback.add(spans, flat)
        run.codec.encode(flat, wire)
        self.feedback.keep(spans, flat, run.codec, wire)

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
        # Divide before the sum, by multiplying with the reciprocal, exactly as DDP does without a
        # hook: bit-equal results, and half-precision sums stay in range.
        views = run.views()
        dtype = views[0].dtype
        if len(views) == 1:
            return views[0].mul_(self._share) if _divided_first(dtype) else views[0]
        flat = self._take(WireSpec(dtype, sum(view.numel() for view in views)))
        torch._foreach_copy_(_split_like(flat, views), views)
        return flat.mul_(self._share) if _divided_first(dtype) else flat

    def _take(self, spec: WireSpec) -> torch.Tensor:
        free = self._free[spec.dtype]
        for index, tensor in enumerate(free):
            if tensor.numel() >= spec.numel:
                return free.pop(index)[: spec.numel]
        # As large as any chunk of this dtype so far: then every buffer fits every chunk.
        self._largest[spec.dtype] = max(self._largest[spec.dtype], spec.numel)
        return torch.empty(self._largest[spec.dtype], dtype=spec.dtype)[: spec.numel]

    def _give(self, tensor: torch.Tensor) -> None:
        base = tensor._base
        self._free[tensor.dtype].append(tensor if base is None else base)


def _split_like(flat: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(flat, [view.numel() for view in views]))


def _divided_first(dtype: torch.dtype) -> bool:
    # Integers cannot be divided first: 1/2 + 1/2 would be 0.
    return dtype.is_floating_point or dtype.is_complex
