"""Profiles by name, file or trace. Those shipped: true layer sizes, published compute times.

`bench/make_profiles.py` makes the files beside this one; each says where its figures come from.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commsched.errors import CommSchedError
from commsched.profile import Profile

if TYPE_CHECKING:
    from commsched.tracing.file import RankTrace

__all__ = ["Loaded", "load", "names"]


@dataclass(frozen=True)
class Loaded:
    """A profile and where it comes from.

    Attributes:
        name: short, for titles.
        source: in words.
        profile: the profile itself.
        coding_s: seconds to encode and decode a byte of gradients by codec, where a trace shows
            them.
    """

    name: str
    source: str
    profile: Profile
    coding_s: Mapping[str, float] = field(default_factory=dict)


def names() -> tuple[str, ...]:
    """The shipped profiles."""
    files = (item.name for item in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in files if name.endswith(".json")))


def load(source: str) -> Loaded:
    """The profile that `source` stands for.

    Args:
        source: the name of a shipped profile; a JSON file that ``commsched profile`` wrote; a trace
            file; or a folder of them, of which the last profile counts.

    Raises:
        CommSchedError: it is none of them.
    """
    path = Path(source)
    if source in names():
        return _of_text(resources.files(__name__).joinpath(f"{source}.json").read_text(), source)
    if path.is_dir():
        return _of_traces(source)
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(64).lstrip().startswith("["):
                return _of_traces(source)
        return _of_text(path.read_text(encoding="utf-8"), source)
    except OSError as error:
        raise CommSchedError(
            f"{source} cannot be read ({error.strerror}): name a trace, a folder of traces, a file "
            f"of `commsched profile`, or one of {', '.join(names())}"
        ) from None
    except UnicodeDecodeError:
        raise _no_profile(source) from None


def _of_text(text: str, name: str) -> Loaded:
    try:
        data = json.loads(text)
        inner = data.get("profile", data)
        profile = Profile.from_json(json.dumps(inner))
        return Loaded(data.get("name", Path(name).stem), data.get("source", name), profile)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _no_profile(name) from None


def _no_profile(source: str) -> CommSchedError:
    return CommSchedError(
        f"{source} holds no profile: name a trace, a file that `commsched profile SOURCE -o FILE` "
        f"wrote, or one of {', '.join(names())}"
    )


def _of_traces(source: str) -> Loaded:
    from commsched.tracing import file

    traces = file.read_all([source])
    found = [
        (int(args.get("at_step", 0)), -trace.rank, _text(args["profile"]))
        for trace in traces
        for name, args in trace.notes
        if name == "commsched_profile" and "profile" in args
    ]
    if not found:
        raise CommSchedError(
            f"{source} holds no measured profile: let the job run some 10 steps more with "
            "COMMSCHED_TRACE set, until it has measured one"
        )
    step, _, text = max(found)
    said = f"{source}, measured by step {step}"
    return Loaded(Path(source).stem, said, Profile.from_json(text), _coding_s(traces))


def _text(value: Any) -> str:
    """JSON text, of a value that may be text already."""
    return value if isinstance(value, str) else json.dumps(value)


def _coding_s(traces: Iterable[RankTrace]) -> dict[str, float]:
    """What encoding and decoding took for a byte of gradients, by codec, over all ranks."""
    seconds: dict[str, float] = defaultdict(float)
    nbytes: dict[str, float] = defaultdict(float)
    for span in (span for trace in traces for span in trace.spans):
        if span.name in ("encode", "decode"):
            args: Mapping[str, Any] = span.args
            codec = str(args.get("codec", "none"))
            seconds[codec] += span.end_s - span.begin_s
            if span.name == "encode" and not args.get("round", 0):
                nbytes[codec] += float(args.get("bytes", 0))
    return {codec: seconds[codec] / nbytes[codec] for codec in seconds if nbytes[codec] > 0}
