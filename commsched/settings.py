"""The one registry of settings: field, type, default, range, doc <-> ``COMMSCHED_*`` variable.

A keyword of ``State(...)`` beats the environment, which beats the default. Everything that lists
settings (the command line, the README's table, the error messages) is generated from here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_type_hints

from commsched import codecs, policies
from commsched.errors import SettingsError
from commsched.rules import parse_allow, parse_rules

__all__ = [
    "PREFIX",
    "Resolved",
    "SettingSpec",
    "Settings",
    "resolve",
    "settings_markdown",
    "specs",
    "text_of",
]

PREFIX = "COMMSCHED_"
MB = 2**20  # as in DDP's bucket_cap_mb

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLEANS |= {"0": False, "false": False, "no": False, "off": False}


def _setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Callable[[], tuple[str, ...]] | None = None,
    reads: Callable[[str], object] | None = None,
    form: Callable[[], str] | None = None,
    per_rank: bool = False,
) -> Any:
    metadata = {"doc": doc, "low": low, "high": high, "choices": choices, "reads": reads}
    return field(default=default, metadata={**metadata, "form": form, "per_rank": per_rank})


@dataclass(frozen=True)
class Settings:
    """The effective settings of one ``State``. Build it with `resolve`, which checks the values.

    Sizes are in MB of 2**20 bytes, as in DDP's ``bucket_cap_mb``; times in seconds.
    """

    enabled: bool = _setting(
        True, "off: gradients go through torch's own all-reduce hook, as if commsched were absent"
    )
    policy: str = _setting(
        policies.AUTO,
        "the order of tasks; auto: measures, tries the most promising ones, and keeps the fastest",
        choices=lambda: (policies.AUTO, *policies.names()),
    )
    codec: str = _setting(
        "none",
        "how gradients travel; none is exact, the others are lossy (docs/codecs.md)",
        reads=codecs.get,
        form=lambda: " | ".join(codecs.names()) + ", with options as in topk:ratio=0.01",
    )
    codec_rules: str = _setting(
        "",
        "codecs of parameters by name, the first that fits, before all else: head.*=none;emb*=fp16",
        reads=parse_rules,
        form=lambda: "pattern=codec;...",
    )
    codec_min_numel: int = _setting(
        1024,
        "parameters with fewer elements stay exact, as do biases and norms; not with fp16 and bf16",
        low=0,
        high=10**9,
    )
    codec_start_step: int = _setting(
        -1,
        "steps before this one are exact; -1: the codec chooses (6; fp16 and bf16: 0)",
        low=-1,
        high=10**9,
    )
    codec_force: bool = _setting(
        False, "use the codec also where encoding is found to cost more time than it saves"
    )
    error_feedback: str = _setting(
        "auto",
        "add what a step's encoding lost to the next gradient; auto: where the codec is biased",
        choices=lambda: ("auto", "0", "1"),
    )
    allow: str = _setting(
        "",
        "lossy codecs that policy=auto may choose where they gain; none unless named here",
        reads=parse_allow,
        form=lambda: "codec,codec,... as in codec",
    )
    tuning_file: str = _setting(
        "",
        "file where policy=auto keeps its choice; a later run of the same job tries nothing",
        form=lambda: "a path",
    )
    chunk_mb: float = _setting(
        0.0,
        "gradients per collective: larger buckets are cut to this; 0: the policy chooses (fifo: 4)",
        low=0.0,
        high=1024.0,
    )
    fusion_mb: float = _setting(
        1.0,
        "neighbouring buckets smaller than this travel together; 0: never",
        low=0.0,
        high=1024.0,
    )
    credit_mb: float = _setting(
        0.0,
        "bytes on the wire at once; one chunk may always go; 0: the policy chooses (fifo: 16)",
        low=0.0,
        high=16384.0,
    )
    timeout_s: float = _setting(
        0.0,
        "the longest a wait may take before it is an error; 0: the timeout of DDP's process group",
        low=0.0,
        high=604800.0,
    )
    trace: str = _setting(
        "",
        "folder for a timeline of every rank (`commsched report` reads it); none when empty",
        form=lambda: "a path",
        per_rank=True,
    )
    trace_steps: str = _setting(
        "0:200",
        "the steps that the timeline holds, without the last; each end may be left out",
        reads=lambda text: __import__(
            "commsched.tracing.tracer", fromlist=["parse_steps"]
        ).parse_steps(text),
        form=lambda: "first:end",
    )
    metrics: str = _setting(
        "",
        "folder for a Prometheus text file of every rank; none when empty",
        form=lambda: "a path",
        per_rank=True,
    )
    log_level: str = _setting(
        "warning",
        "what the `commsched` logger lets through",
        choices=lambda: ("debug", "info", "warning", "error"),
        per_rank=True,
    )

    @property
    def chunk_bytes(self) -> int:
        """`chunk_mb` in bytes; 0 where the policy chooses."""
        return int(self.chunk_mb * MB)

    @property
    def fusion_bytes(self) -> int:
        """`fusion_mb` in bytes."""
        return int(self.fusion_mb * MB)

    @property
    def credit_bytes(self) -> int:
        """`credit_mb` in bytes; 0 where the policy chooses."""
        return int(self.credit_mb * MB)

    def shared(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks (JSON values)."""
        return {spec.field: getattr(self, spec.field) for spec in specs() if not spec.per_rank}


@dataclass(frozen=True)
class SettingSpec:
    """One row of the registry."""

    field: str
    type: type
    default: Any
    doc: str
    low: float | None
    high: float | None
    choices: tuple[str, ...] | None
    reads: Callable[[str], object] | None  # raises ValueError where a text means nothing
    form: str | None  # what that takes, in words
    per_rank: bool

    @property
    def variable(self) -> str:
        """Its environment variable, e.g. ``COMMSCHED_CHUNK_MB``."""
        return PREFIX + self.field.upper()

    @property
    def allowed(self) -> str:
        """What values it takes, in words."""
        if self.form is not None:
            return self.form
        if self.choices is not None:
            return " | ".join(self.choices)
        if self.type is bool:
            return "0 | 1"
        return f"{self.low:g} to {self.high:g}"

    def parse(self, text: str) -> Any:
        """The value that an environment variable's text stands for.

        Raises:
            SettingsError: the text does not parse or the value is not allowed.
        """
        try:
            value = _BOOLEANS[text.strip().lower()] if self.type is bool else self.type(text)
            if self.choices is not None and {"0", "1"} <= {*self.choices}:
                value = _BOOLEANS.get(text.strip().lower(), value)
        except (KeyError, ValueError):
            raise self._error(self.variable, text) from None
        return self.check(value, self.variable)

    def check(self, value: Any, said_by: str) -> Any:
        """`value` as this setting's type.

        Raises:
            SettingsError: wrong type, out of range, or not one of the choices.
        """
        if self.type is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is bool and self.choices is not None and str(int(value)) in self.choices:
            value = str(int(value))
        right_type = type(value) is self.type  # exactly: True is an int, but not for chunk_mb
        if not right_type:
            raise self._error(said_by, value)
        if self.choices is not None and value not in self.choices:
            near = difflib.get_close_matches(value.lower(), self.choices, 1)
            raise self._error(said_by, value, near)
        if self.reads is not None:
            try:
                self.reads(value)
            except ValueError as error:
                raise SettingsError(f"{said_by}={value!r} is not allowed: {error}") from None
        if self.low is not None and self.high is not None and not self.low <= value <= self.high:
            raise self._error(said_by, value)
        return value

    def _error(self, said_by: str, value: Any, near: list[str] | None = None) -> SettingsError:
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return SettingsError(
            f"{said_by}={value!r} is not allowed: {self.field} takes {self.allowed} "
            f"(default {self.default!r}){hint}"
        )


def specs() -> tuple[SettingSpec, ...]:
    """All settings, in the order of the registry."""
    types = get_type_hints(Settings)
    rows = []
    for item in fields(Settings):
        meta = dict(item.metadata)
        choices, form = meta.pop("choices"), meta.pop("form")
        rows.append(
            SettingSpec(
                field=item.name,
                type=types[item.name],
                default=item.default,
                choices=choices() if choices is not None else None,
                form=form() if form is not None else None,
                **meta,
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class Resolved:
    """Settings and, for each field, where its value came from."""

    settings: Settings
    origin: dict[str, str]  # field -> "keyword" | "environment" | "default"

    def describe(self) -> str:
        """One line: every value that is not a default, and its origin."""
        values = asdict(self.settings)
        said = [f"{k}={values[k]!r} ({o})" for k, o in self.origin.items() if o != "default"]
        return ", ".join(said) if said else "all defaults"


def resolve(
    keywords: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Effective settings: keyword beats environment beats default.

    Args:
        keywords: settings by field name, as given to ``State(...)``.
        environ: the environment; ``os.environ`` when None.

    Raises:
        SettingsError: an unknown keyword or ``COMMSCHED_*`` variable, or a value not allowed.
    """
    keywords = keywords or {}
    environ = os.environ if environ is None else environ
    registry = {spec.field: spec for spec in specs()}
    _refuse_unknown(keywords, list(registry), "setting")
    said = [name for name in environ if name.startswith(PREFIX)]
    known = [spec.variable for spec in registry.values()]
    _refuse_unknown({name: environ[name] for name in said}, known, "environment variable")
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for spec in registry.values():
        # The environment is checked even when a keyword wins: a typo there is still a typo.
        from_environ = spec.parse(environ[spec.variable]) if spec.variable in environ else None
        if spec.field in keywords:
            values[spec.field] = spec.check(keywords[spec.field], spec.field)
            origin[spec.field] = "keyword"
        elif from_environ is not None:
            values[spec.field], origin[spec.field] = from_environ, "environment"
        else:
            values[spec.field], origin[spec.field] = spec.default, "default"
    return Resolved(Settings(**values), origin)


def _refuse_unknown(said: Mapping[str, Any], known: list[str], kind: str) -> None:
    for name, value in said.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise SettingsError(
                f"unknown {kind} {name}={value!r}; nearest known: {near[0]}. "
                f"Known: {', '.join(known)}"
            )


def settings_markdown() -> str:
    """The registry as a Markdown table, for the documentation."""
    lines = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for spec in specs():
        allowed = spec.allowed.replace("|", "\\|")
        lines.append(f"| `{spec.variable}` | {text_of(spec.default)} | {allowed} | {spec.doc} |")
    return "\n".join(lines)


def text_of(value: object) -> str:
    """A setting's value as the environment variable takes it."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)
