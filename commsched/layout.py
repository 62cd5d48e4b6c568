"""Layout: the gradients of one model as DDP buckets them, and chunks, which are pieces of them.

Pure data, keyed by parameter name: ranks compare it, policies plan on it, errors quote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = [
    "BucketSpec",
    "Chunk",
    "Layout",
    "ParamSpec",
    "Piece",
    "Span",
    "digest_of",
    "first_names",
]


def digest_of(data: Any) -> str:
    """Sixteen hex digits that stand for `data` (JSON values)."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def first_names(names: Iterable[str], count: int = 3) -> str:
    """The first of some parameters' names, and how many more there are, for messages."""
    names = list(names)
    more = len(names) - count
    return ", ".join(names[:count]) + (f", ... ({more} more)" if more > 0 else "")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter in a bucket."""

    name: str
    numel: int  # elements of the bucket: a complex parameter counts its real and imaginary parts
    shape: tuple[int, ...] = ()  # of the parameter; () also where it is not known


@dataclass(frozen=True)
class BucketSpec:
    """One DDP bucket. `dtype` is the buffer's, by torch's short name (``float32``)."""

    params: tuple[ParamSpec, ...]
    dtype: str
    sparse: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements in the flat buffer."""
        return sum(param.numel for param in self.params)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of gradients; of the dense gradient where it is sparse."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Piece:
    """A contiguous range of one bucket's buffer, in elements.

    `rows` is not 0 where it was cut out as one whole matrix: the parameter's first dimension.
    """

    bucket: int
    start: int
    numel: int
    rows: int = 0


@dataclass(frozen=True)
class Span:
    """Where a range of one parameter lies in a chunk, in elements."""

    param: str
    param_numel: int
    param_start: int
    start: int
    numel: int


@dataclass(frozen=True)
class Chunk:
    """What one collective carries: pieces of one bucket, or of several small ones."""

    pieces: tuple[Piece, ...]
    dtype: str
    sparse: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements in all pieces."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of gradients."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.numel * dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A model's buckets in the order in which DDP hands them to the hook."""

    buckets: tuple[BucketSpec, ...]

    @cached_property
    def digest(self) -> str:
        """Equal for equal layouts, on any rank."""
        return digest_of(self.to_json())

    @property
    def nbytes(self) -> int:
        """Bytes of gradients a step."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def spans(self, chunk: Chunk) -> Iterator[Span]:
        """The parameters that `chunk` carries, in order."""
        chunk_start = 0
        for piece in chunk.pieces:
            yield from _spans(self.buckets[piece.bucket], piece, chunk_start)
            chunk_start += piece.numel

    def to_json(self) -> list[dict[str, Any]]:
        """JSON values; `from_json` reverses it."""
        return [asdict(bucket) for bucket in self.buckets]

    @classmethod
    def from_json(cls, data: Iterable[dict[str, Any]]) -> Layout:
        """The layout that `to_json` described."""
        return cls(
            tuple(
                BucketSpec(
                    tuple(
                        ParamSpec(param["name"], param["numel"], tuple(param["shape"]))
                        for param in item["params"]
                    ),
                    item["dtype"],
                    item["sparse"],
                )
                for item in data
            )
        )


def _spans(bucket: BucketSpec, piece: Piece, chunk_start: int) -> Iterator[Span]:
    end = piece.start + piece.numel
    offset = 0
    for param in bucket.params:
        low, high = max(offset, piece.start), min(offset + param.numel, end)
        if low < high:
            start = chunk_start + low - piece.start
            yield Span(param.name, param.numel, low - offset, start, high - low)
        offset += param.numel
