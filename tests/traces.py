"""Traces as a run writes them, made up: every figure in them is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commsched.plan import Plan
from commsched.profile import Profile
from commsched.simulate import Timeline, simulate

__all__ = ["RankFile", "simulated", "written"]

ROWS = ("steps", "training", "buckets", "queued", "engine")
WIRE = 10  # the row number of "wire 0"


@dataclass
class RankFile:
    """One rank's file. Times in seconds; they are written in microseconds."""

    rank: int
    world_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        about = {"rank": self.rank, "world_size": self.world_size, "settings": dict(self.settings)}
        self.note("commsched", version="0", model="digest", host="here", pid=1, **about)
        rows = [*enumerate(ROWS, 1), *((WIRE + wire, f"wire {wire}") for wire in range(8))]
        for tid, row in rows:
            self._add("M", "thread_name", tid, args={"name": row})

    def _add(self, ph: str, name: str, tid: int, **more: Any) -> None:
        event = {"ph": ph, "name": name, "cat": "commsched", "pid": self.rank, "tid": tid, **more}
        self.lines.append(json.dumps(event))

    def note(self, name: str, **args: Any) -> None:
        self._add("M", name, 0, args=args)

    def span(self, name: str, row: str, begin_s: float, end_s: float, **args: Any) -> None:
        tid = WIRE + int(row[5:]) if row.startswith("wire ") else ROWS.index(row) + 1
        ts, dur = 1e6 * begin_s, 1e6 * (end_s - begin_s)
        self._add("X", name, tid, ts=ts, dur=dur, args=args)

    def step(self, number: int, begin_s: float, end_s: float, **args: Any) -> None:
        known = {"phase": "settled", "choice": "fifo", "plan": None, "deferred": False}
        self.span("step", "steps", begin_s, end_s, **{"step": number, **known, **args})

    def ready(self, step: int, bucket: int, at_s: float, nbytes: int = 0) -> None:
        args = {"step": step, "bucket": bucket, "bytes": nbytes, "params": ""}
        self._add("i", "ready", 3, ts=1e6 * at_s, s="t", args=args)

    def queued(self, begin_s: float, end_s: float, **args: Any) -> None:
        key = len(self.lines)
        self._add("b", "queued", 4, ts=1e6 * begin_s, id=key, args=args)
        self._add("e", "queued", 4, ts=1e6 * end_s, id=key)

    def write(self, folder: Path) -> Path:
        path = folder / f"trace-rank{self.rank}.json"
        text = ",\n".join(self.lines)
        path.write_text(f"[\n{text},\n", encoding="utf-8")  # as left behind by a kill
        return path


def written(files: Sequence[RankFile], folder: Path) -> Path:
    """The folder, with all files in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        file.write(folder)
    return folder


def simulated(
    profile: Profile,
    plan: Plan,
    *,
    deferred: bool,
    choice: str,
    steps: int = 4,
    late_s: Mapping[int, float] | None = None,
    settings: Mapping[str, Any] | None = None,
    noted: bool = True,
) -> tuple[list[RankFile], Timeline]:
    """The traces of a run that goes as `simulate` says; and what it says.

    `late_s` is, by rank, by how much longer its backward takes, for which all others wait. `noted`:
    the traces hold the profile and the plan.
    """
    timeline = simulate(plan, profile, deferred)
    late = late_s or {}
    files = []
    for rank in range(profile.world_size):
        file = RankFile(rank, profile.world_size, settings or {})
        if noted:
            file.note("commsched_profile", profile=profile.to_json(), at_step=0)
            file.note("commsched_plan", digest=plan.digest, plan=plan.to_json(), at_step=0)
        most_s = max([0.0, *late.values()])
        own = _Rank(file, profile, plan, timeline, deferred, late.get(rank, 0.0), most_s)
        own.write(steps, choice)
        files.append(file)
    return files, timeline


@dataclass
class _Rank:
    """Writes one rank's steps. A rank that is late is so from backward's first bucket on."""

    file: RankFile
    profile: Profile
    plan: Plan
    timeline: Timeline
    deferred: bool
    late_s: float
    most_s: float  # the latest rank's

    def write(self, steps: int, choice: str) -> None:
        length_s = self.timeline.step_s + self.most_s
        first_s = self.profile.ready_s[0]
        for number in range(1, steps + 1):
            begin_s = 100.0 + number * length_s
            args = {"choice": choice, "plan": self.plan.digest, "deferred": self.deferred}
            phase = "settled" if number > 1 else "measuring"
            begins = begin_s + first_s
            self.file.step(number, begins, begins + length_s, phase=phase, **args)
            self._step(number, begin_s)

    def _step(self, step: int, begin_s: float) -> None:
        profile, file = self.profile, self.file
        own_s, all_s = begin_s + self.late_s, begin_s + self.most_s
        file.span("backward", "training", begin_s, own_s + profile.backward_s, step=step)
        for bucket, (at_s, spec) in enumerate(
            zip(profile.ready_s, profile.layout.buckets, strict=True)
        ):
            at_s += begin_s if bucket == 0 else own_s
            file.ready(step, bucket, at_s, spec.nbytes)
        free_s = [0.0] * 8
        for task, times in zip(self.plan.tasks, self.timeline.tasks, strict=True):
            args = {
                "step": step,
                "task": task.index,
                "round": task.round,
                "op": task.op,
                "codec": task.codec,
                "bucket": sorted({piece.bucket for piece in task.chunk.pieces}),
                "bytes": task.chunk.nbytes,
                "sent_bytes": int(task.sent_bytes(profile.world_size)),
                "plan": self.plan.digest,
            }
            issued_s, end_s = own_s + times.issued_s, all_s + times.end_s
            wire = next((at for at, free in enumerate(free_s) if free <= issued_s), 7)
            free_s[wire] = end_s
            file.queued(own_s + times.ready_s, issued_s, **args)
            file.span("comm", f"wire {wire}", issued_s, end_s, **args)
        self._wait(step, own_s + profile.backward_s, all_s)

    def _wait(self, step: int, now_s: float, all_s: float) -> None:
        """What the training thread does after backward."""
        profile, file = self.profile, self.file
        if not self.deferred:
            end_s = all_s + max([profile.backward_s, *(one.end_s for one in self.timeline.tasks)])
            file.span("wait", "training", now_s, end_s, step=step, bucket=None, params="")
            now_s = end_s + profile.other_s + profile.optimizer_s
            file.span("forward", "training", now_s, now_s + profile.forward_s, step=step)
            return
        now_s += profile.other_s
        began_s, done_s = now_s, dict(self._done())
        last_s = 0.0
        for param in sorted(profile.params, key=lambda param: param.use_s):
            use_s = min(param.use_s, profile.forward_s)
            now_s += use_s - last_s
            last_s = use_s
            until_s = all_s + done_s.get(param.name, 0.0)
            if until_s > now_s:
                args = {"step": step, "bucket": None, "params": param.name}
                file.span("wait", "training", now_s, until_s, **args)
                now_s = until_s
            end_s = now_s + param.optimizer_s
            file.span("deferred step", "training", now_s, end_s, step=step, params=param.name)
            now_s = end_s
        end_s = now_s + profile.forward_s - last_s
        file.span("forward", "training", began_s, end_s, step=step)

    def _done(self) -> Iterator[tuple[str, float]]:
        last: dict[str, float] = {}
        for task, times in zip(self.plan.tasks, self.timeline.tasks, strict=True):
            for span in self.plan.layout.spans(task.chunk):
                last[span.param] = max(last.get(span.param, 0.0), times.end_s)
        yield from last.items()
