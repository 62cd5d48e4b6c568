"""Recorder: a rank's own measurements, step by step, on the training thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from commsched.layout import BucketSpec, Layout
from commsched.tracing.tracer import SILENT, Silent

__all__ = ["WINDOW", "Recorder", "stats_order"]

WINDOW = 5  # steps that medians are taken over

logger = logging.getLogger("commsched")


def stats_order(ddp: DistributedDataParallel) -> tuple[str, ...]:
    """The parameters' names in the order of ``ddp.reducer.get_backward_stats()``.

    DDP hands them to its reducer module by module, each one once, without those that are frozen
    when it is made.
    """
    names: dict[int, str] = {}
    for module_name, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            ignored = f"{module_name}.{name}" in ddp.parameters_to_ignore  # DDP's own test
            if param.requires_grad and not ignored:
                names.setdefault(id(param), f"{module_name}.{name}".lstrip("."))
    return tuple(names.values())


class _Step:
    """Marks of the step under way. Times of the clock that stands still (see `Recorder`)."""

    def __init__(self, begin_s: float, clock_s: float) -> None:
        self.begin_s = begin_s  # of the clock that does not
        self.forward_began_s = clock_s
        self.forward_ended_s: float | None = None
        self.backward_ended_s: float | None = None
        self.used_s: dict[str, float] = {}
        self.ready_s: dict[int, float] = {}
        self.specs: list[BucketSpec] = []
        self.stats: Sequence[int] | None = None


@dataclass(frozen=True)
class _Measured:
    """A complete step. Seconds; `ready_s` as in `Profile`."""

    keys: tuple[int, ...]
    specs: tuple[BucketSpec, ...]
    ready_s: tuple[float, ...]
    used_s: Mapping[str, float]  # on the recorder's clock, as is:
    began_s: float
    stats: Sequence[int] | None
    optimizer: tuple[tuple[float, Mapping[str, int]], ...]  # seconds, and numel of its parameters
    step_s: float
    forward_s: float
    backward_s: float
    rest_s: float
    waited_s: float

    def names(self) -> list[str]:
        """The parameters, bucket by bucket."""
        return [param.name for spec in self.specs for param in spec.params]

    def use_s(self) -> dict[str, float]:
        """When each parameter was first read, as in `Profile`; those that were read."""
        began_s, forward_s = self.began_s, self.forward_s
        return {name: min(at_s - began_s, forward_s) for name, at_s in self.used_s.items()}

    def param_ready_s(self, places: Mapping[str, int]) -> dict[str, float]:
        """When each parameter's own gradient was computed.

        Only differences of DDP's times are used, since their zero is not ours. A bucket's hook is
        called when the last gradient has come for it and for all buckets before it.
        """
        stats = self.stats if self.stats is not None and len(self.stats) == len(places) else None
        ready: dict[str, float] = {}
        last = 0
        for spec, bucket_s in zip(self.specs, self.ready_s, strict=True):
            names = [param.name for param in spec.params]
            if stats is None or any(name not in places for name in names):
                ready.update(dict.fromkeys(names, bucket_s))
                continue
            times = [stats[places[name]] for name in names]
            last = max(last, *times)
            for name, time_ns in zip(names, times, strict=True):
                ready[name] = max(0.0, bucket_s - (last - time_ns) * 1e-9)
        return ready

    def optimizer_s(self) -> dict[str, float]:
        """Each parameter's share of the optimizer's time, by numel."""
        shares = dict.fromkeys(self.names(), 0.0)
        for seconds, numels in self.optimizer:
            mine = {name: numel for name, numel in numels.items() if name in shares}
            total = sum(mine.values())
            for name, numel in mine.items():
                shares[name] += seconds * (numel / total if total else 1 / len(mine))
        return shares

    def other_s(self) -> float:
        """Neither forward, backward, nor an optimizer's time for parameters in the buckets."""
        names = set(self.names())
        return self.rest_s + sum(s for s, numels in self.optimizer if names.isdisjoint(numels))


class Recorder:
    """Measures one model's steps. Called by the training thread only; never raises.

    A step lasts from the beginning of a forward with whose gradients backward fills buckets to the
    beginning of any next forward. All but its length is measured on a clock that stands still
    while the training thread waits for gradients or runs the optimizer, so computing looks the same
    in a step that hides communication and in one that does not.

    Forwards without a backward that communicates (evaluation, gradient accumulation) and the time
    up to the next such forward belong to no step. Of several forwards before one backward, the last
    counts. The optimizer's time and waits in such forwards are the following step's, since deferred
    steps run in whichever forward comes first. What fits no step is dropped.
    """

    def __init__(
        self,
        order: Sequence[str] = (),
        now: Callable[[], float] = time.monotonic,
        tracer: Silent = SILENT,
    ) -> None:
        """A recorder without steps.

        Args:
            order: the names that belong to DDP's backward stats (`stats_order`).
            now: the clock, in seconds; `waited` and `stepped` are told times of the same one.
            tracer: is told of forwards and backwards.
        """
        self.steps = 0  # complete ones, since the buckets last changed or `restart`
        self._places = {name: place for place, name in enumerate(order)}
        self._now = now
        self._tracer = tracer
        self._turned_s = 0.0  # when the last forward ended, on the clock that does not stand still
        self._stopped_s = 0.0
        self._step: _Step | None = None
        self._waited_s = 0.0  # since the last complete step; so is:
        self._optimizer: list[tuple[float, Mapping[str, int]]] = []
        self._window: deque[_Measured] = deque(maxlen=WINDOW)

    def forward_begins(self) -> None:
        """DDP's forward begins."""
        now_s = self._now()
        clock_s = now_s - self._stopped_s
        if self._step is not None and self._step.ready_s:
            self._close(self._step, now_s, clock_s)
        self._step = _Step(now_s, clock_s)

    def forward_ends(self) -> None:
        """DDP's forward has returned."""
        step = self._step
        if step is not None and step.forward_ended_s is None:
            self._turned_s = self._now()
            step.forward_ended_s = self._turned_s - self._stopped_s
            self._trace("forward", step.begin_s, self._turned_s)

    def used(self, name: str) -> None:
        """The parameter `name` is read; the first time since forward began counts."""
        step = self._step
        if step is not None and not step.ready_s and name not in step.used_s:
            step.used_s[name] = self._now() - self._stopped_s

    def bucket_ready(self, key: int, spec: BucketSpec) -> None:
        """DDP has called the hook for a bucket.

        Args:
            key: equal whenever the bucket comes again (`Buckets.recognise`).
            spec: the bucket.
        """
        step = self._step
        if step is None:
            logger.debug("recorder: a bucket without a forward")
        elif step.forward_ended_s is None or key in step.ready_s:
            self._drop("no forward before its bucket, or more than one backward after a forward")
        else:
            step.ready_s[key] = self._now() - self._stopped_s
            step.specs.append(spec)
            step.backward_ended_s = None

    def backward_ends(self, stats: Sequence[int] | None = None) -> None:
        """Backward has computed its last gradient; call before waiting for any.

        Args:
            stats: ``ddp.reducer.get_backward_stats()``, nanoseconds in the order of `stats_order`.
                Without them every parameter is taken to be ready when its bucket is.
        """
        step = self._step
        if step is not None and step.ready_s:
            now_s = self._now()
            step.backward_ended_s = now_s - self._stopped_s
            step.stats = stats
            self._trace("backward", self._turned_s, now_s)

    def _trace(self, name: str, begin_s: float, end_s: float) -> None:
        if self._tracer.on:
            self._tracer.span(name, "training", begin_s, end_s, step=self._tracer.step)

    def waited(self, begin_s: float, end_s: float) -> None:
        """The training thread stood still for gradients, outside of any `stepped`."""
        self._stopped_s += end_s - begin_s
        self._waited_s += end_s - begin_s

    def stepped(self, begin_s: float, end_s: float, numels: Mapping[str, int]) -> None:
        """The optimizer ran.

        Args:
            begin_s: when it began.
            end_s: when it had ended.
            numels: the parameters that it updated, and their elements. Kept, not copied.
        """
        self._stopped_s += end_s - begin_s
        if self._step is not None:
            self._optimizer.append((end_s - begin_s, numels))

    def restart(self) -> None:
        """Forget all steps, and the one under way: what follows is under another plan."""
        self._window.clear()
        self.steps = 0
        self._drop("restarted")

    def summary(self) -> dict[str, Any]:
        """Medians over the last steps (at most `WINDOW`) with the present buckets; JSON values.

        Returns:
            ``{"steps": 0}`` if there is none, else "steps"; in seconds "step_s", "forward_s",
            "backward_s", "other_s", "optimizer_s" and "waited_s"; "buckets": their digests, in the
            order in which they came; "ready_s", by bucket; "params": by name, a dict of "ready_s",
            "optimizer_s" and "use_s", which is None for what no forward was seen to read.
        """
        window = list(self._window)
        if not window:
            return {"steps": 0}
        ready = [step.param_ready_s(self._places) for step in window]
        optimizer = [step.optimizer_s() for step in window]
        used = [step.use_s() for step in window]
        return {
            "steps": self.steps,
            "step_s": _median(step.step_s for step in window),
            "forward_s": _median(step.forward_s for step in window),
            "backward_s": _median(step.backward_s for step in window),
            "other_s": _median(step.other_s() for step in window),
            "optimizer_s": _median(sum(shares.values()) for shares in optimizer),
            "waited_s": _median(step.waited_s for step in window),
            "buckets": [Layout((spec,)).digest for spec in window[-1].specs],
            "ready_s": [_median(row) for row in zip(*(s.ready_s for s in window), strict=True)],
            "params": {
                name: {
                    "ready_s": _median(row[name] for row in ready),
                    "use_s": _median(row[name] for row in used if name in row),
                    "optimizer_s": _median(row[name] for row in optimizer),
                }
                for name in window[-1].names()
            },
        }

    def drift(self, predicted_step_s: float) -> float:
        """The last steps' median length over the predicted one; 1.0 where nothing is known."""
        if not self._window or predicted_step_s <= 0:
            return 1.0
        return median(step.step_s for step in self._window) / predicted_step_s

    def _close(self, step: _Step, now_s: float, clock_s: float) -> None:
        began_s, turned_s = step.forward_began_s, step.forward_ended_s
        ended_s = step.backward_ended_s
        if turned_s is None or ended_s is None:
            self._drop("its backward has not ended")
            return
        measured = _Measured(
            keys=tuple(step.ready_s),
            specs=tuple(step.specs),
            ready_s=tuple(max(0.0, at_s - turned_s) for at_s in step.ready_s.values()),
            used_s=step.used_s,
            began_s=began_s,
            stats=step.stats,
            optimizer=tuple(self._optimizer),
            step_s=now_s - step.begin_s,
            forward_s=turned_s - began_s,
            backward_s=ended_s - turned_s,
            rest_s=clock_s - ended_s,
            waited_s=self._waited_s,
        )
        self._forget()
        if self._window and self._window[-1].keys != measured.keys:
            self._window.clear()
            self.steps = 0
        self._window.append(measured)
        self.steps += 1

    def _drop(self, why: str) -> None:
        logger.debug("recorder: a step is not counted: %s", why)
        self._step = None
        self._forget()

    def _forget(self) -> None:
        self._optimizer.clear()
        self._waited_s = 0.0


def _median(values: Iterable[float]) -> float | None:
    # Whole nanoseconds: more would only make the JSON longer.
    rows = list(values)
    return round(median(rows), 9) if rows else None
