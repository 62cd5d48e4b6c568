"""The codecs by name. A codec is stateless; `feedback` keeps what lossy ones leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from commsched.codecs.base import Codec, WireSpec
from commsched.codecs.cast import Bf16, Fp16, Identity

if TYPE_CHECKING:
    from commsched.layout import Chunk

__all__ = ["Codec", "WireSpec", "for_dtype", "get", "names", "register"]

_CODECS: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec known by its name.

    Raises:
        ValueError: the name is taken.
    """
    if codec.name in _CODECS:
        raise ValueError(f"a codec called {codec.name!r} is registered already")
    _CODECS[codec.name] = codec


def names() -> tuple[str, ...]:
    """The registered codecs."""
    return tuple(_CODECS)


def get(name: str) -> Codec:
    """The codec of that name (one of `names`)."""
    return _CODECS[name]


def for_dtype(name: str, chunk: Chunk) -> str:
    """`name` where it supports the chunk's dtype, else "none"; sparse chunks are never encoded."""
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return name if not chunk.sparse and get(name).supports(dtype) else Identity.name


for _codec in (Identity(), Fp16(), Bf16()):
    register(_codec)
