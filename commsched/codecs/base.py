"""What a codec is, and the three ways in which encoded chunks are summed over ranks.

A codec is a frozen dataclass: its fields are the options of ``COMMSCHED_CODEC=name:option=value``.
It keeps nothing itself: what must last from step to step lies in the parcel's slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from commsched.codecs import summing

if TYPE_CHECKING:
    from commsched.layout import Chunk
    from commsched.parcel import Parcel, Rounds

__all__ = ["WARM_UP", "ByteCodec", "Codec", "Gathered", "Oracle", "Sharded", "Summed", "WireSpec"]

WARM_UP = 6  # steps in which DDP builds its buckets and commsched measures


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


@dataclass(frozen=True)
class Oracle:
    """A codec once more, in plain NumPy: slow, obvious, and what every implementation must equal.

    Attributes:
        encode: (codec, gradients as float32, seed) -> the wire tensor's bytes, as uint8.
        decode: (codec, the wire's bytes, number of gradients, seed) -> gradients as float32.
    """

    encode: Callable[[Codec, np.ndarray, int], np.ndarray]
    decode: Callable[[Codec, np.ndarray, int, int], np.ndarray]


class Codec(ABC):
    """How a chunk of gradients is averaged over ranks in fewer bytes.

    Attributes:
        name: what ``COMMSCHED_CODEC`` calls it.
        lossy: whether the average may differ from the exact one.
        biased: whether what encoding drops must be kept and sent later (error feedback), or the
            expected average is wrong. An option may make it so for one instance.
        ops: the collective of each round: "all_reduce", "reduce_scatter", "all_gather" (the second
            half of a reduce_scatter's chunk), "gather" (every rank's whole payload to all). Each
            round is a task of the plan.
        start_step: the first step that uses it, unless the user says otherwise.
        for_all: also for biases, norms and small parameters.
        whole_params: chunks are cut between parameters only, and a parameter of two or more
            dimensions is a piece with `rows`.
        needs_feedback: it is another algorithm without its slots, and refused.
        bitwise: results are the same bits on any machine. If not, ranks must run on CPUs of one
            kind with as many threads each.
        oracle: see `Oracle`.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]]
    start_step: ClassVar[int] = WARM_UP
    for_all: ClassVar[bool] = False
    whole_params: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = False
    bitwise: ClassVar[bool] = True
    oracle: ClassVar[Oracle | None] = None

    def __str__(self) -> str:
        """As ``COMMSCHED_CODEC`` takes it; options at their defaults are left out."""
        said = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(self)  # type: ignore[arg-type]
            if getattr(self, item.name) != item.default
        ]
        return self.name + (":" + ",".join(said) if said else "")

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether gradients of `dtype` gain from it; the others travel as they are."""
        return dtype.is_floating_point

    def keeps_errors(self, setting: str) -> bool:
        """Whether the setting `error_feedback` means that this codec's errors are kept."""
        return self.biased if setting == "auto" else setting == "1"

    def prepare(self) -> None:  # noqa: B027
        """Compile what has to be compiled. Called before the first step; safe to call again."""

    @abstractmethod
    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """What a chunk becomes on the wire in that round; None: any step late enough."""

    @abstractmethod
    def rounds(self, parcel: Parcel) -> Rounds:
        """Average one chunk: yields one transfer for each of `ops`.

        Takes the gradients with `parcel.take` and ends by `parcel.put` of the average. All ranks
        must put the same bytes. What is lost goes into ``parcel.slot("error")``, so that over
        all ranks average + errors = true average + errors before. Gradients that are not finite
        must make the average not finite, on every rank, and leave finite errors.
        """


class Summed(Codec):
    """Encoded chunks may be added up on the wire: one ring all-reduce."""

    ops = ("all_reduce",)

    @abstractmethod
    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Write the encoding of `grad` (1-D, contiguous, left as it is) into `out` (as `wire`).

        `seed` is the same on all ranks.
        """

    @abstractmethod
    def decode(self, wire: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Write the gradients that `wire` stands for into all of `out` (1-D, contiguous)."""

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """Encode ``u = grad + error`` into `out`, and leave ``u - decoded`` in `error`.

        The error is 0 where that is not finite: a NaN kept would poison every later step, also
        those after a GradScaler has skipped the bad one.
        """
        error.add_(grad)
        self.encode(error, out, seed)
        decoded = torch.empty_like(error)
        self.decode(out, decoded, seed)
        error.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        return summing.all_reduce(self, parcel)


class ByteCodec(Codec):
    """Encoded chunks are bytes, which must be decoded before they are added up."""

    def prepare(self) -> None:
        """Compile the kernels, by using them on one zero."""
        grad, wire = torch.zeros(1), torch.empty(self.nbytes(1), dtype=torch.uint8)
        self.encode(grad, wire)
        self.encode_feedback(grad, grad.clone(), wire)
        self.decode(wire, grad)
        self.decode_add(wire, grad)

    @abstractmethod
    def nbytes(self, numel: int, step: int | None = None) -> int:
        """Bytes of `numel` encoded gradients: a multiple of 4; 0 for none."""

    @abstractmethod
    def encode(self, grad: torch.Tensor, out: torch.Tensor, seed: int = 0) -> None:
        """Write the encoding of `grad` (1-D float32, contiguous, left as it is) into `out`.

        Args:
            grad: at least one gradient.
            out: uint8, `nbytes` of them, all to be written; begins at a multiple of 4 bytes.
            seed: for random numbers; another one for each rank, step and call.
        """

    @abstractmethod
    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradients that `wire` stands for into all of `out` (1-D float32)."""

    def decode_add(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Add the gradients that `wire` stands for to `out`: as decode, then one float32 add.

        What is not in a sparse one is left as it is.
        """
        decoded = torch.empty_like(out)
        self.decode(wire, decoded)
        out.add_(decoded)

    def encode_feedback(
        self, grad: torch.Tensor, error: torch.Tensor, out: torch.Tensor, seed: int = 0
    ) -> None:
        """Encode ``u = grad + error`` into `out`, and leave ``u - decoded`` in `error`.

        The error is 0 where that is not finite. Same bytes as ``encode(grad + error)``.
        """
        error.add_(grad)
        self.encode(error, out, seed)
        decoded = torch.empty_like(error)
        self.decode(out, decoded)
        error.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)


class Sharded(ByteCodec):
    """All-to-all of encoded shards, sum of the decoded ones, encode again, all-gather."""

    ops = ("reduce_scatter", "all_gather")

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """See `Codec`. As if encoded in one."""
        return WireSpec(torch.uint8, self.nbytes(chunk.numel, step))

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        return summing.shards(self, parcel)


class Gathered(ByteCodec):
    """Every rank's encoded chunk goes to all, who add them up: for sparse payloads."""

    ops = ("gather",)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """See `Codec`."""
        return WireSpec(torch.uint8, self.nbytes(chunk.numel, step))

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        return summing.gather(self, parcel)
