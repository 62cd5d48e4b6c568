"""Layout: the gradients of one model as DDP buckets them, and how buckets are cut into chunks.

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
    "cut",
    "digest_of",
    "first_names",
]

ALIGN_BYTES = 64  # chunk bounds on cache lines, so that two threads never share one


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
    """One parameter's place in a bucket."""

    name: str
    numel: int  # elements of the bucket: a complex parameter counts its real and imaginary parts


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
    """A contiguous range of one bucket's buffer, in elements."""

    bucket: int
    start: int
    numel: int


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
    """What one collective carries: one piece of a bucket, or several small buckets' whole."""

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
                    tuple(ParamSpec(**param) for param in item["params"]),
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


def cut(layout: Layout, chunk_bytes: int, fusion_bytes: int) -> tuple[Chunk, ...]:
    """Cut every bucket into chunks of at most `chunk_bytes`; fuse small neighbours.

    Buckets of less than `fusion_bytes` that follow each other and share a dtype travel as one
    chunk, closed as soon as it holds `fusion_bytes` (and never past `chunk_bytes`). Sparse buckets
    travel whole and alone. Every element of every bucket is in exactly one chunk; empty buckets
    are in none. Chunks are in bucket order.
    """
    chunks: list[Chunk] = []
    fused: list[Piece] = []

    def flush() -> None:
        if fused:
            dtype = layout.buckets[fused[0].bucket].dtype
            chunks.append(Chunk(tuple(fused), dtype))
            fused.clear()

    open_bytes = 0
    for index, bucket in enumerate(layout.buckets):
        small = 0 < bucket.nbytes < min(fusion_bytes, chunk_bytes) and not bucket.sparse
        fits = bool(fused) and layout.buckets[fused[0].bucket].dtype == bucket.dtype
        if not small or not fits or open_bytes + bucket.nbytes > chunk_bytes:
            flush()
            open_bytes = 0
        if small:
            fused.append(Piece(index, 0, bucket.numel))
            open_bytes += bucket.nbytes
            if open_bytes >= fusion_bytes:
                flush()
                open_bytes = 0
        else:
            chunks.extend(_pieces(index, bucket, chunk_bytes))
    flush()
    return tuple(chunks)


def _pieces(index: int, bucket: BucketSpec, chunk_bytes: int) -> Iterator[Chunk]:
    if bucket.sparse or bucket.nbytes <= chunk_bytes:
        if bucket.numel:
            yield Chunk((Piece(index, 0, bucket.numel),), bucket.dtype, bucket.sparse)
        return
    # Equal chunks rather than full ones and a rest: a small last chunk costs a whole latency.
    count = -(-bucket.nbytes // chunk_bytes)
    align = max(1, ALIGN_BYTES // bucket.itemsize)
    limit = max(1, chunk_bytes // bucket.itemsize)
    limit = max(limit // align * align, min(limit, align))
    size = -(-bucket.numel // count)
    size = min(-(-size // align) * align, limit)
    for start in range(0, bucket.numel, size):
        numel = min(size, bucket.numel - start)
        yield Chunk((Piece(index, start, numel),), bucket.dtype)
