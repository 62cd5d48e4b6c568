"""Settings: where a value comes from, what is refused, and what the refusal says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched import codecs, policies
from commsched.errors import CommSchedError, SettingsError
from commsched.settings import MB, PREFIX, Settings, SettingSpec, resolve, specs

SPECS = {spec.field: spec for spec in specs()}
FLOATS = [spec for spec in SPECS.values() if spec.type is float]
CHOICES = [spec for spec in SPECS.values() if spec.choices is not None]
BOOLEANS = [spec for spec in SPECS.values() if spec.type is bool]
INTS = [spec for spec in SPECS.values() if spec.type is int]
READ = {  # texts that are read: some that mean something, some that do not and what is said then
    "codec": (
        ("fp16", "bf16"),
        {
            "": "no codec is called ''",
            "nothing-like-it": "there are none, fp16, bf16",
            "fp61": "did you mean 'fp16'?",
            "BF16": "did you mean 'bf16'?",
            "fp16,": "no codec is called 'fp16,'",
            "fp16:bits=4": "codec 'fp16' has no option 'bits': it has none",
        },
    ),
    "allow": (
        ("int8", "bf16,topk:ratio=0.02,int8"),
        {"fp61": "did you mean 'fp16'?", "topk:ratio=0.01,bits=4": "no option 'bits'"},
    ),
    "trace_steps": (
        ("10:20", "10:"),
        {"10": "write the first one and the one after", "20:10": "10:20", "a:b": "10:20"},
    ),
    "codec_rules": (
        ("head.*=none", "*.weight=bf16;*=fp16"),
        {
            "head": "rules read pattern=codec;pattern=codec, and 'head' does not",
            "a=fp16;b=": "'b=' does not",
            "=fp16": "'=fp16' does not",
            "*=fp61": "did you mean 'fp16'?",
            "*=fp16:bits=4": "no option 'bits'",
        },
    ),
}


def ids(spec: object) -> str:
    return spec.field if isinstance(spec, SettingSpec) else repr(spec)


def two_values(spec: SettingSpec) -> tuple[Any, Any]:
    """Two allowed values, neither of them the default unless there are only two."""
    if spec.field in READ:
        return READ[spec.field][0]
    if spec.choices is not None:
        others = [choice for choice in spec.choices if choice != spec.default] or [spec.default]
        return others[0], others[-1]
    if spec.type is bool:
        return (not spec.default), spec.default
    if spec.type is str:
        return "one/path", "another"
    assert spec.low is not None
    assert spec.high is not None
    if spec.type is int:
        return spec.low + (spec.high - spec.low) // 2, spec.low + (spec.high - spec.low) // 4
    return (spec.low + spec.high) / 2, (spec.low + spec.high) / 4


def text_of(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def refusal(**sources: Any) -> str:
    sources.setdefault("environ", {})
    with pytest.raises(SettingsError) as caught:
        resolve(**sources)
    return str(caught.value)


# ---------------------------------------------------------------- the registry


@pytest.mark.parametrize("spec", SPECS.values(), ids=ids)
def test_every_setting_is_described(spec: SettingSpec) -> None:
    assert spec.variable == f"{PREFIX}{spec.field}".upper()
    assert spec.variable.startswith("COMMSCHED_")
    assert len(spec.doc.split()) >= 3
    assert spec.allowed.strip()
    assert spec.check(spec.default, spec.field) == spec.default
    assert type(spec.default) is spec.type
    assert [spec.choices, spec.reads].count(None) >= 1
    assert (spec.reads is None) == (spec.field not in READ)


def test_the_registry_is_the_dataclass() -> None:
    assert list(SPECS) == [item.name for item in dataclasses.fields(Settings)]
    assert Settings() == resolve(environ={}).settings
    assert len({spec.variable for spec in SPECS.values()}) == len(SPECS)


def test_float_names_carry_their_unit() -> None:
    assert [spec.field for spec in FLOATS if not spec.field.endswith(("_mb", "_s", "_ms"))] == []


def test_choices_are_those_of_the_registries() -> None:
    assert SPECS["policy"].choices == (policies.AUTO, *policies.names())
    assert SPECS["codec"].choices is None  # a name, and options
    assert SPECS["codec"].allowed.startswith(" | ".join(codecs.names()))


def test_the_default_is_exact() -> None:
    assert not codecs.get(Settings().codec).lossy


@pytest.mark.parametrize("spec", FLOATS, ids=ids)
def test_bounds_are_inside_and_just_beyond_is_outside(spec: SettingSpec) -> None:
    assert spec.low is not None
    assert spec.high is not None
    assert spec.check(spec.low, "x") == spec.low
    assert spec.check(spec.high, "x") == spec.high
    for value in (math.nextafter(spec.low, -math.inf), math.nextafter(spec.high, math.inf)):
        with pytest.raises(SettingsError):
            spec.check(value, "x")


@pytest.mark.parametrize("spec", INTS, ids=ids)
def test_whole_bounds_are_inside_and_just_beyond_is_outside(spec: SettingSpec) -> None:
    assert spec.low is not None
    assert spec.high is not None
    for value in (spec.low, spec.high):
        assert spec.check(value, "x") == value
        assert spec.parse(str(value)) == value
    for value in (spec.low - 1, spec.high + 1):
        with pytest.raises(SettingsError):
            spec.check(value, "x")
        with pytest.raises(SettingsError):
            spec.parse(str(value))


@pytest.mark.parametrize("spec", [*FLOATS, *INTS], ids=ids)
def test_allowed_text_gives_the_bounds(spec: SettingSpec) -> None:
    low, high = spec.allowed.split(" to ")
    assert (float(low), float(high)) == (spec.low, spec.high)


# ---------------------------------------------------------------- precedence


@pytest.mark.parametrize("spec", SPECS.values(), ids=ids)
def test_keyword_beats_environment_beats_default(spec: SettingSpec) -> None:
    keyword, environment = two_values(spec)
    environ = {spec.variable: text_of(environment)}
    both = resolve({spec.field: keyword}, environ)
    only_environment = resolve({}, environ)
    neither = resolve({}, {})
    assert getattr(both.settings, spec.field) == keyword
    assert getattr(only_environment.settings, spec.field) == environment
    assert getattr(neither.settings, spec.field) == spec.default
    assert both.origin[spec.field] == "keyword"
    assert only_environment.origin[spec.field] == "environment"
    assert neither.origin[spec.field] == "default"
    others = {name: origin for name, origin in both.origin.items() if name != spec.field}
    assert others == dict.fromkeys(SPECS.keys() - {spec.field}, "default")


def test_the_real_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in SPECS.values():
        monkeypatch.delenv(spec.variable, raising=False)
    monkeypatch.setenv("COMMSCHED_CHUNK_MB", "7.25")
    assert resolve().settings.chunk_mb == 7.25
    assert resolve(environ={}).settings.chunk_mb == Settings().chunk_mb


def test_variables_of_others_are_not_looked_at() -> None:
    assert resolve({}, {"PATH": "x", "NCCL_DEBUG": "x", "MY_COMMSCHED_CHUNK_MB": "x"}) == resolve(
        {}, {}
    )


def test_describe_tells_values_and_origins() -> None:
    text = resolve({"chunk_mb": 2.5}, {"COMMSCHED_CODEC": "bf16"}).describe()
    assert "chunk_mb=2.5 (keyword)" in text
    assert "codec='bf16' (environment)" in text
    assert "fusion_mb" not in text
    assert resolve({}, {}).describe() == "all defaults"


@given(st.data())
def test_floats_round_trip_through_the_environment(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(FLOATS))
    value = data.draw(st.floats(spec.low, spec.high))
    assert getattr(resolve({}, {spec.variable: str(value)}).settings, spec.field) == value
    assert getattr(resolve({spec.field: value}, {}).settings, spec.field) == value


@given(st.floats(SPECS["chunk_mb"].low, SPECS["chunk_mb"].high))
def test_bytes_are_whole_and_never_more_than_said(chunk_mb: float) -> None:
    settings = resolve({"chunk_mb": chunk_mb, "credit_mb": chunk_mb}, {}).settings
    for size in (settings.chunk_bytes, settings.credit_bytes):
        assert type(size) is int
        assert size <= chunk_mb * MB < size + 1


@given(st.data())
def test_whole_numbers_round_trip_through_the_environment(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(INTS))
    value = data.draw(st.integers(spec.low, spec.high))
    for chosen in (resolve({}, {spec.variable: str(value)}), resolve({spec.field: value}, {})):
        assert getattr(chosen.settings, spec.field) == value
        assert type(getattr(chosen.settings, spec.field)) is int


@pytest.mark.parametrize(("value", "text"), [(True, "1"), (False, "0")])
def test_error_feedback_takes_a_bool_as_a_keyword(value: bool, text: str) -> None:
    assert resolve({"error_feedback": value}, {}).settings.error_feedback == text
    assert resolve({"error_feedback": text}, {}) == resolve({"error_feedback": value}, {})
    assert resolve({}, {"COMMSCHED_ERROR_FEEDBACK": text}).settings.error_feedback == text
    assert resolve({}, {}).settings.error_feedback == "auto"


@pytest.mark.parametrize("field", READ)
def test_texts_that_are_read_are_kept_as_they_were_said(field: str) -> None:
    for text in READ[field][0]:
        assert getattr(resolve({field: text}, {}).settings, field) == text
        assert getattr(resolve({}, {SPECS[field].variable: text}).settings, field) == text


@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " 1 "])
@pytest.mark.parametrize("spec", BOOLEANS, ids=ids)
def test_words_for_true(spec: SettingSpec, text: str) -> None:
    assert spec.parse(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF"])
@pytest.mark.parametrize("spec", BOOLEANS, ids=ids)
def test_words_for_false(spec: SettingSpec, text: str) -> None:
    assert spec.parse(text) is False


def test_a_whole_number_is_a_float_too() -> None:
    value = resolve({"chunk_mb": 8}, {}).settings.chunk_mb
    assert value == 8.0
    assert type(value) is float


# ---------------------------------------------------------------- refusals


def test_unknown_variable_names_itself_its_value_and_the_nearest() -> None:
    text = refusal(environ={"COMMSCHED_CHUNCK_MB": "4"})
    assert "COMMSCHED_CHUNCK_MB='4'" in text
    assert "environment variable" in text
    assert "nearest known: COMMSCHED_CHUNK_MB." in text


def test_unknown_keyword_names_itself_its_value_and_the_nearest() -> None:
    text = refusal(keywords={"chunck_mb": 4})
    assert "chunck_mb=4" in text
    assert "nearest known: chunk_mb." in text


def test_an_unknown_name_like_no_other_still_lists_all() -> None:
    text = refusal(keywords={"x": 4})
    assert all(field in text for field in SPECS)


@given(st.text(st.characters(min_codepoint=65, max_codepoint=90), max_size=12))
def test_any_unknown_variable_is_refused(rest: str) -> None:
    name = PREFIX + rest
    if name in {spec.variable for spec in SPECS.values()}:
        return
    assert f"{name}='4'" in refusal(environ={name: "4"})


def says_value(said: str, spec: SettingSpec, text: str) -> bool:
    """Whether the variable and its value are named: as text, or as the number it stands for."""
    shown = [repr(text)]
    if spec.type in (float, int):
        with contextlib.suppress(ValueError):
            shown.append(repr(spec.type(text)))
    return any(f"{spec.variable}={value} " in said for value in shown)


BAD_TEXTS = [
    *((spec, text) for spec in FLOATS for text in ("", "four", "4MB", "nan", "inf", "-1", "1e300")),
    *((spec, text) for spec in BOOLEANS for text in ("", "2", "maybe")),
    *((spec, text) for spec in CHOICES for text in ("", "nothing-like-it")),
    *((spec, text) for spec in INTS for text in ("", "four", "4.5", "1e3", "nan", "-2", "9" * 30)),
    *((SPECS[field], text) for field, (_, bad) in READ.items() for text in bad),
]


@pytest.mark.parametrize(("spec", "text"), BAD_TEXTS, ids=ids)
def test_bad_text_names_variable_value_and_what_is_allowed(spec: SettingSpec, text: str) -> None:
    said = refusal(environ={spec.variable: text})
    assert says_value(said, spec, text)
    assert (READ[spec.field][1][text] if spec.field in READ else spec.allowed) in said


@pytest.mark.parametrize(("spec", "text"), BAD_TEXTS, ids=ids)
def test_bad_text_is_an_error_even_where_a_keyword_wins(spec: SettingSpec, text: str) -> None:
    said = refusal(keywords={spec.field: spec.default}, environ={spec.variable: text})
    assert says_value(said, spec, text)


def test_an_unknown_variable_is_an_error_even_where_a_keyword_wins() -> None:
    assert "COMMSCHED_CHUNCK_MB" in refusal(
        keywords={"chunk_mb": 4.0}, environ={"COMMSCHED_CHUNCK_MB": "4"}
    )


BAD_VALUES = [
    *((s, v) for s in FLOATS for v in (True, "4", None, [4.0], math.nan, math.inf, -1.0, -1)),
    *((s, v) for s in BOOLEANS for v in (1, 0, "1", None, 1.0)),
    *((s, v) for s in CHOICES for v in (None, 4, b"none", ["none"])),
    *((s, True) for s in CHOICES if s.field != "error_feedback"),
    *((s, v) for s in INTS for v in (True, False, "4", None, [4], 4.0, math.nan, -2, 2**40)),
    *((SPECS[field], v) for field in READ for v in (None, 4, b"fp16", True, ["fp16"])),
]


@pytest.mark.parametrize(("spec", "value"), BAD_VALUES, ids=ids)
def test_bad_keyword_names_field_value_and_what_is_allowed(spec: SettingSpec, value: Any) -> None:
    said = refusal(keywords={spec.field: value})
    assert f"{spec.field}={value!r}" in said
    assert spec.allowed in said


@pytest.mark.parametrize("spec", FLOATS, ids=ids)
def test_a_whole_number_beyond_any_float_is_refused_like_others(spec: SettingSpec) -> None:
    assert spec.allowed in refusal(keywords={spec.field: 10**400})


@pytest.mark.parametrize("spec", CHOICES, ids=ids)
def test_a_misspelt_choice_suggests_the_nearest(spec: SettingSpec) -> None:
    assert spec.choices is not None
    for choice in spec.choices:
        said = refusal(environ={spec.variable: choice + "x"})
        assert f"did you mean {choice!r}?" in said


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [(field, text, said) for field, (_, bad) in READ.items() for text, said in bad.items()],
)
def test_a_text_that_means_nothing_is_refused_as_a_keyword_too(
    field: str, text: str, said: str
) -> None:
    got = refusal(keywords={field: text})
    assert got.startswith(f"{field}={text!r} is not allowed: ")
    assert said in got


def test_a_misspelt_codec_lists_all_and_suggests_the_nearest() -> None:
    for name in codecs.names():
        said = refusal(environ={"COMMSCHED_CODEC": name + "x"})
        assert f"did you mean {name!r}?" in said
        assert ", ".join(codecs.names()) in said


def test_a_choice_like_no_other_suggests_nothing() -> None:
    assert "did you mean" not in refusal(environ={"COMMSCHED_CODEC": "zzzzzzzz"})


def test_the_error_is_caught_by_existing_handlers() -> None:
    for kind in (CommSchedError, RuntimeError, ValueError):
        with pytest.raises(kind):
            resolve({"chunk_mb": "4"}, {})
    assert not issubclass(CommSchedError, ValueError)


# ---------------------------------------------------------------- the object


def test_settings_are_frozen() -> None:
    settings = resolve({}, {}).settings
    for field in SPECS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, field, getattr(settings, field))


def test_settings_pickle() -> None:
    resolved = resolve({"chunk_mb": 3.5, "codec": "bf16"}, {"COMMSCHED_ENABLED": "0"})
    copy = pickle.loads(pickle.dumps(resolved))
    assert copy == resolved
    assert copy.settings.chunk_mb == 3.5
    assert hash(copy.settings) == hash(resolved.settings)


def test_shared_settings_leave_out_those_of_one_rank() -> None:
    shared = resolve({}, {}).settings.shared()
    assert {field for field in SPECS if field not in shared} == {
        spec.field for spec in SPECS.values() if spec.per_rank
    }
    assert "log_level" not in shared
    assert "chunk_mb" in shared
    assert json.loads(json.dumps(shared)) == shared


def test_shared_settings_show_what_differs() -> None:
    base = resolve({}, {}).settings
    assert resolve({"log_level": "debug"}, {}).settings.shared() == base.shared()
    for spec in SPECS.values():
        if not spec.per_rank:
            value = next((v for v in two_values(spec) if v != spec.default), None)
            if value is not None:  # a choice of one: nothing can differ
                assert resolve({spec.field: value}, {}).settings.shared() != base.shared()
