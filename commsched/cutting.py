"""Cutting: how a layout's buckets become chunks, each of gradients that travel by one codec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece

__all__ = ["Kind", "KindOf", "cut", "joined"]

ALIGN_BYTES = 64  # chunk bounds on cache lines, so that two threads never share one


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
            rows = param.shape[0] if kind.whole_params and len(param.shape) > 1 else 0
            found.setdefault(kind, []).append(Piece(index, start, param.numel, rows))
        start += param.numel
    return {k: pieces if k.whole_params else joined(pieces) for k, pieces in found.items()}


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that follow each other in a bucket as one."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else Piece(-1, 0, 0)
        if last.bucket == piece.bucket and last.start + last.numel == piece.start:
            found[-1] = Piece(last.bucket, last.start, last.numel + piece.numel)
        else:
            found.append(piece)
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
