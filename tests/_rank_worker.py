"""One rank of the multi-rank test harness; forked, or started as a script, by ``_rank_pool.py``.

The process talks to the parent over one inherited socket, with plain pickles
(not ``Connection.send``: importing torch.multiprocessing teaches that one to
ship tensors as shared-memory handles, which die with the worker):

    parent -> worker    ("run", job) | ("ping", None) | ("close", None)
    worker -> parent    an outcome: {"status": "ok" | "raised", ...}
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType, ModuleType
from typing import Any

DUMP_SIGNAL = signal.SIGUSR2  # "write the stack of every thread to stderr"
PR_SET_PDEATHSIG = 1
# Foreign (C++) threads that once ran Python: autograd, gloo callbacks.
IGNORED_THREADS = ("Dummy-",)
THREADS_SETTLE_S = 1.0

Outcome = dict[str, Any]
Ended = tuple[Outcome, BaseException | None]


class ThreadLeakError(AssertionError):
    """A body returned and left threads running."""


def serve(fd: int) -> None:
    """Joins the default group, then serves commands until told to close."""
    conn = Connection(fd)
    os.set_inheritable(conn.fileno(), False)  # a grandchild holding it would hide our death
    boot = pickle.loads(conn.recv_bytes())
    _prepare_process(boot["parent_pid"])
    # By hand, as the repository root need not be on sys.path and another
    # distribution may well have installed a top-level `tests`.
    sys.path[:] = boot["sys_path"]
    package = sys.modules["tests"] = ModuleType("tests")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    rank, world_size = boot["rank"], boot["world_size"]
    default_group = _join(boot)
    _send(conn, {"status": "ok", "value": None})
    while True:
        command, job = pickle.loads(conn.recv_bytes())
        if command == "close":
            os._exit(0)  # tearing torch down takes a second that no test is interested in
        if command == "ping":
            _send(conn, _guarded(lambda: _ping(default_group, world_size))[0])
            continue
        outcome, error = run_job(job, rank, world_size)
        _send(conn, outcome)
        if job["fresh"]:
            if error is not None:
                raise error  # die exactly as a script would: traceback, exit code, SIGINT
            _leave()
            return


def end_with_parent(parent_pid: int) -> None:
    """Die when the parent does: a pytest that is SIGKILLed must not leave orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prepare_process(parent_pid: int) -> None:
    end_with_parent(parent_pid)
    # A background shell job ignores SIGINT and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)  # runs without the GIL


def _join(boot: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=boot["start_timeout_s"])
    store = dist.TCPStore("127.0.0.1", boot["port"], is_master=False, timeout=limit)  # type: ignore[attr-defined]
    # Longer than any test limit: the parent reports a hang, with stacks, before gloo does.
    dist.init_process_group(
        "gloo",
        store=store,
        rank=boot["rank"],
        world_size=boot["world_size"],
        timeout=timedelta(seconds=boot["group_timeout_s"]),
    )
    return dist.group.WORLD


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _ping(default_group: Any, world_size: int) -> None:
    """Checks that the next body can use the default group; drops the groups this one made.

    Runs on every rank after every body, so that a collective that only some
    ranks issued fails the test that did it and not the one after.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.group.WORLD is not default_group:
        raise RuntimeError("the body destroyed or replaced the default process group")
    world = dist.distributed_c10d._world
    # New groups are named by a counter: unequal counters hang the next new_group.
    made = torch.tensor([world.group_count, -world.group_count, len(world.pg_map)])
    dist.all_reduce(made, op=dist.ReduceOp.MAX)
    if made[0] != -made[1]:
        raise RuntimeError("the ranks created different numbers of process groups")
    for group in list(world.pg_map):
        if group is not default_group:
            dist.destroy_process_group(group)


def run_job(job: dict[str, Any], rank: int, world_size: int) -> Ended:
    """Runs one body and returns its outcome and, if it raised, the exception."""
    before = set(threading.enumerate())
    started = time.perf_counter()
    with _restored_state(job["env"]):
        outcome, error = _guarded(lambda: _call_body(job, rank, world_size))
    outcome["seconds"] = time.perf_counter() - started
    if error is not None and not job["fresh"]:
        traceback.clear_frames(error.__traceback__)  # they keep models and engines alive
        error = None
    outcome["leaked"] = _leaked_threads(before) if job["check_threads"] else []
    if outcome["status"] == "ok" and outcome["leaked"]:
        error = ThreadLeakError(
            f"threads left running after the body: {', '.join(outcome['leaked'])}"
        )
        outcome.update(status="raised", error_type="ThreadLeakError", error_text=str(error))
    return outcome, error


def _guarded(call: Callable[[], Any]) -> Ended:
    try:
        return {"status": "ok", "value": pickle.dumps(call())}, None
    except SystemExit:  # the body asked this process to exit: let it, the parent reports the code
        raise
    except BaseException as error:
        return {
            "status": "raised",
            "error_type": type(error).__name__,
            "error_text": str(error),
            "traceback": _format(error),
        }, error


def _format(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # ours say nothing
    return "".join(traceback.format_exception(type(error), error, frames))


def _call_body(job: dict[str, Any], rank: int, world_size: int) -> Any:
    target: Any = load_module(job["module"], job["path"])
    owner: Any = None
    for name in job["qualname"].split("."):
        owner, target = target, getattr(target, name)
    body = getattr(target, "__rank_body__", target)
    args, kwargs = pickle.loads(job["payload"])  # after the import: may hold that module's classes
    if not job["by_keyword"]:
        return body(rank, world_size, *args, **kwargs)
    wanted = inspect.signature(body).parameters
    given = {"rank": rank, "world_size": world_size}
    kwargs.update({name: value for name, value in given.items() if name in wanted})
    if inspect.isclass(owner) and next(iter(wanted), None) == "self":
        args = (owner(), *args)
    return body(*args, **kwargs)


@contextlib.contextmanager
def _restored_state(env: dict[str, str]) -> Iterator[None]:
    """Every body starts from the same process state, whatever ran before it."""
    import torch

    variables, directory = dict(os.environ), os.getcwd()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    random.seed(0)
    torch.manual_seed(0)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(directory)
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            # Not as a matter of course: the call imports torch._inductor, which takes seconds.
            torch.use_deterministic_algorithms(deterministic)


def _leaked_threads(before: set[threading.Thread]) -> list[str]:
    def leftovers() -> list[threading.Thread]:
        new = [t for t in threading.enumerate() if t not in before]
        new = [t for t in new if not t.name.startswith(IGNORED_THREADS)]
        return [t for t in new if not t.daemon or t.name.startswith("commsched")]

    suspects = leftovers()
    if suspects:
        gc.collect()  # an owner stuck in a reference cycle (DDP makes some) is not a leak
        deadline = time.monotonic() + THREADS_SETTLE_S
        for thread in suspects:
            thread.join(max(0.0, deadline - time.monotonic()))
    return sorted(t.name for t in leftovers())


class _RewritingLoader(SourceFileLoader):
    """Compiles a test file with pytest's assertion rewriting: a bare assert shows its values."""

    def get_code(self, fullname: str) -> CodeType:
        """Never uses the bytecode cache, which belongs to the plain compilation."""
        import ast

        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


def load_module(name: str, path: str) -> ModuleType:
    """The module the parent knows as ``name``, loaded from ``path`` at most once."""
    name = "__rank_main__" if name == "__main__" else name
    if "." in name:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.rpartition(".")[0])
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == path:
        return module
    spec = importlib.util.spec_from_file_location(name, path, loader=_RewritingLoader(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _send(conn: Connection, outcome: Outcome) -> None:
    conn.send_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
