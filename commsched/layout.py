"""Layout: the gradients of one model as DDP buckets them, and how buckets are cut into chunks.

Pure data, keyed by parameter name: ranks compare it, policies plan on it, errors quote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

__all__ = [
    "BucketSpec",
    "Chunk",
    "Kind",
    "KindOf",
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


class Kind(NamedTuple):
    """What may share a chunk: gradients that travel by the same codec."""

    codec: str
    whole_params: bool = False  # cut between parameters only


EXACT = Kind("none")
KindOf = Callable[[BucketSpec, ParamSpec], Kind]


def cut(
    layout: Layout,
    chunk_bytes: int,
    fusion_bytes: int,
    kind_of: KindOf = lambda _bucket, _param: EXACT,
) -> tuple[Chunk, ...]:
    """Cut every bucket into chunks of at most `chunk_bytes`, of one kind each; fuse small ones.

    Buckets of less than `fusion_bytes` that follow each other and share a dtype travel together: a
    chunk of each kind, closed as soon as it holds `fusion_bytes` (and never past `chunk_bytes`).
    Sparse buckets travel whole and alone. Every element of every bucket is in exactly one chunk;
    empty buckets are in none. Chunks are in bucket order.
    """
    chunks: list[Chunk] = []
    fused: dict[Kind, list[Piece]] = {}
    dtype = ""

    def flush(kinds: Iterable[Kind]) -> None:
        for kind in list(kinds):
            chunks.append(Chunk(tuple(fused.pop(kind)), dtype))

    for index, bucket in enumerate(layout.buckets):
        if bucket.sparse or not 0 < bucket.nbytes < min(fusion_bytes, chunk_bytes):
            flush(fused)
            chunks.extend(_chunks(index, bucket, chunk_bytes, kind_of))
            continue
        if bucket.dtype != dtype:
            flush(fused)
            dtype = bucket.dtype
        for kind, pieces in _by_kind(index, bucket, kind_of).items():
            if _nbytes(bucket, [*fused.get(kind, []), *pieces]) > chunk_bytes:
                flush([kind])
            fused.setdefault(kind, []).extend(pieces)
            if _nbytes(bucket, fused[kind]) >= fusion_bytes:
                flush([kind])
    flush(fused)
    # A kind that has ended stays open until others are closed, whose buckets come later.
    return tuple(sorted(chunks, key=lambda chunk: chunk.pieces[-1].bucket))


def _nbytes(bucket: BucketSpec, pieces: Iterable[Piece]) -> int:
    return sum(piece.numel for piece in pieces) * bucket.itemsize


def _chunks(index: int, bucket: BucketSpec, chunk_bytes: int, kind_of: KindOf) -> Iterator[Chunk]:
    if bucket.sparse:
        if bucket.numel:
            yield Chunk((Piece(index, 0, bucket.numel),), bucket.dtype, sparse=True)
        return
    for kind, pieces in _by_kind(index, bucket, kind_of).items():
        limit = max(1, chunk_bytes // bucket.itemsize)
        align = max(1, ALIGN_BYTES // bucket.itemsize)
        whole = kind.whole_params
        for group in _whole_groups(pieces, limit) if whole else _even_groups(pieces, limit, align):
            yield Chunk(tuple(group), bucket.dtype)


def _by_kind(index: int, bucket: BucketSpec, kind_of: KindOf) -> dict[Kind, list[Piece]]:
    """The bucket's ranges of each kind; neighbours are one piece, unless they must stay whole."""
    found: dict[Kind, list[Piece]] = {}
    start = 0
    for param in bucket.params:
        if param.numel:
            kind = kind_of(bucket, param)
            pieces = found.setdefault(kind, [])
            last = pieces[-1] if pieces else None
            rows = param.shape[0] if kind.whole_params and len(param.shape) > 1 else 0
            joins = last is not None and last.start + last.numel == start
            if joins and last is not None and not kind.whole_params:
                pieces[-1] = Piece(index, last.start, last.numel + param.numel)
            else:
                pieces.append(Piece(index, start, param.numel, rows))
        start += param.numel
    return found


def _whole_groups(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Pieces as they are, so many together that they hold `limit` elements, or one larger one."""
    group: list[Piece] = []
    for piece in pieces:
        if group and sum(one.numel for one in group) + piece.numel > limit:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _even_groups(pieces: list[Piece], limit: int, align: int) -> Iterator[list[Piece]]:
    """Groups of equal size rather than full ones and a rest: a small chunk costs a whole latency.

    Sizes are multiples of `align` elements where they are cut.
    """
    numel = sum(piece.numel for piece in pieces)
    if numel <= limit:
        yield pieces
        return
    most = max(limit // align * align, min(limit, align))
    size = -(-numel // -(-numel // limit))
    size = min(-(-size // align) * align, most)
    group, room = [], size
    for piece in pieces:
        start, left = piece.start, piece.numel
        while left:
            taken = min(left, room)
            group.append(Piece(piece.bucket, start, taken))
            start, left, room = start + taken, left - taken, room - taken
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group
