"""The command line: what `commsched env` prints, and how commands are found."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commsched import __version__
from commsched.cli import main, settings_markdown
from commsched.settings import resolve, specs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in specs():
        monkeypatch.delenv(spec.variable, raising=False)


def commsched(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(main, args, env=environ)


def rows(output: str) -> dict[str, list[str]]:
    """The printed table: first column -> the other columns."""
    cells = [re.split(r"\s*[│┃|]\s*", line.strip())[1:-1] for line in output.splitlines()]
    return {row[0]: row[1:] for row in cells if row and row[0].startswith("COMMSCHED_")}


def test_env_shows_every_setting_on_one_line() -> None:
    result = commsched("env")
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert list(table) == [spec.variable for spec in specs()]
    for spec in specs():
        value, origin, *words = table[spec.variable]
        assert spec.parse(value) == spec.default
        assert origin == "default"
        assert words == [*spec.allowed.split(" | "), spec.doc]  # `rows` splits at ASCII bars too


def test_env_shows_effective_values_and_their_origin() -> None:
    result = commsched("env", COMMSCHED_CHUNK_MB="2.5", COMMSCHED_ENABLED="no")
    table = rows(result.stdout)
    assert table["COMMSCHED_CHUNK_MB"][:2] == ["2.5", "environment"]
    assert table["COMMSCHED_ENABLED"][:2] == ["0", "environment"]
    assert table["COMMSCHED_CREDIT_MB"][1] == "default"


@pytest.mark.parametrize("text", ["604799.75", "0.123456789", "3", "1e-1"])
def test_the_value_shown_is_the_effective_one(text: str) -> None:
    shown = rows(commsched("env", COMMSCHED_TIMEOUT_S=text).stdout)["COMMSCHED_TIMEOUT_S"][0]
    assert float(shown) == resolve({}, {"COMMSCHED_TIMEOUT_S": text}).settings.timeout_s


@pytest.mark.parametrize(
    ("name", "text"),
    [("COMMSCHED_CHUNK_MB", "four"), ("COMMSCHED_CHUNCK_MB", "4"), ("COMMSCHED_CODEC", "bf61")],
)
def test_a_bad_environment_is_an_error_that_says_why(name: str, text: str) -> None:
    result = commsched("env", **{name: text})
    assert result.exit_code != 0
    assert f"{name}='{text}'" in result.stderr
    assert "Traceback" not in result.output
    assert rows(result.stdout) == {}


def test_markdown_has_a_row_for_each_setting() -> None:
    result = commsched("env", "--markdown")
    assert result.exit_code == 0
    assert result.stdout == settings_markdown() + "\n"
    head, rule, *body = settings_markdown().splitlines()
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *body)]
    assert set(columns) == {5}  # a bar inside a cell is escaped
    assert len(body) == len(specs())
    for spec, line in zip(specs(), body, strict=True):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert cells[0] == f"`{spec.variable}`"
        assert spec.parse(cells[1]) == spec.default
        assert cells[2].replace("\\|", "|") == spec.allowed
        assert cells[3] == spec.doc


def test_markdown_does_not_depend_on_the_environment() -> None:
    assert commsched("env", "--markdown", COMMSCHED_CHUNK_MB="9").stdout == (
        settings_markdown() + "\n"
    )


def test_version_and_help() -> None:
    assert __version__ in commsched("--version").stdout
    assert "env" in commsched("--help").stdout


def test_an_unknown_command_is_an_error() -> None:
    result = commsched("evn")
    assert result.exit_code != 0
    assert "evn" in result.stderr


def test_python_m_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["commsched", "env", "--markdown"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("commsched", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == settings_markdown() + "\n"
