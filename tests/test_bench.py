"""The bench and the demo run, clean up, and say what they promise. No speeds are asserted."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from commsched.demo import ONE_LINE

VIEW = "gradient_as_bucket_view"
ROOT = Path(__file__).resolve().parents[1]
# bench is not installed. At the end: the repository's `cuda` must not shadow an installed one.
sys.path.append(str(ROOT))

from bench.contestant import Contestant  # noqa: E402
from bench.figures import RankConfig, Round  # noqa: E402
from bench.hooks import HookSpec  # noqa: E402
from bench.step_report import Case, Row, print_case, rows_of  # noqa: E402
from bench.workloads import emulated, make  # noqa: E402
from bench.workloads.shapes import ARCHITECTURES  # noqa: E402

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
    buckets = f"ddp:bucket_cap_mb=0.05,{VIEW}=true"
    ours = "commsched:policy=fifo"  # the automatic mode takes more steps to warm up
    exact = ["ddp", buckets, ours, "commsched:optimizer=true,policy=priority"]
    hooks = ["noop", *exact, "bf16", "commsched:policy=fifo,codec=bf16", "commsched:nonsense=1"]
    done = run(
        *["bench/step_time.py", "--workload", "digits", "--loopback", "--rounds", "2"],
        *["--steps", "2", "--warmup", "12", "--json", str(out), "--hooks", *hooks],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    rows = {row["hook"]: row for row in case["rows"]}
    assert list(rows) == hooks
    for hook in ("noop", *exact, "commsched:policy=fifo,codec=bf16"):
        assert rows[hook]["status"] == "ok"
        assert rows[hook]["step_ms"] > rows[hook]["tail_ms"] >= 0
        assert rows[hook]["steady_ms"] > 0
    assert buckets in done.stdout
    assert rows["bf16"]["status"].startswith("refused")  # torch's, on a CPU build
    assert "nearest known" in rows["commsched:nonsense=1"]["status"]
    assert rows[ours]["reported_exposed_ms"] > 0
    assert len({rows[hook]["loss"] for hook in exact}) == 1
    sent = [rows[hook]["sent_mb"] for hook in ("noop", "commsched:policy=fifo,codec=bf16", ours)]
    assert sent == sorted(sent)


@pytest.mark.parametrize(
    ("text", "settings", "ddp"),
    [
        ("ddp", {}, {}),
        ("ddp:bucket_cap_mb=8", {}, {"bucket_cap_mb": 8}),
        ("noop:static_graph=true", {}, {"static_graph": True}),
        ("commsched:codec=bf16,bucket_cap_mb=0.5", {"codec": "bf16"}, {"bucket_cap_mb": 0.5}),
        ("commsched:optimizer=true", {"optimizer": True}, {VIEW: True}),
        (f"commsched:optimizer=true,{VIEW}=false", {"optimizer": True}, {VIEW: False}),
    ],
)
def test_a_hook_has_settings_and_ddp_has_some(
    text: str, settings: dict[str, object], ddp: dict[str, object]
) -> None:
    spec = HookSpec.parse(text)
    assert (spec.text, spec.name) == (text, text.partition(":")[0])
    assert (spec.settings, spec.ddp) == (settings, ddp)
    tries = spec.name == "commsched" and settings.get("policy", "auto") == "auto"
    measures = settings.get("optimizer") or "codec" in settings  # and prices, before it plans
    assert spec.warmup(4) == (60 if tries else 12 if measures else 4)
    assert spec.warmup(70) == 70


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("horovod", "unknown hook"),
        ("ddp:codec=bf16", "bucket_cap_mb"),
        ("commsched:codec", "key=value"),
        ("commsched:optimizer=adam", "optimizer must be true or false"),
        ("noop:gradient_as_bucket_view=1", "must be true or false"),
        ("ddp:bucket_cap_mb=true", "bucket_cap_mb must be a number"),
        ("ddp:bucket_cap_mb=", "bucket_cap_mb must be a number"),
    ],
)
def test_a_wrong_hook_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        HookSpec.parse(text)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank: this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def contestant(text: str) -> Contestant:
    rest = {"bucket_cap_mb": 100.0, VIEW: False, "timeout_s": 60.0}
    config = RankConfig("digits", [], 1, 1, 3, None, 0.0, 0.0, **rest)
    return Contestant(HookSpec.parse(text), make("digits", 0), config)


def test_ddp_gets_the_arguments_of_its_hook(alone: None) -> None:
    def made(text: str) -> tuple[bool, bool, int]:
        ddp = contestant(text).ddp
        sizes = ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", "").split(",")
        return ddp.gradient_as_bucket_view, ddp.find_unused_parameters, len(sizes)

    assert made("noop") == (False, False, 1)
    is_view, _, buckets = made("noop:bucket_cap_mb=0.05,gradient_as_bucket_view=true")
    assert (is_view, buckets > 1) == (True, True)
    assert made("noop:find_unused_parameters=true")[1]


def test_what_a_round_leaves_under_way_is_waited_for_in_it(alone: None) -> None:
    one = contestant("noop")
    one._state = SimpleNamespace(synchronize=lambda: time.sleep(0.02))
    assert one.run(2).tail_s >= 0.01


def test_a_steady_step_is_without_the_first_and_the_tail() -> None:
    deferred = Round(start_s=10.0, ends_s=(11.0, 13.0, 15.0, 18.0), done_s=18.8)
    assert deferred.step_s == pytest.approx(8.8 / 4)
    assert deferred.steady_s == pytest.approx(2.0)
    assert deferred.tail_s == pytest.approx(0.2)
    assert Round(0.0, (1.0,), 1.5).steady_s is None
    even = Round(0.0, (1.0, 2.0, 3.0), 3.0)
    assert even.step_s == even.steady_s


def test_the_table_has_steady_steps_and_predictions() -> None:
    mode = "commsched:optimizer=true,bucket_cap_mb=8"
    report = {"exposed_ms": 1.5, "predicted_ms": 950.0, "ideal_ms": None}
    figures = {
        "noop": _figures(0.8),
        "noop:gradient_as_bucket_view=true": _figures(0.78),
        "ddp": _figures(1.2),
        mode: _figures(1.0, tail_s=0.05) | {"report": report},
    }
    case = Case("resnet50", 1, None, "loopback", all_reduce_rounds_ms=[[900.0]])
    case.rows = rows_of([{"hooks": figures, "peak_mb": 0.0}], is_loopback=True, memory=False)
    case.rows.append(Row("bf16", "refused: because"))
    case.finish()
    row = {row.hook: row for row in case.rows}[mode]
    assert (row.step_ms, row.steady_ms, row.tail_ms) == pytest.approx((1000, 950, 50))
    assert (row.vs_ddp, row.exposed_ms) == pytest.approx((1 / 1.2, 220))  # like for like: views
    assert (row.predicted_ms, row.ideal_ms, row.predicted_vs_steady) == (950.0, None, 1.0)
    console = Console(width=250, file=io.StringIO(), record=True)
    print_case(console, case)
    text = console.export_text()
    for shown in (mode, "steady ms", "tail ms", "x ddp", "exposed ms", "predicted ms", "refused"):
        assert shown in text
    assert "ideal ms" not in text  # nobody has one


def _figures(step_s: float, tail_s: float = 0.0) -> dict[str, object]:
    """What a rank says of a hook with two rounds."""
    times = {"step_s": [step_s] * 2, "steady_s": [step_s - tail_s] * 2, "tail_s": [tail_s] * 2}
    rest = {"sent_bytes": [1e6], "rss_mb": 0.0, "loss": None, "report": None}
    return {"status": "ok", **times, **rest}


class _Time:
    """Time that only sleeping moves."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def test_an_emulated_forward_forgives_python_but_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Time()
    monkeypatch.setattr(emulated, "time", clock)

    def forward_s(work: emulated.Emulated, wait_s: float, is_hook: bool) -> float:
        model = work.model()
        layer = model.get_submodule("fc0")
        if is_hook:  # as a deferred optimizer step
            layer.register_forward_pre_hook(lambda *_: clock.sleep(wait_s))
        else:  # as slow Python between two layers
            early = model.get_submodule("conv1_0")
            early.register_forward_hook(lambda *_: clock.sleep(wait_s))
        began_s = clock.now_s
        model(torch.ones(1))
        return clock.now_s - began_s

    work = emulated.Emulated(ARCHITECTURES["vgg16"], 0, 0.1, forward_s=1.0, backward_s=2.0)
    assert forward_s(work, 0.0, is_hook=True) == pytest.approx(1.0)
    assert forward_s(work, 0.02, is_hook=True) == pytest.approx(1.02)
    assert forward_s(work, 0.02, is_hook=False) == pytest.approx(1.0)
    assert forward_s(work, 0.08, is_hook=False) == pytest.approx(1.03)


def test_the_microbenchmarks_run() -> None:
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench/micro.py", "--benchmark-disable"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_ends_with_equal_losses() -> None:
    done = run("-m", "commsched.demo", "--loopback", "--steps", "12", timeout_s=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loopback" in done.stdout
    assert "equal, bit for bit: yes" in done.stdout
    assert ONE_LINE in done.stdout
    for name in ("plain DDP", "commsched, optimizer", "commsched, bf16"):
        assert name in done.stdout
