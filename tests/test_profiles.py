"""Shipped profiles are the true models with DDP's buckets; files and traces are read or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from commsched import profiles
from commsched.cli import main
from commsched.errors import CommSchedError
from commsched.profile import Link, Profile
from tests.profiles import profile_of

from bench import make_profiles  # isort: skip  (tests.profiles makes it importable)
from bench.reproduction import PAGE, TABLES, page_with, table  # isort: skip
from bench.workloads.shapes import ARCHITECTURES  # isort: skip

NUMELS = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "bert_base": 109_482_240,
    "gpt2": 124_439_808,
}
MATRICES = {"resnet50": 54, "vgg16": 16, "bert_base": 76, "gpt2": 50}


@pytest.fixture(params=sorted(NUMELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def params_of(profile: Profile) -> dict[str, tuple[int, ...]]:
    buckets = profile.layout.buckets
    return {param.name: param.shape for bucket in buckets for param in bucket.params}


def test_all_are_there() -> None:
    assert set(profiles.names()) == set(NUMELS) == set(make_profiles.MODELS)


def test_it_has_the_models_parameters(name: str) -> None:
    shapes = params_of(profiles.load(name).profile)
    assert sum(prod(shape) for shape in shapes.values()) == NUMELS[name]
    assert sum(len(shape) > 1 for shape in shapes.values()) == MATRICES[name]
    known = ARCHITECTURES[name.removesuffix("_base")]
    assert known.true_mb() == pytest.approx(4e-6 * NUMELS[name])


def test_known_parameters_have_their_shapes() -> None:
    expected = {
        "resnet50": {
            "conv1.weight": (64, 3, 7, 7),
            "layer3.0.downsample.0.weight": (1024, 512, 1, 1),
        },
        "vgg16": {"features.28.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25088)},
        "bert_base": {"encoder.layer.11.output.dense.weight": (768, 3072)},
        "gpt2": {
            "transformer.wte.weight": (50257, 768),
            "transformer.h.0.attn.c_attn.bias": (2304,),
        },
    }
    for model, known in expected.items():
        shapes = params_of(profiles.load(model).profile)
        assert {key: shapes.get(key) for key in known} == known


def test_operations_are_those_of_the_bench(name: str) -> None:
    known = ARCHITECTURES[name.removesuffix("_base")]
    ours = sum(layer.flops for layer in make_profiles.MODELS[name].layers())
    assert ours == pytest.approx(sum(layer.flops for layer in known.layers()), rel=1e-3)


def test_buckets_are_those_of_ddp(name: str) -> None:
    buckets = profiles.load(name).profile.layout.buckets
    params = [param for bucket in buckets for param in bucket.params]
    tensors = [torch.empty(1).expand(param.numel) for param in params]
    found, _ = dist._compute_bucket_assignment_by_size(
        tensors, [2**20, 25 * 2**20], [False] * len(params), list(range(len(params)))
    )
    assert [len(bucket.params) for bucket in buckets] == [len(places) for places in found]


def test_times_fit_together(name: str) -> None:
    profile = profiles.load(name).profile
    model = make_profiles.MODELS[name]
    assert profile.compute_s == pytest.approx(model.step_s, rel=1e-4)
    assert profile.backward_s == pytest.approx(2 * profile.forward_s, abs=1e-8)
    assert list(profile.ready_s) == sorted(profile.ready_s)
    times = {param.name: param for param in profile.params}
    for spec, ready_s in zip(profile.layout.buckets, profile.ready_s, strict=True):
        assert all(times[param.name].ready_s <= ready_s for param in spec.params)
    assert max(profile.ready_s) <= profile.backward_s
    assert all(0 <= param.use_s <= profile.forward_s for param in profile.params)


def test_its_file_is_small_says_its_source_and_is_what_the_script_makes(name: str) -> None:
    path = Path(profiles.__file__).parent / f"{name}.json"
    text = path.read_text()
    assert len(text) < 100_000
    assert text == make_profiles.text_of(name)
    source = profiles.load(name).source
    assert "github.com/" in source
    assert "batch" in source
    assert f"{NUMELS[name]:,}" in source


# ---------------------------------------------------------------- files and traces


def test_a_saved_profile_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "saved.json"
    result = CliRunner().invoke(main, ["profile", "vgg16", "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "138,357,544 elements" in result.output
    assert "10 Gbit/s" in result.output
    assert profiles.load(str(out)) == profiles.load("vgg16")


def test_a_bare_profile_is_read(tmp_path: Path) -> None:
    profile = profile_of("resnet50")
    path = tmp_path / "mine.json"
    path.write_text(profile.to_json())
    loaded = profiles.load(str(path))
    assert (loaded.name, loaded.profile) == ("mine", profile)


def test_the_list_names_all_and_their_sources() -> None:
    result = CliRunner().invoke(main, ["profile", "--list"])
    assert result.exit_code == 0
    for model in NUMELS:
        assert f"{model}: " in result.output
    assert "nanoGPT/issues/110" in result.output.replace("\n", "")


def event(name: str, ph: str, args: dict[str, object], **more: object) -> str:
    base = {"name": name, "ph": ph, "pid": 0, "tid": 1, "ts": 0, "cat": "commsched", "args": args}
    return json.dumps(base | more) + ",\n"


def traced(folder: Path, *found: tuple[int, Profile], coding: bool = False) -> str:
    """A trace as rank 0 of two would write it."""
    about = {"version": "0", "rank": 0, "world_size": 2, "model": "m", "settings": {}, "host": "h"}
    lines = ["[\n", event("commsched", "M", about)]
    for step, profile in found:
        args = {"profile": profile.to_json(), "at_step": step}
        lines.append(event("commsched_profile", "M", args))
    for number in range(2 if coding else 0):
        args = {"codec": "sign", "bytes": 1000, "round": number, "step": 1, "task": number}
        lines += [event("encode", "X", args, dur=3), event("decode", "X", args, dur=1)]
    path = folder / "trace-rank0.json"
    path.write_text("".join(lines))
    return str(path)


def test_the_last_profile_of_a_trace_counts(tmp_path: Path) -> None:
    first = profile_of("resnet50")
    last = replace(first, link=Link(1e-3, 1e-9))
    path = traced(tmp_path, (9, first), (40, last))
    for source in (path, str(tmp_path)):
        loaded = profiles.load(source)
        assert loaded.profile == last
        assert "step 40" in loaded.source
        assert loaded.coding_s == {}


def test_coding_is_what_the_trace_shows(tmp_path: Path) -> None:
    path = traced(tmp_path, (9, profile_of("resnet50")), coding=True)
    assert profiles.load(path).coding_s == pytest.approx({"sign": 8e-6 / 1000})


def test_what_holds_no_profile_is_refused(tmp_path: Path) -> None:
    texts = {"a.json": "{}", "b.json": "not json", "c.json": "3", "d.json": '{"profile": 3}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(CommSchedError, match="holds no profile"):
            profiles.load(str(tmp_path / name))
    (tmp_path / "e.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CommSchedError, match="holds no profile"):
        profiles.load(str(tmp_path / "e.bin"))
    with pytest.raises(CommSchedError, match=r"resnet51 cannot be read.*resnet50"):
        profiles.load("resnet51")
    empty = tmp_path / "traces"
    empty.mkdir()
    with pytest.raises(CommSchedError, match="COMMSCHED_TRACE"):
        profiles.load(traced(empty))


def test_the_command_says_what_is_wrong() -> None:
    for args in (
        ["profile"],
        ["profile", "nothing-there"],
        ["profile", "vgg16", "-o", "/no/such/x"],
    ):
        result = CliRunner().invoke(main, args)
        assert result.exit_code != 0
        assert "Error" in result.output
        assert "Traceback" not in result.output


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("made", ["measured", "horovod"])
def test_the_page_is_not_stale(made: str) -> None:
    text = PAGE.read_text()
    assert page_with(text, made, table(made)) == text


def test_the_page_has_every_table_with_its_command() -> None:
    text = PAGE.read_text()
    for name in TABLES:
        assert f"python bench/reproduction.py --table {name}\n" in text
        assert page_with(text, name, "changed") != text
