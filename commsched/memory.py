"""Memory: what codecs keep from step to step on one rank, keyed by parameter name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from commsched.layout import Span

__all__ = ["Memory"]


class Memory:
    """Flat slots, one number for each gradient, and factors, any tensors of a parameter.

    Slots hold what is this rank's alone: errors not yet sent, momentum. Kernels want them
    contiguous for a chunk, while chunks change with buckets and sizes. So they lie chunk by chunk
    as long as the same chunks come, and go back to one tensor a parameter when others do.

    Factors are equal on all ranks, as they are made of sums.

    Attributes:
        step: the iteration that is running, or the last one; equal on all ranks.
        factors: parameter name -> name -> tensor.

    For the engine's thread; others may look while nothing is under way.
    """

    def __init__(self) -> None:
        self.step = -1
        self.factors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self._chunks: dict[tuple[str, tuple[Span, ...]], torch.Tensor] = {}
        self._whole: dict[tuple[str, str], torch.Tensor] = {}  # slot, parameter

    def slot(self, name: str, spans: Sequence[Span]) -> torch.Tensor:
        """The slot's numbers for these gradients: 1-D float32, contiguous, zeros at first."""
        key = name, tuple(spans)
        flat = self._chunks.get(key)
        if flat is None:
            for other in [other for other in self._chunks if _overlap(key, other)]:
                self._give_back(other)
            flat = self._chunks[key] = self._collect(name, spans)
        return flat

    def slots(self) -> dict[str, dict[str, torch.Tensor]]:
        """All slots: slot name -> parameter name -> its numbers, 1-D. Copies."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for (name, param), whole in self._whole.items():
            found[name][param] = whole.clone()
        for (name, spans), flat in self._chunks.items():
            for span in spans:
                kept = found[name].get(span.param)
                if kept is None or kept.numel() != span.param_numel:
                    kept = found[name][span.param] = torch.zeros(span.param_numel)
                _of(kept, span).copy_(_in(flat, span))
        return dict(found)

    def set_slots(self, slots: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all slots by such as `slots` returned."""
        self._chunks.clear()
        self._whole = {
            (name, param): whole.detach().to(torch.float32).flatten().clone()
            for name, rows in slots.items()
            for param, whole in rows.items()
        }

    def forget(self) -> None:
        """Let go of all slots and factors."""
        self._chunks.clear()
        self._whole.clear()
        self.factors.clear()

    def _collect(self, name: str, spans: Sequence[Span]) -> torch.Tensor:
        flat = torch.zeros(sum(span.numel for span in spans))
        for span in spans:
            whole = self._whole.get((name, span.param))
            if whole is None:
                continue
            if whole.numel() == span.param_numel:  # else of another model
                _in(flat, span).copy_(_of(whole, span))
                _of(whole, span).zero_()
            if not whole.any():
                del self._whole[name, span.param]
        return flat

    def _give_back(self, key: tuple[str, tuple[Span, ...]]) -> None:
        name, spans = key
        flat = self._chunks.pop(key)
        for span in spans:
            whole = self._whole.get((name, span.param))
            if whole is None or whole.numel() != span.param_numel:
                whole = self._whole[name, span.param] = torch.zeros(span.param_numel)
            _of(whole, span).copy_(_in(flat, span))


def _overlap(one: tuple[str, tuple[Span, ...]], other: tuple[str, tuple[Span, ...]]) -> bool:
    if one[0] != other[0]:
        return False
    ranges = {span.param: span for span in one[1]}  # a chunk has one range of a parameter
    return any(
        mine.param_start < span.param_start + span.numel
        and span.param_start < mine.param_start + mine.numel
        for span in other[1]
        if (mine := ranges.get(span.param)) is not None
    )


def _in(flat: torch.Tensor, span: Span) -> torch.Tensor:
    return flat[span.start : span.start + span.numel]


def _of(whole: torch.Tensor, span: Span) -> torch.Tensor:
    return whole[span.param_start : span.param_start + span.numel]
