"""The documentation: the site builds, what it names exists, and every error is explained."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from commsched.cli import COMMANDS, settings_markdown
from commsched.settings import specs

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
BEGIN, END = "<!-- settings:begin -->", "<!-- settings:end -->"


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def nav_pages() -> list[str]:
    """By the text, not by a YAML parser, which comes with mkdocs only."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ +- [^:]+: (\S+\.md)$", nav, re.MULTILINE)


# ---------------------------------------------------------------- the site


class _Loads(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = dict(attrs)
        if tag == "link" and said.get("rel") in ("canonical", "prev", "next"):
            return
        names = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
        value = said.get(names.get(tag, ""))
        if value:
            self.found.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # advertises; not about our pages
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = nav_pages()
    assert len(pages) == len(set(pages)) >= 11
    for page in pages:
        built = (site / page).with_suffix(".html")
        assert built.stat().st_size > 5000, page


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found, page.name
        assert [one for one in loads.found if re.match(r"(https?:)?//", one)] == [], page.name


def test_pages_are_short() -> None:
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").count("\n")
        assert lines < 200 or page.name in ("troubleshooting.md", "README.md"), page.name


# ---------------------------------------------------------------- what the pages name exists


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_is_a_setting(page: Path) -> None:
    known = {spec.variable for spec in specs()}
    named = set(re.findall(r"\bCOMMSCHED_[A-Z0-9_]*[A-Z0-9]", page.read_text(encoding="utf-8")))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # In code only: prose says "commsched is ..." of itself.
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    called = r"(?:^|-m )commsched ([a-z][a-z_]*)\b"
    named = {name for line in lines for name in re.findall(called, line.strip())}
    files = {path.stem for path in (ROOT / "commsched" / "commands").glob("[a-z]*.py")}
    assert named <= {*COMMANDS, *files}


def test_every_command_is_described() -> None:
    text = text_of("observability.md")
    assert [name for name in COMMANDS if f"commsched {name}" not in text] == []


def test_the_settings_page_holds_the_generated_table() -> None:
    text = text_of("settings.md")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
    assert table == settings_markdown(), "run `commsched env --markdown` and paste it"


def test_every_module_of_the_architecture_exists() -> None:
    package = ROOT / "commsched"
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text_of("architecture.md")):
        assert any((folder / name).exists() for folder in (package, ROOT)), name


def test_every_module_has_its_room() -> None:
    rooms = text_of("architecture.md").partition("## The rooms")[2].partition("\n## ")[0]
    files = {path.name for path in (ROOT / "commsched").glob("*.py")}
    files -= {"__init__.py", "__main__.py", "version.py"}
    assert sorted(name for name in files if f"`{name}`" not in rooms) == []


def test_python_in_the_pages_is_python() -> None:
    for page in PAGES:
        for source in re.findall(
            r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        ):
            compile(source, page.name, "exec")


# ---------------------------------------------------------------- every error is explained

HOLE = "…"
CALLS = {"CollectiveError", "ClickException", "UsageError", "BadParameter", "ValueError"}
SAYS = {"warning", "error", "_say", "refuse"}  # of loggers and the like
NOT_FOR_USERS = {"demo.py", "chargpt.py"}  # the demo is its own program


@dataclass(frozen=True)
class Message:
    """What a program may be told; the parts that are not constant are holes."""

    where: str
    text: str


def _is_error(node: ast.ClassDef, known: set[str]) -> bool:
    return any(_name(base) in known for base in node.bases)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class _Texts:
    """The texts an expression may be, as far as the module's source tells."""

    def __init__(self, tree: ast.Module) -> None:
        self._values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._values.setdefault(_name(target), []).append(node.value)

    def of(self, node: ast.expr, depth: int = 3) -> list[str]:
        if isinstance(node, ast.Constant):
            return (
                [re.sub(r"%[\d.]*[a-z]", HOLE, node.value)] if isinstance(node.value, str) else []
            )
        if isinstance(node, ast.JoinedStr):
            parts = [n.value if isinstance(n, ast.Constant) else HOLE for n in node.values]
            return ["".join(map(str, parts))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.of(node.left, depth), self.of(node.right, depth)
            return [(left or [HOLE])[0] + (right or [HOLE])[0]]
        if isinstance(node, ast.IfExp):
            return [*self.of(node.body, depth), *self.of(node.orelse, depth)]
        if isinstance(node, ast.Call) and _name(node.func) == "format":
            assert isinstance(node.func, ast.Attribute)
            return [re.sub(r"\{[^{}]*\}", HOLE, text) for text in self.of(node.func.value, depth)]
        values = self._values.get(_name(node), []) if depth and _name(node) else []
        return [text for value in values for text in self.of(value, depth - 1)]


@cache
def messages() -> tuple[Message, ...]:
    """Every text of an error or a warning in the package."""
    paths = [p for p in sorted((ROOT / "commsched").rglob("*.py")) if p.name not in NOT_FOR_USERS]
    paths += sorted((ROOT / "hooks").glob("*.py"))
    trees = {path.relative_to(ROOT): ast.parse(path.read_text("utf-8")) for path in paths}
    errors = {"CommSchedError", "SettingsError", *CALLS}
    for tree in trees.values():
        errors |= {
            n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and _is_error(n, errors)
        }
    found = {}
    for path, tree in trees.items():
        texts = _Texts(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or _name(node.func) not in errors | SAYS:
                continue
            for text in (text for arg in node.args for text in texts.of(arg)):
                if len(re.findall(r"[a-z]{2,}", text)) >= 3:  # else it has no words of its own
                    found[text] = Message(f"{path}:{node.lineno}", " ".join(text.split()))
    return tuple(found.values())


@cache
def entries() -> tuple[str, ...]:
    """The phrases with which entries of the page begin: ``- `phrase`, `phrase`: why; remedy``."""
    heads = re.findall(r"^- ((?:`[^`]+`(?:,\s+)?)+):", text_of("troubleshooting.md"), re.MULTILINE)
    return tuple(
        " ".join(phrase.split()) for head in heads for phrase in re.findall(r"`([^`]+)`", head)
    )


def explains(entry: str, message: Message) -> bool:
    """Whether it is in the text; one that begins with a hole must be the text's beginning."""
    return message.text.startswith(entry) if entry.startswith(HOLE) else entry in message.text


def test_messages_are_found() -> None:
    """Else the tests below would say nothing."""
    texts = [message.text for message in messages()]
    assert len(texts) > 70
    for known in ("does not work with error_feedback", "is closed; wrap the model", "numba cannot"):
        assert any(known in text for text in texts), known


def test_every_message_is_explained() -> None:
    missing = [m for m in messages() if not any(explains(entry, m) for entry in entries())]
    listed = "\n".join(f"{message.where}: {message.text}" for message in missing)
    assert not missing, f"docs/troubleshooting.md needs an entry, with what to do, for\n{listed}"


def test_every_explanation_is_of_a_message() -> None:
    stale = [entry for entry in entries() if not any(explains(entry, m) for m in messages())]
    assert stale == [], "no message of the package says that (any more)"


def test_explanations_are_distinctive() -> None:
    assert [e for e in entries() if len(re.findall(r"\w{2,}", e)) < 3] == []
    assert len(entries()) == len(set(entries()))
