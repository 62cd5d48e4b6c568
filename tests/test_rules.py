"""Rules: which codec each gradient travels by, and chunks and tasks that follow from it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched import codecs
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec
from commsched.rules import chunks_of, codec_of, parse_rules, tasks_of, used, without
from commsched.settings import Settings
from tests.mixed import mixed_settings, registered, shaped

BYTES = st.sampled_from([64, 300, 1000, 4096, 10**6])
WEIGHT = ParamSpec("body.weight", 3000, (60, 50))


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


def bucket(*params: ParamSpec, dtype: str = "float32", sparse: bool = False) -> BucketSpec:
    return BucketSpec(params, dtype, sparse)


def chosen_for(
    param: ParamSpec, dtype: str = "float32", sparse: bool = False, **chosen: object
) -> str:
    """The codec of a parameter alone in its bucket."""
    layout = Layout((bucket(param, dtype=dtype, sparse=sparse),))
    options = Settings(**chosen)  # type: ignore[arg-type]
    (chunk,) = chunks_of(layout, options, 10**9)
    return codec_of(layout, chunk, options)


# ---------------------------------------------------------------- reading rules


def test_rules_are_pairs_in_their_order() -> None:
    text = " head.*=none ; *.emb = evens;;*=twice:scale=2; "
    assert parse_rules(text) == (("head.*", "none"), ("*.emb", "evens"), ("*", "twice:scale=2"))
    assert parse_rules("") == ()
    assert parse_rules(" ; ") == ()


def test_codecs_in_rules_are_said_in_one_way() -> None:
    assert parse_rules("a=twice:scale=1;b=twice: scale=3") == (
        ("a", "twice"),
        ("b", "twice:scale=3"),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("head", "'head' does not"),
        ("head.*=", "'head.*=' does not"),
        ("=fp16", "'=fp16' does not"),
        ("a=fp16;b", "'b' does not"),
        ("a=fp61", "did you mean 'fp16'"),
        ("a=twice:scala=1", "no option 'scala'"),
        ("a=twice:scale=much", "it takes int"),
    ],
)
def test_rules_that_make_no_sense_are_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_rules(text)


# ---------------------------------------------------------------- which codec


def test_the_first_rule_that_fits_wins() -> None:
    both = {"codec": "fp16", "codec_rules": "body.*=evens;*.weight=coarse"}
    assert chosen_for(WEIGHT, **both) == "evens"
    both["codec_rules"] = "*.weight=coarse;body.*=evens"
    assert chosen_for(WEIGHT, **both) == "coarse"
    both["codec_rules"] = "head.*=coarse;tail=evens"
    assert chosen_for(WEIGHT, **both) == "fp16"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("body.weight", True),
        ("*", True),
        ("body.?eight", True),
        ("b[a-o]dy.*", True),
        ("body", False),
        ("BODY.*", False),
        ("weight", False),
        ("*.bias", False),
    ],
)
def test_patterns_are_a_shells_over_the_whole_name(pattern: str, fits: bool) -> None:
    assert chosen_for(WEIGHT, codec_rules=f"{pattern}=coarse") == ("coarse" if fits else "none")


@pytest.mark.parametrize("codec", ["coarse", "twice"])
def test_vectors_and_small_ones_stay_exact(codec: str) -> None:
    assert chosen_for(WEIGHT, codec=codec) == codec
    assert chosen_for(ParamSpec("bias", 5000, (5000,)), codec=codec) == "none"
    assert chosen_for(ParamSpec("scale", 1, ()), codec=codec, codec_min_numel=0) == "none"
    assert chosen_for(ParamSpec("one", 1, (1, 1)), codec=codec, codec_min_numel=0) == "none"
    matrix = ParamSpec("w", 1023, (33, 31))
    assert chosen_for(matrix, codec=codec) == "none"
    assert chosen_for(replace(matrix, numel=1024), codec=codec) == codec
    assert chosen_for(matrix, codec=codec, codec_min_numel=1024) == "none"
    assert chosen_for(matrix, codec=codec, codec_min_numel=1023) == codec
    assert chosen_for(matrix, codec=codec, codec_min_numel=0) == codec
    bias = ParamSpec("bias", 5000, (5000,))
    assert chosen_for(bias, codec=codec, codec_min_numel=0) == "none"


@pytest.mark.parametrize("codec", ["fp16", "bf16", "evens"])
def test_codecs_for_all_take_vectors_and_small_ones_too(codec: str) -> None:
    for param in (
        ParamSpec("bias", 50, (50,)),
        ParamSpec("scale", 1, ()),
        ParamSpec("w", 4, (2, 2)),
    ):
        assert chosen_for(param, codec=codec) == codec


def test_a_rule_overrides_the_care_for_vectors_and_small_ones() -> None:
    for param in (
        ParamSpec("bias", 50, (50,)),
        ParamSpec("scale", 1, ()),
        ParamSpec("w", 4, (2, 2)),
    ):
        assert chosen_for(param, codec_rules="*=coarse") == "coarse"


@pytest.mark.parametrize("said", [{"codec": "coarse"}, {"codec_rules": "*=coarse"}])
def test_what_a_codec_does_not_support_stays_exact(said: dict[str, str]) -> None:
    assert chosen_for(WEIGHT, **said) == "coarse"
    for dtype in ("float64", "float16", "int64", "complex64"):
        assert chosen_for(WEIGHT, dtype=dtype, **said) == "none"


@pytest.mark.parametrize("codec", ["fp16", "coarse", "evens", "twice"])
@pytest.mark.parametrize("how", ["codec", "rule"])
def test_sparse_gradients_are_never_encoded(codec: str, how: str) -> None:
    said = {"codec": codec} if how == "codec" else {"codec_rules": f"*={codec}"}
    assert chosen_for(WEIGHT, sparse=True, **said) == "none"


def test_a_codecs_options_stay_with_it() -> None:
    assert chosen_for(WEIGHT, codec="twice:scale=3") == "twice:scale=3"
    assert chosen_for(WEIGHT, codec="twice:scale=1") == "twice"


# ---------------------------------------------------------------- all that settings name


def test_used_are_all_that_are_named_each_once() -> None:
    chosen = Settings(codec="twice:scale=1", codec_rules="a=none;b=twice;c=evens;d=evens;e=none")
    assert used(chosen) == ("twice", "none", "evens")
    assert used(Settings()) == ("none",)


def test_without_leaves_those_out_wherever_they_are_named() -> None:
    chosen = Settings(
        codec="coarse", codec_rules="a.*=coarse;b=evens;c=twice:scale=2", chunk_mb=3.0
    )
    kept = without(chosen, frozenset({"coarse", "twice:scale=2"}))
    assert kept == replace(chosen, codec="none", codec_rules="a.*=none;b=evens;c=none")
    # The rule stays, with nothing to do: else the codec would take what it had kept apart.
    param = ParamSpec("b", 3000, (60, 50))
    rules = Settings(codec="evens", codec_rules="b=coarse")
    layout = Layout((bucket(param),))
    chosen = without(rules, frozenset({"coarse"}))
    assert codec_of(layout, chunks_of(layout, chosen, 10**6)[0], chosen) == "none"


@given(mixed_settings())
def test_without_none_nothing_changes_and_without_all_everything_is_exact(chosen: Settings) -> None:
    kept = without(chosen, frozenset())
    assert used(kept) == used(chosen)
    assert parse_rules(kept.codec_rules) == parse_rules(chosen.codec_rules)
    assert without(kept, frozenset()) == kept
    assert used(without(chosen, frozenset(used(chosen)))) == ("none",)


@given(shaped(), mixed_settings(), st.sampled_from(["coarse", "evens", "fp16", "twice"]))
@settings(max_examples=50)
def test_the_others_travel_as_before_when_one_is_refused(
    layout: Layout, chosen: Settings, refused: str
) -> None:
    before, after = (
        by_param(layout, chosen),
        by_param(layout, without(chosen, frozenset({refused}))),
    )
    for name, codec in before.items():
        assert after[name] == ("none" if codec == refused else codec)


# ---------------------------------------------------------------- chunks and tasks


def by_param(layout: Layout, chosen: Settings, chunk_bytes: int = 10**6) -> dict[str, str]:
    return {
        span.param: codec_of(layout, chunk, chosen)
        for chunk in chunks_of(layout, chosen, chunk_bytes)
        for span in layout.spans(chunk)
    }


def expected(bucket: BucketSpec, param: ParamSpec, chosen: Settings) -> str:
    """The rules once more, as the documentation has them."""
    named = [
        (p, c) for p, c in parse_rules(chosen.codec_rules) if fnmatch.fnmatchcase(param.name, p)
    ]
    codec = codecs.get(named[0][1] if named else chosen.codec)
    if bucket.sparse or not codec.supports(getattr(torch, bucket.dtype)):
        return "none"
    if not named and not codec.for_all:
        small = param.numel < chosen.codec_min_numel or param.numel == 1 or len(param.shape) == 1
        if small:
            return "none"
    return str(codec)


@given(shaped(), mixed_settings(), BYTES)
@settings(max_examples=200)
def test_every_parameter_travels_by_its_own_codec(
    layout: Layout, chosen: Settings, chunk_bytes: int
) -> None:
    wanted = {p.name: expected(b, p, chosen) for b in layout.buckets for p in b.params}
    counts = [torch.zeros(spec.numel, dtype=torch.int) for spec in layout.buckets]
    for chunk in chunks_of(layout, chosen, chunk_bytes):
        codec = codec_of(layout, chunk, chosen)
        assert {wanted[span.param] for span in layout.spans(chunk)} == {codec}
        for piece in chunk.pieces:
            counts[piece.bucket][piece.start : piece.start + piece.numel] += 1
    assert all(bool((count == 1).all()) for count in counts)


@given(shaped(), mixed_settings(), BYTES)
@settings(max_examples=200)
def test_codecs_that_need_whole_parameters_get_them(
    layout: Layout, chosen: Settings, chunk_bytes: int
) -> None:
    shapes = {param.name: param.shape for spec in layout.buckets for param in spec.params}
    for chunk in chunks_of(layout, chosen, chunk_bytes):
        if not codecs.get(codec_of(layout, chunk, chosen)).whole_params:
            assert {piece.rows for piece in chunk.pieces} == {0}
            continue
        spans = list(layout.spans(chunk))
        assert len(spans) == len(chunk.pieces)
        for piece, span in zip(chunk.pieces, spans, strict=True):
            assert (span.param_start, span.numel) == (0, span.param_numel)
            assert piece.numel == span.numel
            shape = shapes[span.param]
            assert piece.rows == (shape[0] if len(shape) > 1 else 0)
        assert chunk.nbytes <= chunk_bytes or len(spans) == 1


def test_a_layer_between_others_is_taken_out_of_them() -> None:
    params = [ParamSpec(name, 2000, (40, 50)) for name in ("a", "head", "b")]
    layout = Layout((bucket(*params),))
    chosen = Settings(codec="coarse", codec_rules="head=none", fusion_mb=0.0)
    found = [
        (codec_of(layout, chunk, chosen), [(p.start, p.numel) for p in chunk.pieces])
        for chunk in chunks_of(layout, chosen, 10**6)
    ]
    assert found == [("coarse", [(0, 2000), (4000, 2000)]), ("none", [(2000, 2000)])]


@given(shaped(), mixed_settings(), BYTES)
def test_each_chunk_has_a_task_for_each_of_its_codecs_rounds(
    layout: Layout, chosen: Settings, chunk_bytes: int
) -> None:
    rows = list(tasks_of(layout, chosen, chunk_bytes))
    assert tuple(tasks[0].chunk for tasks in rows) == chunks_of(layout, chosen, chunk_bytes)
    for tasks in rows:
        codec = codec_of(layout, tasks[0].chunk, chosen)
        assert {(task.chunk, task.codec) for task in tasks} == {(tasks[0].chunk, codec)}
        assert [task.op for task in tasks] == list(codecs.get(codec).ops)
        assert [task.round for task in tasks] == list(range(len(tasks)))


def test_exact_chunks_take_one_all_reduce() -> None:
    layout = Layout((bucket(WEIGHT),))
    ((task,),) = tasks_of(layout, Settings(), 10**6)
    assert (task.op, task.codec, task.round) == ("all_reduce", "none", 0)
    assert isinstance(task.chunk, Chunk)
