"""The codecs by name. ``name:option=value,option=value`` gives one with other options.

Adding one takes a file and a line here; ``docs/codecs.md`` shows it.
"""

from __future__ import annotations

import difflib
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from commsched.codecs.base import ByteCodec, Codec, Gathered, Oracle, Sharded, Summed, WireSpec
from commsched.codecs.cast import Bf16, Fp16, Identity
from commsched.codecs.dgc import Dgc
from commsched.codecs.float8 import Dynamic8, Fp8
from commsched.codecs.integer import Int4, Int8
from commsched.codecs.lowrank import AcpSgd, PowerSgd
from commsched.codecs.randomk import RandomK
from commsched.codecs.sign import Sign
from commsched.codecs.stochastic import Qsgd, Ternary
from commsched.codecs.topk import TopK
from commsched.codecs.vote import Vote

__all__ = [
    "ByteCodec",
    "Codec",
    "Gathered",
    "Oracle",
    "Sharded",
    "Summed",
    "WireSpec",
    "get",
    "names",
    "register",
]

_CODECS: dict[str, type[Codec]] = {}


def register(codec: type[Codec]) -> type[Codec]:
    """Make a codec known by its name. Also a class decorator.

    Raises:
        ValueError: the name is taken; or something is missing: a frozen dataclass with defaults for
            all options, a decoder, a wire size, an oracle to test it against.
    """
    name = getattr(codec, "name", None)
    if not isinstance(name, str) or not is_dataclass(codec):
        raise ValueError(f"{codec.__name__} must be a frozen dataclass with a `name`")
    if name in _CODECS:
        raise ValueError(f"a codec called {name!r} is registered already")
    missing = sorted(codec.__abstractmethods__)
    if missing:
        raise ValueError(f"codec {name!r} lacks {', '.join(missing)}")
    if len(getattr(codec, "ops", ())) not in (1, 2):
        raise ValueError(f"codec {name!r} must say by which one or two collectives it goes: `ops`")
    if codec.lossy and codec.oracle is None:
        raise ValueError(f"codec {name!r} has no `oracle`: nothing could test it")
    codec()  # every option has a default
    _CODECS[name] = codec
    get.cache_clear()
    return codec


def names() -> tuple[str, ...]:
    """The registered codecs."""
    return tuple(_CODECS)


@cache
def get(text: str) -> Codec:
    """The codec that `text` stands for: a name, and options after a colon.

    Raises:
        ValueError: no such codec or option, or a value that it does not allow; says what it takes.
    """
    name, _, rest = text.partition(":")
    if name not in _CODECS:
        near = difflib.get_close_matches(name.lower(), names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no codec is called {name!r}: there are {', '.join(names())}{hint}")
    codec = _CODECS[name]
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in options:
            raise ValueError(f"option {key!r} of codec {name!r} is given twice")
        options[key] = _value(codec, key, value)
    return codec(**options)


def _value(codec: type[Codec], option: str, text: str) -> Any:
    types = get_type_hints(codec)
    options = {item.name: types[item.name] for item in fields(codec)}  # type: ignore[arg-type]
    if option not in options:
        known = ", ".join(options) or "none"
        raise ValueError(f"codec {codec.name!r} has no option {option!r}: it has {known}")
    kind = options[option]
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{option}={text!r} is not allowed for codec {codec.name!r}: it takes {kind.__name__}"
        ) from None


_EXACT_AND_CASTS = Identity, Fp16, Bf16
_DENSE = Int8, Int4, Fp8, Dynamic8, Qsgd, Ternary, Sign
_SPARSE = TopK, RandomK, Vote, Dgc
_LOW_RANK = PowerSgd, AcpSgd
for _codec in (*_EXACT_AND_CASTS, *_DENSE, *_SPARSE, *_LOW_RANK):
    register(_codec)
