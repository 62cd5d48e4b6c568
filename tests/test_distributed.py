"""The multi-rank harness: what it reports, and that it always comes back."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import _rank_nursery, distributed
from tests.distributed import Verdict, ranks, run_on_ranks

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 30.0  # far more than any body needs: a test that runs into it failed to end early


@dataclass(frozen=True)
class Point:
    """Its class lives in this file: pickled values may use the test file's own classes."""

    x: int


@pytest.fixture
def seven() -> int:
    return 7


def pids() -> dict[int, list[int]]:
    """The processes behind each pool, to see whether a pool was kept or replaced."""
    pools = distributed._pools.items()
    return {size: [worker.process.pid for worker in pool.workers] for size, pool in pools}


def all_reduced(rank: int, world_size: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return float(x)


@pytest.fixture
def pool_works_again() -> Iterator[None]:
    """Before: loads this file on the ranks, outside any limit. After: the next test has a pool."""
    run_on_ranks(all_reduced)
    yield
    assert [v.value for v in run_on_ranks(all_reduced)] == [1.0, 1.0]


# ---------------------------------------------------------------- the decorator


@pytest.mark.parametrize("above", [1, 2])
@ranks(2)
@pytest.mark.parametrize("below", ["a", "b"])
def test_ranks_passes_parameters_and_fixtures(
    rank: int, world_size: int, above: int, below: str, seven: int, tmp_path: Path
) -> None:
    assert world_size == dist.get_world_size() == 2
    assert rank == dist.get_rank() == int(os.environ["RANK"])
    assert above in (1, 2)
    assert below in ("a", "b")
    assert seven == 7
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@ranks(4)
def test_all_reduce_on_four_ranks(rank: int) -> None:
    x = torch.full((1000,), float(rank))
    dist.all_reduce(x)
    assert x.eq(6).all()


class TestMethod:
    @ranks(2)
    def test_runs_on_an_instance_of_its_own(self, rank: int) -> None:
        assert isinstance(self, TestMethod)
        assert rank in (0, 1)


@ranks(2)
def _skips() -> None:
    pytest.skip("a body may skip")


def test_a_skip_on_all_ranks_is_a_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="a body may skip"):
        _skips()


@ranks(2, env={"COMMSCHED_TEST": "set"})
def test_env_is_set() -> None:
    assert os.environ["COMMSCHED_TEST"] == "set"


# ---------------------------------------------------------------- values and state


def point(rank: int, world_size: int, offset: Point) -> Point:
    return Point(rank + offset.x)


def test_values_come_back_by_rank() -> None:
    verdicts = run_on_ranks(point, Point(10), world_size=4)
    assert [v.value for v in verdicts] == [Point(10), Point(11), Point(12), Point(13)]
    assert [v.status for v in verdicts] == ["ok"] * 4
    assert [v.rank for v in verdicts] == [0, 1, 2, 3]


def spoil_state(rank: int, world_size: int) -> None:
    os.environ["COMMSCHED_LEAK"] = "1"
    os.environ.pop("HOME", None)
    os.chdir("/")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.rand(1)
    dist.new_group([0, 1])


def state(rank: int, world_size: int) -> tuple[object, ...]:
    return (
        dict(os.environ),
        os.getcwd(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.rand(1).item(),
        len(dist.distributed_c10d._world.pg_map),
    )


def test_state_is_restored_and_the_pool_kept() -> None:
    before = [v.value for v in run_on_ranks(state)]
    workers = pids()
    assert all(v.status == "ok" for v in run_on_ranks(spoil_state))
    assert [v.value for v in run_on_ranks(state)] == before
    assert before[0][2:5] == (True, 1, torch.float32)
    assert pids() == workers


@pytest.mark.parametrize("fn", [lambda *_: None, threading.Event().wait])
def test_only_module_level_functions(fn: object) -> None:
    with pytest.raises(TypeError, match="must be a module-level function"):
        run_on_ranks(fn)  # type: ignore[arg-type]


def test_arguments_must_be_picklable() -> None:
    with pytest.raises(TypeError, match="arguments of point cannot be sent"):
        run_on_ranks(point, threading.Lock())


def lock(rank: int, world_size: int) -> object:
    return threading.Lock()


def test_a_value_that_cannot_be_pickled_is_a_raise() -> None:
    assert [v.error_type for v in run_on_ranks(lock)] == ["TypeError"] * 2


# ---------------------------------------------------------------- failures


def raise_on_all(rank: int, world_size: int) -> None:
    raise ValueError(f"boom {rank}")


def test_a_raise_on_all_ranks_keeps_the_pool() -> None:
    run_on_ranks(all_reduced)
    workers = pids()
    verdicts = run_on_ranks(raise_on_all)
    assert [v.error_text for v in verdicts] == ["boom 0", "boom 1"]
    run_on_ranks(all_reduced)
    assert pids() == workers


@ranks(2, timeout_s=LIMIT_S, grace_s=0.3)
def _raises_on_rank_1(rank: int) -> None:
    dist.barrier()
    expected = 0
    assert rank == expected
    dist.barrier()


def test_a_rank_blocked_by_its_peers_raise_costs_the_grace_only(pool_works_again: None) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        _raises_on_rank_1()
    assert time.monotonic() - started < LIMIT_S / 2
    text = str(caught.value)
    assert "_raises_on_rank_1: 2 of 2 ranks failed" in text
    hung, raised = text.split("rank 1: raised AssertionError: assert 1 == 0")
    assert "rank 0: hung: no result 0.3 s after rank 1 failed" in hung
    assert "in barrier" in hung
    assert "in _raises_on_rank_1" in hung
    assert "test_distributed.py" in raised
    assert "_rank_worker.py" not in raised


def hang(rank: int, world_size: int) -> None:
    print("before the hang")
    if rank == 0:
        threading.Event().wait()
    time.sleep(1000)


def test_a_hang_is_reported_with_all_stacks(pool_works_again: None) -> None:
    for verdict in run_on_ranks(hang, timeout_s=0.3):
        assert (verdict.status, verdict.error_text) == ("hung", "no result within 0.3 s")
        assert "in hang" in verdict.traceback
        assert "before the hang" not in verdict.traceback
        assert verdict.stderr == "before the hang\n"


def die(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(7)
    return ctypes.string_at(0)[0]  # SIGSEGV


def test_deaths_are_reported(pool_works_again: None) -> None:
    exited, crashed = run_on_ranks(die)
    assert (exited.status, exited.exit_code, exited.signal) == ("exit", 7, None)
    assert (crashed.status, crashed.exit_code, crashed.signal) == ("signal", None, "SIGSEGV")
    assert "in die" in crashed.stderr  # faulthandler


# ---------------------------------------------------------------- hygiene

_release = threading.Event()


def leave_threads(rank: int, world_size: int, *threads: tuple[str, bool]) -> None:
    name, daemon = threads[rank]
    threading.Thread(target=_release.wait, name=name, daemon=daemon).start()


def test_leaked_threads_fail_the_body(pool_works_again: None) -> None:
    verdicts = run_on_ranks(leave_threads, ("commsched-x", True), ("other", False))
    assert [v.error_type for v in verdicts] == ["ThreadLeakError"] * 2
    assert "commsched-x" in verdicts[0].error_text
    assert "other" in verdicts[1].error_text


def test_threads_that_may_be_left() -> None:
    threads = ("other", True), ("other", True)
    verdicts = run_on_ranks(leave_threads, *threads)
    assert [v.status for v in verdicts] == ["ok", "ok"]
    threads = ("commsched-x", True), ("commsched-y", True)
    verdicts = run_on_ranks(leave_threads, *threads, check_threads=False)
    assert [v.status for v in verdicts] == ["ok", "ok"]


def unmatched_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(7), async_op=True)


def uneven_groups(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.distributed_c10d._world.group_count += 1


@pytest.mark.parametrize("body", [unmatched_collective, uneven_groups])
def test_a_spoilt_default_group_fails_the_body_that_spoilt_it(
    monkeypatch: pytest.MonkeyPatch, pool_works_again: None, body: object
) -> None:
    monkeypatch.setattr("tests._rank_pool.PING_TIMEOUT_S", 1.0)
    for verdict in run_on_ranks(body):  # type: ignore[arg-type]
        assert verdict.error_type == "GroupUnusableError", str(verdict)


# ---------------------------------------------------------------- fresh processes


def end_in_own_way(rank: int, world_size: int) -> tuple[int, float]:
    print("to stderr", file=sys.stderr)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1000)  # until interrupted
    if rank == 2:
        raise ValueError("boom")
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid(), float(os.environ["COMMSCHED_TEST"])


def test_fresh_processes_end_as_scripts_do() -> None:
    workers = pids()
    verdicts = run_on_ranks(end_in_own_way, world_size=4, fresh=True, env={"COMMSCHED_TEST": "1.5"})
    clean, interrupted, raised, killed = verdicts
    assert (clean.status, clean.exit_code) == ("ok", 0)
    assert clean.value[1] == 1.5
    assert "to stderr" in clean.stderr
    assert clean.value[0] not in [pid for pool in workers.values() for pid in pool]
    assert (interrupted.status, interrupted.signal) == ("signal", "SIGINT")
    assert interrupted.error_type == "KeyboardInterrupt"
    assert "KeyboardInterrupt" in interrupted.stderr
    assert (raised.status, raised.exit_code, raised.error_text) == ("raised", 1, "boom")
    assert "ValueError: boom" in raised.stderr
    assert (killed.status, killed.signal) == ("signal", "SIGKILL")
    assert pids() == workers


def linger(rank: int, world_size: int) -> None:
    threading.Thread(target=_release.wait, name="lingering").start()


def test_a_fresh_process_that_does_not_exit_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests._rank_pool.EXIT_TIMEOUT_S", 0.3)
    (verdict,) = run_on_ranks(linger, world_size=1, fresh=True, check_threads=False)
    assert verdict.status == "hung"
    assert verdict.error_text == "the body returned, but the process was still there 0.3 s later"
    assert "threading.py" in verdict.traceback


# ---------------------------------------------------------------- where ranks come from


def hashed(rank: int, world_size: int) -> int:
    return hash("a string")


def test_neighbouring_ranks_hash_differently() -> None:
    """As processes do: what depends on the order of a set must not be equal by accident."""
    values = [verdict.value for verdict in run_on_ranks(hashed, world_size=4)]
    assert values[0] != values[1]
    assert values[2] != values[3]


def parent_and_session(rank: int, world_size: int) -> tuple[int, int]:
    return os.getppid(), os.getsid(0)


def test_a_rank_is_a_child_of_a_nursery_and_leads_its_own_session() -> None:
    verdicts = run_on_ranks(parent_and_session, fresh=True)
    nurseries = [_rank_nursery._nurseries[verdict.rank].process.pid for verdict in verdicts]
    assert [verdict.value[0] for verdict in verdicts] == nurseries
    assert len({verdict.value[1] for verdict in verdicts} | set(nurseries)) == 4


def test_a_nursery_may_run_only_one_thread() -> None:
    """What holds a lock in another thread when a process forks holds it forever in the child."""
    run_on_ranks(all_reduced)
    for nursery in _rank_nursery._nurseries.values():
        assert len(list(Path(f"/proc/{nursery.process.pid}/task").iterdir())) == 1


def test_a_nursery_that_dies_takes_its_ranks_along_and_is_replaced() -> None:
    run_on_ranks(all_reduced)
    first = _rank_nursery._nurseries[0]
    workers = pids()[2]
    first.process.kill()
    first.process.wait()
    assert distributed._pools[2].workers[0].process.wait(LIMIT_S) == -signal.SIGKILL
    assert [v.value for v in run_on_ranks(all_reduced)] == [1.0, 1.0]
    assert _rank_nursery._nurseries[0] is not first
    assert set(pids()[2]).isdisjoint(workers)


# ---------------------------------------------------------------- the session's end


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_an_interrupted_session(tmp_path: Path, sent: signal.Signals) -> None:
    inner = """
        import os, time
        from pathlib import Path
        from tests.distributed import ranks

        @ranks(1)
        def test_hang():
            new = Path(__file__).with_name("new")
            new.write_text(str(os.getpid()))
            new.rename(new.with_name("pid"))
            time.sleep(1000)
    """
    (tmp_path / "test_inner.py").write_text(textwrap.dedent(inner))
    options = ["-p", "tests.conftest", "--import-mode=importlib", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, str(tmp_path)]
    session = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        name = tmp_path / "pid"
        wait_until(lambda: name.exists() or session.poll() is not None)
        session.send_signal(sent)
        output, _ = session.communicate(timeout=LIMIT_S)
    finally:
        session.kill()
    assert session.returncode == (2 if sent == signal.SIGINT else -signal.SIGKILL), output.decode()
    worker = int(name.read_text())
    wait_until(lambda: not running(worker))


def wait_until(condition, limit_s: float = LIMIT_S) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid: int) -> bool:
    """An orphan that nobody reaps (a container without init) does not run any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_close_pools_leaves_no_process() -> None:
    run_on_ranks(all_reduced)
    workers = [pid for pool in pids().values() for pid in pool]
    distributed.close_pools()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # gone and reaped: a zombie would still answer


def test_verdict_in_one_line() -> None:
    assert str(Verdict(3, "exit", exit_code=7, seconds=1)) == "rank 3: exit code 7 [1.00 s]"
