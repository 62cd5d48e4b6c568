"""The report's page in a real browser, without a window."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from commsched import policies
from commsched.reporting.analysis import analyse
from commsched.reporting.page import page
from commsched.reporting.remedies import outlook
from commsched.settings import Settings
from commsched.tracing.file import read_all
from tests.profiles import profile_of
from tests.traces import RankFile, simulated, written

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = f"none of {', '.join(NAMES)} is installed, so the page is not looked at"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


def page_of(files: list[RankFile], folder: Path) -> str:
    analysis = analyse(read_all([written(files, folder)]))
    return page(analysis, outlook(analysis))


def run(late_s: float = 0.0) -> list[RankFile]:
    profile = profile_of("resnet50", 8)
    settings = Settings(policy="fifo")
    plan = policies.get("fifo")(profile, settings)
    files, _ = simulated(
        profile,
        plan,
        deferred=False,
        choice="fifo",
        settings=asdict(settings),
        late_s={1: late_s} if late_s else None,
    )
    return files


def seen(browser: str, html: str, folder: Path) -> tuple[str, list[str]]:
    """The page's document, as the browser has understood it, and what its console says."""
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--enable-logging=stderr", "--no-first-run", f"--user-data-dir={folder / 'browser'}"]
    command = [browser, *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_console_is_heard(browser: str, tmp_path: Path) -> None:
    """Else the silence of the other tests would mean nothing."""
    _, console = seen(browser, "<script>console.error('broken')</script>", tmp_path)
    assert len(console) == 1


def test_in_a_browser(browser: str, tmp_path: Path) -> None:
    dom, console = seen(browser, page_of(run(late_s=0.15), tmp_path), tmp_path)
    assert console == []
    (headline,) = re.findall(r'<h1 id="headline">(.*?)</h1>', dom)
    assert headline.startswith("You lose ")
    for part in ("why", "do", "timeline", "layers", "alternatives", "ranks", "buckets"):
        assert f'<section id="{part}">' in dom
    picture = dom[dom.index("<svg") : dom.index("</svg>")]
    steps = 2  # one of each rank
    tasks = len(policies.get("fifo")(profile_of("resnet50", 8), Settings()).tasks)
    assert picture.count('<rect class="comm"') == steps * tasks
    assert picture.count('<rect class="wait"') == steps
    assert picture.count("<title>comm, task ") == steps * tasks
    for kind in ("forward", "backward", "queued", "ready"):
        assert f'<rect class="{kind}"' in picture
        assert f'<i class="{kind}">' in dom
    assert '<tr class="late"><td>1</td>' in dom
    assert "hand the optimizer over" in dom
    assert "lossy" in dom


def test_boxes_lie_within_the_picture(tmp_path: Path) -> None:
    html = page_of(run(), tmp_path)
    (box,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', html)
    width, height = map(float, box)
    numbers = r'<rect class="\w+" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"'
    found = re.findall(numbers, html)
    assert len(found) > 50
    for x, y, wide, tall in (map(float, row) for row in found):
        assert x + wide <= width + 1
        assert y + tall <= height + 1


def test_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    html = page_of(run(), tmp_path)
    assert "<script" not in html
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "url(" not in html
    assert "http" not in html


def test_names_are_escaped(tmp_path: Path) -> None:
    file = RankFile(0, 1)
    for number in range(3):
        file.step(number, 1 + number, 2 + number, choice="<b>bold</b>")
        args = {"step": number, "bucket": None, "params": "<script>alert(1)</script>"}
        file.span("wait", "training", 1 + number, 1.5 + number, **args)
    html = page_of([file], tmp_path)
    assert "<b>" not in html.replace("<b>1000 ms", "").replace("<b>500 ms", "").replace(
        "<b>-", ""
    ).replace("<b>0 %", "")
    assert "<script" not in html
    assert "&lt;script&gt;" in html
