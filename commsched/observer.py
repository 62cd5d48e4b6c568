"""Observer: what one model's user is told of its steps: report, metrics, trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from commsched.engine import Engine
from commsched.errors import CommSchedError
from commsched.group import Membership
from commsched.jobs import Job
from commsched.metrics import Facts, MetricsFile, metrics_of
from commsched.plain import Plain
from commsched.report import Exposure, Report
from commsched.settings import Settings
from commsched.tracing.tracer import SILENT, Blind, Silent, Tracer
from commsched.tuning.steering import Mode, Steering
from commsched.tuning.tuner import Outcome

__all__ = ["Observer", "tracer_of"]

logger = logging.getLogger("commsched")


def tracer_of(settings: Settings, member: Membership, model: str, handed_over: bool) -> Silent:
    """The tracer that the settings ask for.

    Args:
        settings: where to, and which steps.
        member: the ranks.
        model: tells one of several models in a process.
        handed_over: whether the optimizer is.

    A folder that this rank cannot write to is a warning: the others would wait for it in vain.
    """
    if not settings.trace:
        return SILENT
    about = {"model": model, "settings": asdict(settings), "handed_over": handed_over}
    rank, size = member.global_rank, len(member.ranks)
    try:
        return Tracer(settings.trace, rank, size, settings.trace_steps, **about)
    except CommSchedError as error:
        logger.warning("rank %d: %s", rank, error)
        return Blind(settings.trace_steps)


class Observer:
    """Collects what there is to tell. Used by the training thread only.

    Args:
        settings: where metrics go.
        member: the ranks.
        engine: sums gradients, as does
        plain: where plain DDP is in effect.
        steering: knows what is in effect, and why; None where nothing is measured.
        tracer: is told of steps.

    Attributes:
        begun: steps.
    """

    def __init__(
        self,
        settings: Settings,
        member: Membership,
        engine: Engine,
        plain: Plain,
        steering: Steering | None,
        tracer: Silent,
    ) -> None:
        self.begun = 0
        self._size = len(member.ranks)
        self._engine = engine
        self._plain = plain
        self._steering = steering
        self._tracer = tracer
        self._exposure = Exposure()
        self._noted: Outcome | None = None  # by the trace
        self._metrics: MetricsFile | None = None
        if settings.metrics:
            self._metrics = MetricsFile(settings.metrics, member.global_rank, self._size)

    def step_begins(self, mode: Mode) -> None:
        """The first bucket of a backward has come."""
        made, steering = self._engine.planner.made, self._steering
        self._tracer.begin_step(
            self.begun,
            "settled" if steering is None else steering.phases.name,
            self._engine.planner.active.policy if steering is None else steering.choice,
            None if made is None or mode.plain else made.plan.digest,
            mode.deferred,
            time.monotonic(),
        )
        outcome = None if steering is None else steering.outcome
        if outcome is not self._noted and outcome is not None:
            self._tracer.note("commsched_tuning", outcome=outcome.to_dict())
        self._noted = outcome
        if self._metrics is not None:
            self._metrics.maybe_write(self.report, self._facts)
        self.begun += 1

    def step_ends(self, jobs: Sequence[Job], free_s: float) -> None:
        """Its buckets have come; since `free_s` the training thread had nothing to do but wait."""
        settled = self._steering is None or self._steering.phases.name == "settled"
        self._exposure.add([job.timing for job in jobs], free_s, settled)

    def report(self) -> Report:
        """What was measured so far."""
        planner, steering = self._engine.planner, self._steering
        plain = steering is not None and steering.plain
        digest = None if planner.made is None or plain else planner.made.plan.digest
        codec, policy = planner.active.codec, planner.active.policy
        report = self._exposure.report(self._sent, codec, policy, digest)
        if steering is None:
            return report
        outcome, outlook = steering.outcome, steering.outlook()
        tuning = None if outcome is None else outcome.to_dict()
        report = replace(report, choice=steering.choice, tuning=tuning)
        if outlook is None:
            return report
        return replace(report, predicted_ms=1e3 * outlook.step_s, ideal_ms=1e3 * outlook.ideal_s)

    def metrics(self) -> dict[str, float]:
        """The same, as flat numbers."""
        return metrics_of(self.report(), self._facts())

    def close(self) -> None:
        """The last word."""
        self._tracer.close()
        if self._metrics is not None:
            self._metrics.close(self.report(), self._facts())

    @property
    def _sent(self) -> int:
        return self._engine.wire_bytes + self._plain.wire_bytes

    def _facts(self) -> Facts:
        return Facts(
            world_size=self._size,
            steps=self.begun,
            exposed_s=self._exposure.total_s,
            wire_bytes=self._sent,
            tasks=self._engine.tasks,
            errors=int(self._engine.failed),
        )
