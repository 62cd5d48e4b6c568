"""Error feedback: what a lossy codec dropped this step is added to the next step's gradient.

Source: 1-bit SGD (Seide et al., Interspeech 2014); EF-SGD (Karimireddy et al., ICML 2019).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from commsched.codecs.base import Codec
from commsched.layout import Span

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The errors of one rank, one 1-D tensor a parameter, keyed by parameter name.

    Keyed by name, not by bucket or chunk: DDP rebuilds its buckets, and a chunk size may change.
    Errors are in the units of what is encoded: the gradient divided by the world size.
    """

    def __init__(self) -> None:
        self.errors: dict[str, torch.Tensor] = {}

    def add(self, spans: Iterable[Span], grad: torch.Tensor) -> None:
        """Add the stored errors to `grad` (1-D, the chunk's gradients), in place."""
        for span, error in self._slices(spans, grad):
            grad[span.start : span.start + span.numel].add_(error)

    def keep(
        self, spans: Iterable[Span], grad: torch.Tensor, codec: Codec, wire: torch.Tensor
    ) -> None:
        """Store ``grad - decode(wire)``; not finite where the gradient is not: then 0.

        A NaN kept as an error would poison every later step, also those after a GradScaler
        has skipped the bad one.
        """
        decoded = torch.empty_like(grad)
        codec.decode(wire, decoded)
        torch.sub(grad, decoded, out=decoded)
        decoded.nan_to_num_(0.0, 0.0, 0.0)
        for span, error in self._slices(spans, grad):
            error.copy_(decoded[span.start : span.start + span.numel])

    def _slices(
        self, spans: Iterable[Span], grad: torch.Tensor
    ) -> Iterable[tuple[Span, torch.Tensor]]:
        for span in spans:
            error = self.errors.get(span.param)
            if error is None or error.numel() != span.param_numel or error.dtype != grad.dtype:
                error = torch.zeros(span.param_numel, dtype=grad.dtype)
                self.errors[span.param] = error
            yield span, error[span.param_start : span.param_start + span.numel]
