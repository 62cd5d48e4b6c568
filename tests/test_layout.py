"""Layout: cutting buckets into chunks loses nothing, mixes nothing and keeps the order."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commsched.cutting import ALIGN_BYTES, Kind, KindOf, cut
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece, first_names
from tests.mixed import shaped

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "complex64")
COMMON = st.just("float32") | st.sampled_from(DTYPES)  # often alike, so that some are fused
BYTES = st.integers(1, 600) | st.sampled_from([64, 1024, 4096, 10**6])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = st.integers(0, 40) | st.integers(0, 700)
    buckets = draw(
        st.lists(
            st.tuples(st.lists(sizes, max_size=5), COMMON, st.just(False))
            | st.tuples(st.lists(sizes, min_size=1, max_size=1), st.just("float32"), st.just(True)),
            max_size=8,
        )
    )
    return Layout(
        tuple(
            BucketSpec(
                tuple(ParamSpec(f"b{index}.p{at}", numel) for at, numel in enumerate(numels)),
                dtype,
                sparse,
            )
            for index, (numels, dtype, sparse) in enumerate(buckets)
        )
    )


def bucket(numel: int, dtype: str = "float32", *, sparse: bool = False) -> BucketSpec:
    return BucketSpec((ParamSpec(f"p{numel}", numel),), dtype, sparse)


def pieces_of(chunks: tuple[Chunk, ...], index: int) -> list[Piece]:
    return [piece for chunk in chunks for piece in chunk.pieces if piece.bucket == index]


any_cut = given(layouts(), BYTES, BYTES | st.just(0))
KINDS = (Kind("none"), Kind("a"), Kind("b"), Kind("whole", True), Kind("other", True))


@st.composite
def kinds(draw: st.DrawFn) -> KindOf:
    """Any assignment of kinds to parameters; every parameter has its own, by name."""
    few = draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4, unique=True))
    table = draw(st.lists(st.sampled_from(few), min_size=7, max_size=7))
    return lambda _bucket, param: table[sum(param.name.encode()) % len(table)]


FUSING = st.sampled_from([300, 1000, 4096, 10**6])


def mixed_cut(test: Callable[..., None]) -> Callable[..., None]:
    """For any layout whose parameters are of several kinds."""
    fine = given(shaped() | layouts(), BYTES | FUSING, BYTES | FUSING | st.just(0), kinds())
    return settings(max_examples=200)(fine(test))


# ---------------------------------------------------------------- every element, once, in order


@any_cut
@settings(deadline=None)
def test_every_element_is_in_exactly_one_chunk(layout: Layout, chunk: int, fusion: int) -> None:
    chunks = cut(layout, chunk, fusion)
    for index, spec in enumerate(layout.buckets):
        end = 0
        for piece in pieces_of(chunks, index):
            assert piece.start == end
            assert piece.numel > 0
            end += piece.numel
        assert end == spec.numel
    assert {p.bucket for c in chunks for p in c.pieces} <= set(range(len(layout.buckets)))
    assert sum(c.nbytes for c in chunks) == layout.nbytes


@any_cut
@settings(deadline=None)
def test_pieces_are_in_bucket_order(layout: Layout, chunk: int, fusion: int) -> None:
    order = [(p.bucket, p.start) for c in cut(layout, chunk, fusion) for p in c.pieces]
    assert order == sorted(order)


@any_cut
@settings(deadline=None)
def test_a_chunk_has_the_dtype_and_kind_of_its_buckets(
    layout: Layout, chunk: int, fusion: int
) -> None:
    for item in cut(layout, chunk, fusion):
        kinds = {
            (layout.buckets[p.bucket].dtype, layout.buckets[p.bucket].sparse) for p in item.pieces
        }
        assert kinds == {(item.dtype, item.sparse)}
        assert item.numel == sum(p.numel for p in item.pieces)
        assert item.nbytes == item.numel * getattr(torch, item.dtype).itemsize


@any_cut
@settings(deadline=None)
def test_no_chunk_is_too_large(layout: Layout, chunk: int, fusion: int) -> None:
    for item in cut(layout, chunk, fusion):
        assert item.nbytes <= chunk or item.sparse or item.numel == 1


# ---------------------------------------------------------------- fusing


@any_cut
@settings(deadline=None)
def test_only_whole_small_neighbours_are_fused(layout: Layout, chunk: int, fusion: int) -> None:
    for item in cut(layout, chunk, fusion):
        if len(item.pieces) == 1:
            continue
        assert not item.sparse
        for piece in item.pieces:
            spec = layout.buckets[piece.bucket]
            assert (piece.start, piece.numel) == (0, spec.numel)
            assert 0 < spec.nbytes < fusion
        for left, right in pairwise(item.pieces):
            assert right.bucket == left.bucket + 1
        assert sum(p.numel for p in item.pieces[:-1]) * item.nbytes < fusion * item.numel


@any_cut
@settings(deadline=None)
def test_neighbours_that_could_be_fused_are(layout: Layout, chunk: int, fusion: int) -> None:
    """A chunk left open is closed only by another kind of bucket or by one that does not fit."""
    chunks = cut(layout, chunk, fusion)
    for left, right in pairwise(chunks):
        first, second = left.pieces[-1], right.pieces[0]
        spec = layout.buckets[second.bucket]
        neighbours = second.bucket == first.bucket + 1 and left.dtype == right.dtype
        dense = not left.sparse and not right.sparse
        small = all(layout.buckets[p.bucket].nbytes < min(fusion, chunk) for p in (first, second))
        if neighbours and dense and small:
            assert left.nbytes >= fusion or left.nbytes + spec.nbytes > chunk


@given(layouts(), BYTES)
@settings(deadline=None)
def test_no_fusion_when_it_is_switched_off(layout: Layout, chunk: int) -> None:
    assert all(len(item.pieces) == 1 for item in cut(layout, chunk, 0))


def test_a_fused_chunk_is_closed_once_it_is_large_enough() -> None:
    layout = Layout(tuple(bucket(10) for _ in range(6)))  # 40 bytes each
    assert [len(c.pieces) for c in cut(layout, 10**6, 100)] == [3, 3]
    assert [len(c.pieces) for c in cut(layout, 90, 100)] == [2, 2, 2]  # never past chunk_bytes


def test_what_stands_between_parts_the_neighbours() -> None:
    for between in (bucket(10, "float64"), bucket(10, sparse=True), bucket(1000)):
        chunks = cut(Layout((bucket(10), between, bucket(10))), 10**6, 100)
        assert [[p.bucket for p in c.pieces] for c in chunks] == [[0], [1], [2]]


# ---------------------------------------------------------------- cutting


@any_cut
@settings(deadline=None)
def test_a_cut_bucket_has_the_fewest_equal_pieces(layout: Layout, chunk: int, fusion: int) -> None:
    chunks = cut(layout, chunk, fusion)
    for index, spec in enumerate(layout.buckets):
        sizes = [piece.numel for piece in pieces_of(chunks, index)]
        if spec.sparse or not sizes:
            assert len(sizes) == (spec.numel > 0)
            continue
        align = max(1, ALIGN_BYTES // spec.itemsize)
        largest = max(1, chunk // spec.itemsize)
        if largest >= align:  # room for whole cache lines
            largest -= largest % align
        least = -(-spec.nbytes // chunk)
        most = max(1, least, -(-spec.numel // largest))
        if spec.itemsize <= chunk:
            assert least <= len(sizes) <= most
        else:
            assert len(sizes) == spec.numel
        assert len(set(sizes[:-1])) <= 1
        assert sizes[-1] <= sizes[0]


@any_cut
@example(Layout((bucket(500),)), 1048, 0)  # COMMSCHED_CHUNK_MB=0.001
@settings(deadline=None)
def test_pieces_begin_on_cache_lines(layout: Layout, chunk: int, fusion: int) -> None:
    """As ALIGN_BYTES says, so that two threads never share a line; where a chunk holds one."""
    for item in cut(layout, chunk, fusion):
        for piece in item.pieces:
            if chunk >= ALIGN_BYTES:
                itemsize = layout.buckets[piece.bucket].itemsize
                assert piece.start * itemsize % ALIGN_BYTES == 0


def test_equal_pieces_rather_than_full_ones_and_a_rest() -> None:
    chunks = cut(Layout((bucket(4096 + 64),)), 4096 * 4, 0)
    assert [chunk.numel for chunk in chunks] == [2080, 2080]


def test_empty_buckets_are_in_no_chunk() -> None:
    layout = Layout((bucket(0), BucketSpec((), "float32"), bucket(0, sparse=True)))
    assert cut(layout, 64, 64) == ()
    assert cut(Layout(()), 64, 64) == ()


def test_a_sparse_bucket_is_never_cut() -> None:
    (chunk,) = cut(Layout((bucket(10_000, sparse=True),)), 64, 64)
    assert chunk == Chunk((Piece(0, 0, 10_000),), "float32", sparse=True)


@any_cut
@settings(deadline=None)
def test_cutting_is_pure(layout: Layout, chunk: int, fusion: int) -> None:
    before = layout.digest
    assert cut(layout, chunk, fusion) == cut(Layout(layout.buckets), chunk, fusion)
    assert Layout(layout.buckets).digest == before


# ---------------------------------------------------------------- several kinds


def carried(layout: Layout, chunks: tuple[Chunk, ...]) -> list[torch.Tensor]:
    """How often each element is in a chunk."""
    counts = [torch.zeros(spec.numel, dtype=torch.int) for spec in layout.buckets]
    for chunk in chunks:
        for piece in chunk.pieces:
            assert piece.numel > 0
            counts[piece.bucket][piece.start : piece.start + piece.numel] += 1
    return counts


def kinds_in(layout: Layout, chunk: Chunk, kind_of: KindOf) -> set[Kind]:
    found = set()
    for piece in chunk.pieces:
        bucket, stop = layout.buckets[piece.bucket], 0
        for param in bucket.params:
            start, stop = stop, stop + param.numel
            if max(start, piece.start) < min(stop, piece.start + piece.numel):
                found.add(kind_of(bucket, param))
    return found


def last_bucket(chunk: Chunk) -> int:
    return max(piece.bucket for piece in chunk.pieces)


@mixed_cut
def test_every_element_is_in_exactly_one_chunk_of_any_kind(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    chunks = cut(layout, chunk, fusion, kind_of)
    assert all(bool((count == 1).all()) for count in carried(layout, chunks))
    assert sum(c.nbytes for c in chunks) == layout.nbytes
    for item in chunks:
        dtypes = {layout.buckets[piece.bucket].dtype for piece in item.pieces}
        assert dtypes == {item.dtype}
        assert len({(piece.bucket, piece.start) for piece in item.pieces}) == len(item.pieces)


@mixed_cut
def test_a_chunk_is_of_one_kind(layout: Layout, chunk: int, fusion: int, kind_of: KindOf) -> None:
    for item in cut(layout, chunk, fusion, kind_of):
        assert item.sparse or len(kinds_in(layout, item, kind_of)) == 1


@mixed_cut
def test_chunks_come_in_the_order_of_their_last_buckets(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    """What a policy waits for is ready in that order."""
    events = [last_bucket(item) for item in cut(layout, chunk, fusion, kind_of)]
    assert events == sorted(events)


def test_a_kind_that_comes_no_more_does_not_hold_back_the_order() -> None:
    """A bias in the first bucket only: its chunk is ready before that of both weights."""
    weight = ParamSpec("weight", 12, (3, 4))
    layout = Layout(
        (
            BucketSpec((weight, ParamSpec("bias", 3, (3,))), "float32"),
            BucketSpec((dataclasses.replace(weight, name="next"),), "float32"),
        )
    )
    kind_of: KindOf = lambda _, param: Kind("a" if len(param.shape) > 1 else "none")  # noqa: E731
    chunks = cut(layout, 10**6, 10**5, kind_of)
    assert [[piece.bucket for piece in chunk.pieces] for chunk in chunks] == [[0], [0, 1]]


@mixed_cut
def test_pieces_of_a_chunk_are_in_bucket_order(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    for item in cut(layout, chunk, fusion, kind_of):
        places = [(piece.bucket, piece.start) for piece in item.pieces]
        assert places == sorted(places)


@mixed_cut
def test_whole_parameters_are_never_split_and_matrices_have_rows(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    for item in cut(layout, chunk, fusion, kind_of):
        whole = not item.sparse and next(iter(kinds_in(layout, item, kind_of))).whole_params
        for piece in item.pieces:
            spans = list(layout.spans(Chunk((piece,), item.dtype, item.sparse)))
            if not whole:
                assert piece.rows == 0
                continue
            (span,) = spans
            assert (span.param_start, span.numel) == (0, span.param_numel)
            params = layout.buckets[piece.bucket].params
            shape = next(param.shape for param in params if param.name == span.param)
            assert piece.rows == (shape[0] if len(shape) > 1 else 0)
            assert not piece.rows or piece.numel % piece.rows == 0


@mixed_cut
def test_no_chunk_of_any_kind_is_too_large(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    for item in cut(layout, chunk, fusion, kind_of):
        alone = len(item.pieces) == 1 and (item.sparse or item.numel == 1)
        one_whole = len(item.pieces) == 1 and len(list(layout.spans(item))) == 1
        whole = not item.sparse and next(iter(kinds_in(layout, item, kind_of))).whole_params
        assert item.nbytes <= chunk or alone or (whole and one_whole)


@mixed_cut
def test_one_kind_of_a_bucket_is_cut_into_equal_chunks(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    """In as few as can be; whatever lies between them."""
    for index, spec in enumerate(layout.buckets):
        if spec.sparse or 0 < spec.nbytes < min(fusion, chunk):
            continue
        of_kind: dict[Kind, list[int]] = {}
        for item in cut(layout, chunk, fusion, kind_of):
            if item.pieces[0].bucket == index:
                (kind,) = kinds_in(layout, item, kind_of)
                of_kind.setdefault(kind, []).append(item.numel)
        for kind, sizes in of_kind.items():
            if kind.whole_params:
                limit = max(1, chunk // spec.itemsize)
                assert all(a + b > limit for a, b in pairwise(sizes))
                continue
            align = max(1, ALIGN_BYTES // spec.itemsize)
            limit = max(1, chunk // spec.itemsize)
            most = limit - limit % align if limit >= align else limit
            assert -(-sum(sizes) // limit) <= len(sizes) <= -(-sum(sizes) // most)
            assert len(set(sizes[:-1])) <= 1
            assert sizes[-1] <= sizes[0]


@mixed_cut
def test_a_fused_chunk_of_any_kind_is_closed_once_it_is_large_enough(
    layout: Layout, chunk: int, fusion: int, kind_of: KindOf
) -> None:
    for item in cut(layout, chunk, fusion, kind_of):
        buckets = [piece.bucket for piece in item.pieces]
        if buckets[0] == buckets[-1]:
            continue
        before = [piece for piece in item.pieces if piece.bucket != buckets[-1]]
        itemsize = layout.buckets[buckets[0]].itemsize
        assert sum(piece.numel for piece in before) * itemsize < fusion
        assert all(0 < layout.buckets[index].nbytes < fusion for index in buckets)
        dense = range(buckets[0], buckets[-1] + 1)
        assert not any(layout.buckets[index].sparse for index in dense)
        assert {layout.buckets[i].dtype for i in dense if layout.buckets[i].numel} == {item.dtype}


def test_kinds_of_neighbouring_buckets_travel_side_by_side() -> None:
    """Weights with weights, biases with biases: two chunks, not eight."""
    layers = [
        BucketSpec(
            (ParamSpec(f"{i}.weight", 12, (3, 4)), ParamSpec(f"{i}.bias", 3, (3,))), "float32"
        )
        for i in range(4)
    ]
    kind_of: KindOf = lambda _, param: Kind("a" if len(param.shape) > 1 else "none")  # noqa: E731
    chunks = cut(Layout(tuple(layers)), 10**6, 10**5, kind_of)
    assert [[(p.bucket, p.start, p.numel) for p in c.pieces] for c in chunks] == [
        [(i, 0, 12) for i in range(4)],
        [(i, 12, 3) for i in range(4)],
    ]


def test_with_one_kind_for_all_the_cut_is_the_plain_one() -> None:
    layout = Layout((bucket(10), bucket(500), bucket(7), bucket(9, "float64")))
    for chunk, fusion in ((64, 0), (256, 100), (10**6, 10**5)):
        assert cut(layout, chunk, fusion, lambda *_: Kind("x")) == cut(layout, chunk, fusion)


# ---------------------------------------------------------------- spans


@any_cut
@settings(deadline=None)
def test_spans_cover_a_chunk_and_find_the_parameters(
    layout: Layout, chunk: int, fusion: int
) -> None:
    """Every element of a chunk is the one that its span says: compared by numbering them all."""
    number, first = {}, 0
    for spec in layout.buckets:
        for param in spec.params:
            number[param.name] = torch.arange(first, first + param.numel)
            first += param.numel
    flat = [
        torch.cat([torch.zeros(0, dtype=torch.long), *(number[p.name] for p in spec.params)])
        for spec in layout.buckets
    ]
    seen = []
    for item in cut(layout, chunk, fusion):
        content = torch.cat([flat[p.bucket][p.start : p.start + p.numel] for p in item.pieces])
        end = 0
        for span in layout.spans(item):
            assert span.start == end
            assert span.numel > 0
            end += span.numel
            assert span.param_numel == number[span.param].numel()
            of_param = number[span.param][span.param_start : span.param_start + span.numel]
            assert torch.equal(content[span.start : end], of_param)
            seen.append(of_param)
        assert end == item.numel
    assert sum(map(len, seen)) == first
    assert not seen or torch.equal(torch.cat(seen), torch.arange(first))


# ---------------------------------------------------------------- digest and JSON

BASE = Layout(
    (
        BucketSpec((ParamSpec("a", 3), ParamSpec("b", 5)), "float32"),
        BucketSpec((ParamSpec("c", 7),), "float32"),
    )
)


@pytest.mark.parametrize(
    "other",
    [
        Layout(()),
        Layout(BASE.buckets[:1]),
        Layout(BASE.buckets[::-1]),
        Layout((*BASE.buckets, BucketSpec((), "float32"))),
        Layout((BucketSpec((ParamSpec("a", 3), ParamSpec("x", 5)), "float32"), BASE.buckets[1])),
        Layout((BucketSpec((ParamSpec("a", 4), ParamSpec("b", 4)), "float32"), BASE.buckets[1])),
        Layout((BucketSpec((ParamSpec("b", 5), ParamSpec("a", 3)), "float32"), BASE.buckets[1])),
        Layout((BASE.buckets[0], dataclasses.replace(BASE.buckets[1], dtype="float64"))),
        Layout((BASE.buckets[0], dataclasses.replace(BASE.buckets[1], sparse=True))),
        Layout((BASE.buckets[0], BucketSpec((ParamSpec("c", 7, (7,)),), "float32"))),
        Layout((BASE.buckets[0], BucketSpec((ParamSpec("c", 7, (7, 1)),), "float32"))),
    ],
)
def test_the_digest_differs_when_anything_does(other: Layout) -> None:
    assert other.digest != BASE.digest
    assert other != BASE


@given(layouts() | shaped(), layouts() | shaped())
@settings(deadline=None)
def test_digests_are_equal_exactly_for_equal_layouts(left: Layout, right: Layout) -> None:
    assert (left.digest == right.digest) == (left == right)
    assert Layout(left.buckets).digest == left.digest


@given(layouts() | shaped())
@settings(deadline=None)
def test_json_and_pickle_both_ways(layout: Layout) -> None:
    for copy in (
        Layout.from_json(json.loads(json.dumps(layout.to_json()))),
        pickle.loads(pickle.dumps(layout)),
    ):
        assert copy == layout
        assert copy.digest == layout.digest
        assert hash(copy) == hash(layout)


def test_everything_is_frozen() -> None:
    chunk = cut(BASE, 64, 64)[0]
    span = next(iter(BASE.spans(chunk)))
    for item in (BASE, BASE.buckets[0], BASE.buckets[0].params[0], chunk, chunk.pieces[0], span):
        field = dataclasses.fields(item)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, field, getattr(item, field))


def test_first_names_says_how_many_more_there_are() -> None:
    names = [f"p{i}" for i in range(5)]
    assert first_names(names) == "p0, p1, p2, ... (2 more)"
    assert first_names(iter(names), 5) == "p0, p1, p2, p3, p4"
    assert first_names(["p7"]) == "p7"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_tensor(dtype: str) -> None:
    tensor = torch.zeros(11, dtype=getattr(torch, dtype))
    assert bucket(11, dtype).nbytes == tensor.nbytes
    assert Layout((bucket(11, dtype), bucket(2, dtype))).nbytes == 13 * tensor.itemsize
