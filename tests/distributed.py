"""Hang-proof tests on several ranks: gloo pools that live as long as the session.

Import it as ``tests.distributed`` (``conftest.py`` makes that work for ``pytest``
and ``python -m pytest``; the rank processes do the same for themselves).

Example:
    >>> import torch, torch.distributed as dist
    >>> from tests.distributed import ranks, run_on_ranks
    >>>
    >>> @pytest.mark.parametrize("numel", [1, 1000])
    ... @ranks(4, timeout_s=20, env={"COMMSCHED_CREDIT_MB": "1"})
    ... def test_sum(rank: int, world_size: int, numel: int) -> None:
    ...     x = torch.full((numel,), float(rank))
    ...     dist.all_reduce(x)
    ...     assert x[0] == 6
    >>>
    >>> def die(rank: int, world_size: int, code: int) -> None:  # rank, world_size come first
    ...     if rank == 1:
    ...         os._exit(code)
    >>>
    >>> def test_death() -> None:
    ...     verdicts = run_on_ranks(die, 7, world_size=2, fresh=True)
    ...     assert verdicts[1].exit_code == 7

A body is found in the rank processes by file and qualified name, so it must be
a module-level function (or a method of a module-level test class). Arguments,
fixture values and results are pickled. Every body starts with the same seeds
and the environment pytest was started with, plus ``env`` (``monkeypatch.setenv``
in a fixture does not reach the ranks).

Time limits are enforced from outside: whatever a rank does, the parent returns.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests import _rank_nursery
from tests._rank_pool import Pool
from tests._rank_verdict import Verdict, report

__all__ = ["Verdict", "close_pools", "leaving", "outlive", "ranks", "run_on_ranks"]

_pools: dict[int, Pool] = {}


def ranks(
    world_size: int,
    *,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    env: Mapping[str, str] | None = None,
    check_threads: bool = True,
    fresh: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test run its body on every rank of a pool, and pass if all ranks pass.

    The body takes ``rank`` and ``world_size`` (either may be left out) by name, next to
    parametrize arguments and fixtures; pytest sees only the latter. If the body skips on
    every rank, the test is skipped. The other arguments are those of ``run_on_ranks``.

    Raises:
        AssertionError: some rank did not pass; the text holds every rank's end.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        visible = [p for n, p in signature.parameters.items() if n not in ("rank", "world_size")]
        has_self = bool(visible) and visible[0].name == "self"

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            bound = test.__signature__.bind(*args, **kwargs).arguments  # type: ignore[attr-defined]
            if has_self:  # the ranks make their own instance
                bound.pop("self")
            job = _job(body, (), dict(bound), True, fresh, env, check_threads)
            verdicts = _run(job, world_size, timeout_s, grace_s)
            if all(verdict.error_type == "Skipped" for verdict in verdicts):
                import pytest

                pytest.skip(verdicts[0].error_text)
            if any(verdict.status != "ok" for verdict in verdicts):
                raise AssertionError(report(body.__qualname__, verdicts))

        test.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
        test.__rank_body__ = body  # type: ignore[attr-defined]
        return test

    return decorate


def run_on_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    check_threads: bool = True,
) -> list[Verdict]:
    """Runs ``fn(rank, world_size, *args)`` on every rank and returns how each one ended.

    Args:
        fn: a module-level function.
        args: picklable.
        world_size: the number of ranks; each world size has one pool, started when first used.
        timeout_s: limit for the body, not for starting the ranks. A fresh process has
            20 s more to exit after its body, also when another rank failed.
        grace_s: once a rank raised or died, the others get this long, or less where
            ``timeout_s`` is nearer; then they count as hung.
        fresh: run in processes of their own (seconds instead of milliseconds) that leave
            the default group and exit after the body. An exception leaves the body as it
            would leave a script: traceback on stderr, exit code 1 or death by SIGINT.
        env: extra environment variables; with ``fresh`` they are there from process start,
            otherwise only while the body runs.
        check_threads: a body that leaves behind a non-daemon thread, or any thread whose name
            starts with ``commsched``, counts as raised (``ThreadLeakError``).

    Returns:
        One verdict per rank, by rank. Never raises because of what a rank did.

    Raises:
        TypeError: ``fn`` is not a module-level function, or an argument cannot be pickled.
        RuntimeError: the ranks cannot be started.
    """
    job = _job(fn, args, {}, False, fresh, env, check_threads)
    return _run(job, world_size, timeout_s, grace_s)


def leaving() -> None:
    """In a fresh rank: says that it is about to end, to those that `outlive` it."""
    _store().set(f"leaving/{_rank()}", str(os.getpid()))


def outlive(rank: int, limit_s: float = 30.0) -> None:
    """In a fresh rank: waits until that one's process is gone. As a sleep would, but no longer."""
    deadline = time.monotonic() + limit_s
    pid = int(_store().get(f"leaving/{rank}"))  # waits for it
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def _store() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def close_pools() -> None:
    """Ends all rank processes; the next test starts new ones."""
    while _pools:
        _pools.popitem()[1].close()
    _rank_nursery.close()


atexit.register(close_pools)


def _job(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    by_keyword: bool,
    fresh: bool,
    env: Mapping[str, str] | None,
    check_threads: bool,
) -> dict[str, Any]:
    path = getattr(sys.modules.get(fn.__module__), "__file__", None)
    if not inspect.isfunction(fn) or "<" in fn.__qualname__ or path is None:  # <locals>, <lambda>
        raise TypeError(f"{fn} must be a module-level function: the ranks import it by name")
    try:
        payload = pickle.dumps((args, kwargs))
    except Exception as error:
        text = f"the arguments of {fn.__qualname__} cannot be sent to the ranks: {error}"
        raise TypeError(text) from error
    return {
        "module": fn.__module__,
        "path": path,
        "qualname": fn.__qualname__,
        "payload": payload,
        "by_keyword": by_keyword,
        "fresh": fresh,
        "env": dict(env or {}),
        "check_threads": check_threads,
    }


def _run(job: dict[str, Any], world_size: int, timeout_s: float, grace_s: float) -> list[Verdict]:
    if job["fresh"]:
        return Pool(world_size, job["env"]).run(job, timeout_s, grace_s)
    pool = _pools.get(world_size)
    if pool is None or not pool.usable():
        if pool is not None:
            pool.kill()
        pool = _pools[world_size] = Pool(world_size)
    return pool.run(job, timeout_s, grace_s)
