"""Probing the link, and agreeing on one profile: conversations of all ranks of a group."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commsched.errors import CommSchedError
from commsched.layout import BucketSpec, Layout, digest_of, first_names
from commsched.plan import Control
from commsched.profile import Link, ParamTimes, Profile

__all__ = ["Network", "agree_on_median", "agree_on_profile", "fit_link", "probe_link"]

# Bytes of each all-reduce, and how many of them travel at once; from small to large. The engine
# sends several at once, and one alone does not fill a link.
_BURSTS = ((4 << 10, 1), (64 << 10, 1), (1 << 20, 1), (1 << 20, 4), (1 << 20, 12))
_ENOUGH_S = 0.05  # a burst that takes longer tells the bandwidth well enough: none larger
_BUDGET_S = 0.1  # repeats of one burst
_REPEATS = 5

logger = logging.getLogger("commsched")


class Network(Control, Protocol):
    """What probing needs of a group."""

    size: int

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Start summing `tensor` over ranks, in place."""
        ...


def probe_link(group: Network, now: Callable[[], float] = time.perf_counter) -> Link:
    """Time all-reduces of several sizes. Blocks for some 0.4 s at 1 Gbit/s, less on faster links.

    Collective. Which ones are sent next is decided from times that all ranks have agreed on, so all
    ranks send the same ones and find the same link.

    Args:
        group: our own group, with nothing else under way on it.
        now: the clock, in seconds.
    """
    factor = 2 * (group.size - 1) / group.size
    buffers = [torch.zeros(1 << 18) for _ in range(max(count for _, count in _BURSTS))]
    _timed(group, [buffers[0][: _BURSTS[0][0] // 4]], now)  # connects
    rows: list[tuple[float, float]] = []
    for nbytes, count in _BURSTS:
        burst = [buffer[: nbytes // 4] for buffer in buffers[:count]]
        taken_s = _repeated(group, burst, now)
        rows.append((factor * nbytes * count, taken_s))
        if taken_s > _ENOUGH_S:
            break
    link = fit_link(rows)
    logger.debug("probed: bytes sent and seconds %s, fitted %s", rows, link)
    return link


def fit_link(rows: Sequence[tuple[float, float]]) -> Link:
    """The latency of the smallest transfer, and the slope between the two largest.

    The slope, since an idle link may take the first bytes faster than it goes on: a cloud's burst
    allowance, a switch's buffer. Where there is only one large transfer, the slope from the
    smallest to it. Noise may have made the large one the faster: at least a hundredth of its time
    is taken to be the bandwidth's, and at least a hundredth of the small one's the latency's.

    Args:
        rows: (bytes that one rank sent, seconds), from small to large.
    """
    (few, fast_s), (many, slow_s) = rows[0], rows[-1]
    if many <= few:  # one rank sends nothing
        return Link(fast_s, 0.0)
    base, base_s = next((row for row in rows[:-1] if 4 * row[0] >= many), rows[0])
    beta_s = max(slow_s - base_s, slow_s / 100) / (many - base)
    return Link(max(fast_s - few * beta_s, fast_s / 100), beta_s)


def _repeated(group: Network, burst: list[torch.Tensor], now: Callable[[], float]) -> float:
    """The median time of `burst`, equal on all ranks."""
    times_s: list[float] = []
    while len(times_s) < _REPEATS and sum(times_s) < _BUDGET_S:
        own = json.dumps(_timed(group, burst, now)).encode()
        times_s.append(median(json.loads(row) for row in group.all_gather_bytes(own)))
    return median(times_s)


def _timed(group: Network, burst: list[torch.Tensor], now: Callable[[], float]) -> float:
    begin_s = now()
    for work in [group.all_reduce(tensor) for tensor in burst]:
        work.wait()
    return now() - begin_s


def agree_on_profile(
    group: Network, layout: Layout, world_size: int, summary: dict[str, Any]
) -> Profile:
    """One profile for all ranks: the probed link, and field by field the median over ranks.

    Collective: all ranks call it at the same place of the lane's order. Ranks that have measured no
    complete step are left out; where none has any, the profile is `Profile.unmeasured` with the
    probed link. A parameter that a rank never saw used counts there as used at once (0.0).

    Args:
        group: our own group, with nothing else under way on it.
        layout: the buckets, equal on all ranks.
        world_size: how many ranks share the gradients.
        summary: this rank's `Recorder.summary()`.

    Raises:
        CommSchedError: on every rank, when any rank's layout differs from rank 0's, any rank has
            measured buckets that are not in it, or ranks came to different profiles.
    """
    link = probe_link(group)
    problem = _misfit(layout, summary)
    measured = problem is None and summary["steps"] > 0
    row = {
        "layout": layout.digest,
        "problem": problem,
        "link": [link.alpha_s, link.beta_s],
        "times": _times(layout, summary) if measured else None,
    }
    rows = [json.loads(data) for data in group.all_gather_bytes(json.dumps(row).encode())]
    _refuse_misfits(rows)
    profile = _merge(layout, world_size, rows)
    digest = digest_of(profile.to_json())
    if len(set(group.all_gather_bytes(digest.encode()))) != 1:
        raise CommSchedError("ranks came to different profiles; restart the job")
    return profile


def agree_on_median(group: Control, value: float) -> float:
    """The ranks' median of `value`. Collective."""
    rows = group.all_gather_bytes(json.dumps(value).encode())
    return float(median(json.loads(row) for row in rows))


def _misfit(layout: Layout, summary: dict[str, Any]) -> str | None:
    """What is wrong with a summary, in words. Buckets may lack: DDP leaves out unused ones."""
    if not summary["steps"]:
        return None
    planned = {param.name for bucket in layout.buckets for param in bucket.params}
    unknown = [name for name in summary["params"] if name not in planned]
    if unknown:
        return f"measured parameters that the plan does not have ({first_names(unknown)})"
    if not set(summary["buckets"]) <= {_digest(bucket) for bucket in layout.buckets}:
        return "measured other buckets than the plan's"
    if not all(math.isfinite(value) for value in _times(layout, summary)):
        return "measured times that are not numbers"
    return None


def _refuse_misfits(rows: list[dict[str, Any]]) -> None:
    problems = []
    for rank, row in enumerate(rows):
        if row["layout"] != rows[0]["layout"]:
            problems.append(f"rank {rank}: other buckets than rank 0's")
        elif row["problem"]:
            problems.append(f"rank {rank}: {row['problem']}")
    if problems:
        raise CommSchedError(
            "ranks' measurements do not fit together, so no common plan exists; make the model, "
            "its frozen parameters and DDP's arguments equal on all ranks. " + "; ".join(problems)
        )


def _times(layout: Layout, summary: dict[str, Any]) -> list[float]:
    """A summary as one row of numbers, in the layout's order.

    A bucket that did not come is ready with the one before it, and is used at once.
    """
    came_s = dict(zip(summary["buckets"], summary["ready_s"], strict=True))
    ready_s: list[float] = []
    params: list[float] = []
    for bucket in layout.buckets:
        ready_s.append(came_s.get(_digest(bucket), ready_s[-1] if ready_s else 0.0))
        for param in bucket.params:
            times = summary["params"].get(param.name)
            if times is None:
                params += [ready_s[-1], 0.0, 0.0]
            else:
                params += [times["ready_s"], times["use_s"] or 0.0, times["optimizer_s"]]
    return [summary["forward_s"], summary["backward_s"], summary["other_s"], *ready_s, *params]


def _digest(bucket: BucketSpec) -> str:
    return Layout((bucket,)).digest


def _merge(layout: Layout, world_size: int, rows: list[dict[str, Any]]) -> Profile:
    # The median keeps what holds on every rank: a parameter is ready before its bucket is, and
    # that before backward ends.
    link = Link(*(median(column) for column in zip(*(r["link"] for r in rows), strict=True)))
    measured = [row["times"] for row in rows if row["times"] is not None]
    if not measured:
        return replace(Profile.unmeasured(layout, world_size), link=link)
    times = iter([median(column) for column in zip(*measured, strict=True)])
    forward_s, backward_s, other_s = next(times), next(times), next(times)
    ready_s = tuple(next(times) for _ in layout.buckets)
    params = tuple(
        ParamTimes(param.name, next(times), next(times), next(times))
        for bucket in layout.buckets
        for param in bucket.params
    )
    return Profile(layout, world_size, ready_s, params, forward_s, backward_s, other_s, link)
