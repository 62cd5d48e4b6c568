"""Packaging: every package is listed, `cuda` steps aside, the public names are there."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import commsched

ROOT = Path(__file__).resolve().parent.parent
# Sub-modules of NVIDIA's namespace package `cuda`: files of ours by these names would hide them
# from whoever has the repository root on sys.path.
NVIDIAS = {"bindings", "core", "pathfinder", "tile", "cccl", "compute"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture
def fresh_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The repository root first on sys.path, an NVIDIA-like `cuda` after it, neither imported."""
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if is_cuda(name)}
    other = tmp_path / "site"
    (other / "cuda" / "notreal").mkdir(parents=True)  # no cuda/__init__.py: a namespace package
    (other / "cuda" / "notreal" / "__init__.py").write_text("here = True\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(ROOT), str(other), *sys.path])
    importlib.invalidate_caches()
    yield other
    for name in [name for name in sys.modules if is_cuda(name)]:
        del sys.modules[name]
    sys.modules.update(held)
    monkeypatch.undo()
    importlib.invalidate_caches()


def is_cuda(name: str) -> bool:
    return name == "cuda" or name.startswith("cuda.")


def package_dirs() -> dict[str, Path]:
    """Every directory with an __init__.py under the three tops: package name -> directory."""
    found = {}
    for name, top in (
        ("commsched", ROOT / "commsched"),
        ("commsched.cuda", ROOT / "cuda"),
        ("commsched.hooks", ROOT / "hooks"),
    ):
        for init in top.rglob("__init__.py"):
            parts = init.parent.relative_to(top).parts
            if not (top.name == "commsched" and parts[:1] in {("cuda",), ("hooks",)}):
                found[".".join((name, *parts))] = init.parent
    return found


# ---------------------------------------------------------------- pyproject.toml


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(package_dirs())
    assert {"commsched", "commsched.cuda", "commsched.hooks"} <= set(listed)


def test_every_package_comes_from_its_directory(project: dict[str, Any]) -> None:
    assert {
        name: ROOT / path for name, path in project["tool"]["setuptools"]["package-dir"].items()
    } == package_dirs()


def test_every_directory_of_modules_is_a_package() -> None:
    for top in ("commsched", "cuda", "hooks"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def data_files() -> set[Path]:
    """What is in the packages and is no Python."""
    found = set()
    for package in package_dirs().values():
        for path in package.rglob("*"):
            top = path.parent
            while not (top / "__init__.py").exists():
                top = top.parent
            if path.is_file() and top == package and path.suffix not in (".py", ".pyc", ".pyo"):
                found.add(path)
    # numba's, next to the kernels.
    return {path for path in found if "__pycache__" not in path.parts}


def test_all_data_files_are_packaged(project: dict[str, Any]) -> None:
    data = project["tool"]["setuptools"]["package-data"]
    packaged = {
        path
        for package, patterns in data.items()
        for pattern in patterns
        for path in package_dirs()[package].glob(pattern)
    }
    assert ROOT / "commsched" / "py.typed" in packaged
    assert data_files() == packaged


def test_the_version_is_the_packages(project: dict[str, Any]) -> None:
    assert project["project"]["dynamic"] == ["version"]
    module, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == commsched.__version__
    assert len(commsched.__version__.split(".")) == 3


def test_an_installed_version_is_this_one() -> None:
    assert importlib.metadata.version("commsched") == commsched.__version__


def test_the_command_exists(project: dict[str, Any]) -> None:
    module, _, name = project["project"]["scripts"]["commsched"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_core_depends_on_nothing_of_cuda(project: dict[str, Any]) -> None:
    needed = " ".join(project["project"]["dependencies"]).lower()
    assert "torch" in needed
    assert "cuda" not in needed
    assert "nvidia" not in needed


def imports_of(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when the module is imported; those for types do not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (one for branch in node.orelse for one in imports_of(branch))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports_of(node)


def imported(always: bool) -> set[str]:
    """The packages, not ours nor Python's, that ours import: wherever in them, or `always`."""
    found: set[str] = set()
    for path in package_dirs().values():
        for file in path.glob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in imports_of(tree) if always else ast.walk(tree):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"commsched"}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=~! ;\[]", line)[0].replace("-", "_") for line in requirements}


BY_NAME = {"numba", "prometheus_client"}  # import_module


def test_what_is_imported_is_a_dependency(project: dict[str, Any]) -> None:
    needed = names_of(project["project"]["dependencies"])
    ours = imported(always=False) | BY_NAME
    extras = project["project"]["optional-dependencies"]
    optional = names_of([*extras["plots"], *extras["metrics"]])
    assert imported(always=True) <= needed, "missing in pyproject.toml, or import it where used"
    assert ours <= needed | optional, "missing in pyproject.toml"
    assert needed | optional <= ours, "not needed"


def test_the_versions_of_all_that_ci_installs_are_pinned(project: dict[str, Any]) -> None:
    asked = list(project["project"]["dependencies"])
    for extra, requirements in project["project"]["optional-dependencies"].items():
        if not extra.startswith("cuda"):
            asked += requirements
    pinned = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"
    ]
    assert all("==" in line for line in pinned)
    assert names_of(pinned) == names_of(asked) - {"commsched"}


LAZY = """
import sys
import commsched, commsched.cli
assert "numba" not in sys.modules, "by import"
commsched.State()
commsched.State(codec="fp16")
assert "numba" not in sys.modules, "by State"
"""


def test_numba_is_not_imported_where_no_codec_wants_it() -> None:
    """It takes most of a second."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COMMSCHED_")}
    command = [sys.executable, "-c", LAZY]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- cuda/ and hooks/


def test_cuda_steps_aside_for_nvidias(fresh_cuda: Path) -> None:
    ours = importlib.import_module("cuda")
    assert Path(ours.__file__).resolve() == ROOT / "cuda" / "__init__.py"
    assert str(fresh_cuda / "cuda") in ours.__path__
    assert importlib.import_module("cuda.notreal").here is True


def test_commsched_cuda_does_not_take_in_nvidias(fresh_cuda: Path) -> None:
    package = importlib.import_module("commsched.cuda")
    assert {Path(path).resolve() for path in package.__path__} == {ROOT / "cuda"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("commsched.cuda.notreal")


def test_no_file_of_cuda_hides_one_of_nvidias() -> None:
    assert {path.stem for path in (ROOT / "cuda").iterdir()} & NVIDIAS == set()


@pytest.mark.parametrize("name", ["cuda", "hooks"])
def test_the_top_level_folders_are_sub_packages(name: str) -> None:
    package = importlib.import_module(f"commsched.{name}")
    assert package.__name__ == f"commsched.{name}"
    assert package.__doc__
    link = ROOT / "commsched" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_nothing_imports_hooks_as_a_top_level_module() -> None:
    """It would be a second copy of commsched.hooks, with a second hook."""
    file = getattr(sys.modules.get("hooks"), "__file__", None)
    assert file is None or not Path(file).resolve().is_relative_to(ROOT)


# ---------------------------------------------------------------- public names


def test_the_public_names() -> None:
    names = {"State", "Stateful", "hook", "attach", "CommSchedError", "SettingsError"}
    assert names | {"__version__"} <= set(commsched.__all__)
    for name in commsched.__all__:
        assert getattr(commsched, name) is not None


def modules() -> list[str]:
    names = []
    for package, path in package_dirs().items():
        names.append(package)
        names += [f"{package}.{file.stem}" for file in path.glob("*.py") if "__" not in file.stem]
    return sorted(names)


@pytest.mark.parametrize("name", modules())
def test_modules_say_what_they_are_and_offer(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), public


@pytest.mark.parametrize("name", [n for n in commsched.__all__ if not n.startswith("__")])
def test_public_names_are_documented(name: str) -> None:
    assert getattr(commsched, name).__doc__
