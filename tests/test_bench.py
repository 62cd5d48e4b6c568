"""The bench and the demo run, clean up, and say what they promise. No speeds are asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commsched.demo import ONE_LINE

ROOT = Path(__file__).resolve().parents[1]

ECHO = """
import os, sys
sys.path.insert(0, ".")
import torch, torch.distributed as dist
from bench.links import wire_bytes
dist.init_process_group("gloo")
before = wire_bytes()
dist.all_reduce(torch.ones(250_000))
dist.barrier()  # until the other has it: the link has sent it all
print("sent", wire_bytes() - before, flush=True)
dist.destroy_process_group()
"""


def run(*argv: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def links(*argv: str) -> list[str]:
    return ["bench/links.py", "--ranks", "2", *argv]


def namespaces() -> set[str]:
    """The network namespaces that any process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:  # it has ended
            continue
    return found


def why() -> str | None:
    """What is missing for shaped links; None on a machine like CI's."""
    code = "from bench.links import why_unavailable; print(why_unavailable() or '')"
    return run("-c", code).stdout.strip() or None


WHY = why()
needs_links = pytest.mark.skipif(WHY is not None, reason=f"no shaped links here: {WHY}")


@needs_links
def test_shaped_links_carry_an_all_reduce_and_leave_nothing() -> None:
    before = namespaces()
    done = run(*links("--rate-mbit", "400", "--", sys.executable, "-c", ECHO))
    assert done.returncode == 0, done.stdout + done.stderr
    sent = [int(line.split()[-1]) for line in done.stdout.splitlines() if "sent" in line]
    assert len(sent) == 2
    # Two ranks: each sends as much as it has, 1 MB, and headers.
    assert all(1_000_000 <= count < 1_150_000 for count in sent)
    assert namespaces() <= before


@needs_links
def test_a_failing_rank_ends_the_run_with_its_exit_code() -> None:
    before = namespaces()
    code = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '1' else 60); sys.exit(7)"
    began = time.monotonic()
    done = run(*links("--rate-mbit", "400", "--", sys.executable, "-c", code))
    assert done.returncode == 7
    assert time.monotonic() - began < 30
    assert namespaces() <= before


@needs_links
def test_an_interrupted_run_leaves_nothing() -> None:
    before = namespaces()
    argv = links("--rate-mbit", "400", "--", sys.executable, "-c", "import time; time.sleep(60)")
    child = subprocess.Popen([sys.executable, *argv], cwd=ROOT)
    deadline = time.monotonic() + 20
    while len(namespaces() - before) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(namespaces() - before) >= 2
    child.send_signal(signal.SIGINT)
    assert child.wait(20) != 0
    while namespaces() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert namespaces() <= before


def test_step_time_reports_every_hook(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    hooks = ["noop", "ddp", "bf16", "commsched", "commsched:codec=bf16", "commsched:nonsense=1"]
    done = run(
        *["bench/step_time.py", "--workload", "digits", "--loopback", "--rounds", "2"],
        *["--steps", "2", "--warmup", "3", "--json", str(out), "--hooks", *hooks],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    rows = {row["hook"]: row for row in case["rows"]}
    assert list(rows) == hooks
    for hook in ("noop", "ddp", "commsched", "commsched:codec=bf16"):
        assert rows[hook]["status"] == "ok"
        assert rows[hook]["step_ms"] > 0
    assert rows["bf16"]["status"].startswith("refused")  # torch's, on a CPU build
    assert "nearest known" in rows["commsched:nonsense=1"]["status"]
    assert rows["commsched"]["reported_exposed_ms"] > 0
    assert rows["commsched"]["loss"] == rows["ddp"]["loss"]
    sent = [rows[hook]["sent_mb"] for hook in ("noop", "commsched:codec=bf16", "commsched")]
    assert sent == sorted(sent)


def test_the_demo_ends_with_equal_losses() -> None:
    done = run("-m", "commsched.demo", "--loopback", "--steps", "12", timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loopback" in done.stdout
    assert "equal, bit for bit: yes" in done.stdout
    assert ONE_LINE in done.stdout
    for name in ("plain DDP", "commsched exact", "commsched bf16"):
        assert name in done.stdout
