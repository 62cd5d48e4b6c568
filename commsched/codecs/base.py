"""What a codec is: two pure functions and the size of what travels, known before encoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

__all__ = ["Codec", "WireSpec"]


@dataclass(frozen=True)
class WireSpec:
    """The tensor that one encoded chunk travels as: 1-D, contiguous."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """An uninitialised wire tensor on the CPU."""
        return torch.empty(self.numel, dtype=self.dtype)


class Codec(ABC):
    """Encodes a chunk of gradients for the wire. Stateless: error feedback is kept by the caller.

    Attributes:
        name: what ``COMMSCHED_CODEC`` calls it.
        lossy: whether decode(encode(x)) may differ from x.
        exchange: how encoded chunks are summed over ranks (a name in `commsched.exchange`).
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]
    exchange: ClassVar[str]

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether gradients of `dtype` gain from this codec; the others travel as they are."""

    @abstractmethod
    def wire(self, numel: int, dtype: torch.dtype) -> WireSpec:
        """What `numel` gradients of `dtype` become on the wire."""

    @abstractmethod
    def encode(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Write the encoding of `grad` (1-D, contiguous, left as it is) into `out` (as `wire`)."""

    @abstractmethod
    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradients that `wire` stands for into `out` (1-D, contiguous)."""
