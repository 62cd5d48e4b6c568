"""Rules: which codec each parameter's gradient travels by, and the tasks that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

import torch

from commsched import codecs
from commsched.cutting import Kind, cut
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec
from commsched.plan import Task

if TYPE_CHECKING:
    from commsched.settings import Settings

__all__ = [
    "chunks_of",
    "codec_of",
    "literal",
    "parse_allow",
    "parse_rules",
    "tasks_of",
    "travels_by",
    "used",
    "without",
]


@cache
def parse_rules(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs of name pattern and codec from ``pattern=codec;pattern=codec``, in that order.

    Raises:
        ValueError: it does not read like that, or names a codec that does not exist.
    """
    rules = []
    for item in filter(None, (item.strip() for item in text.split(";"))):
        pattern, sign, codec = (part.strip() for part in item.partition("="))
        if not (pattern and sign and codec):
            raise ValueError(f"rules read pattern=codec;pattern=codec, and {item!r} does not")
        rules.append((pattern, str(codecs.get(codec))))
    return tuple(rules)


@cache
def parse_allow(text: str) -> tuple[str, ...]:
    """Codecs from ``codec,codec:option=value``, in that order.

    What follows a comma and begins with ``option=`` is one more option of the codec before it.

    Raises:
        ValueError: it names a codec that does not exist.
    """
    found: list[str] = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        if found and "=" in item and ":" not in item:
            found[-1] += f",{item}"
        else:
            found.append(item)
    return tuple(dict.fromkeys(str(codecs.get(item)) for item in found))


def literal(name: str) -> str:
    """The pattern that fits this parameter's name only."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in name)


def used(settings: Settings) -> tuple[str, ...]:
    """The codecs that the settings name, each once."""
    named = [str(codecs.get(settings.codec)), *(c for _, c in parse_rules(settings.codec_rules))]
    return tuple(dict.fromkeys(named))


def without(settings: Settings, refused: frozenset[str]) -> Settings:
    """The same settings, with gradients exact where those codecs would be used."""
    rules = parse_rules(settings.codec_rules)
    kept = [(pattern, "none" if codec in refused else codec) for pattern, codec in rules]
    codec = str(codecs.get(settings.codec))
    return replace(
        settings,
        codec="none" if codec in refused else codec,
        codec_rules=";".join(f"{pattern}={codec}" for pattern, codec in kept),
    )


def chunks_of(layout: Layout, settings: Settings, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut a layout so that what shares a chunk travels by the same codec."""

    def kind_of(bucket: BucketSpec, param: ParamSpec) -> Kind:
        codec = travels_by(bucket, param, settings)
        return Kind(codec, codecs.get(codec).whole_params)

    return cut(layout, chunk_bytes, settings.fusion_bytes, kind_of)


def codec_of(layout: Layout, chunk: Chunk, settings: Settings) -> str:
    """The codec of a chunk that `chunks_of` has cut."""
    span = next(layout.spans(chunk))
    bucket = layout.buckets[chunk.pieces[0].bucket]
    param = next(param for param in bucket.params if param.name == span.param)
    return travels_by(bucket, param, settings)


def tasks_of(layout: Layout, settings: Settings, chunk_bytes: int) -> Iterator[tuple[Task, ...]]:
    """For each chunk of a layout, in bucket order, its tasks. Their index is left at 0."""
    for chunk in chunks_of(layout, settings, chunk_bytes):
        codec = codec_of(layout, chunk, settings)
        ops = codecs.get(codec).ops
        yield tuple(Task(0, op, chunk, codec, number) for number, op in enumerate(ops))


def travels_by(bucket: BucketSpec, param: ParamSpec, settings: Settings) -> str:
    """A parameter's codec: that of the first rule that fits; else `codec`, unless it is for large.

    Biases and the weights of norms have one dimension: few bytes, and most sensitive to errors.
    """
    dtype: torch.dtype = getattr(torch, bucket.dtype)
    rule = _first_rule(settings.codec_rules, param.name)
    if rule is not None:
        return _if_it_fits(rule, bucket, dtype)
    codec = codecs.get(settings.codec)
    vector = len(param.shape) == 1 or param.numel == 1
    if not codec.for_all and (vector or param.numel < settings.codec_min_numel):
        return "none"
    return _if_it_fits(str(codec), bucket, dtype)


def _first_rule(text: str, param: str) -> str | None:
    """The codec of the first rule that fits."""
    by_name, patterns = _sorted_rules(text)
    place, codec = by_name.get(param, (len(by_name) + len(patterns), None))
    for at, pattern, other in patterns:
        if at > place:
            break
        if fnmatchcase(param, pattern):
            return other
    return codec


@cache
def _sorted_rules(
    text: str,
) -> tuple[dict[str, tuple[int, str]], tuple[tuple[int, str, str], ...]]:
    """Rules for one name each, which the automatic mode makes by the hundred; and the others."""
    by_name: dict[str, tuple[int, str]] = {}
    patterns = []
    for at, (pattern, codec) in enumerate(parse_rules(text)):
        if any(sign in pattern for sign in "*?["):
            patterns.append((at, pattern, codec))
        else:
            by_name.setdefault(pattern, (at, codec))
    return by_name, tuple(patterns)


def _if_it_fits(name: str, bucket: BucketSpec, dtype: torch.dtype) -> str:
    return name if not bucket.sparse and codecs.get(name).supports(dtype) else "none"
