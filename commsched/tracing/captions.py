"""Captions: what a trace says of a task."""

from __future__ import annotations

from commsched.jobs import Run
from commsched.layout import first_names
from commsched.tracing.tracer import Fixed

__all__ = ["Captions"]

MOST = 4096


class Captions:
    """Makes each task's caption once. For one thread."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Fixed] = {}

    def of(self, run: Run) -> Fixed:
        """The arguments of all spans of `run`, but for the step."""
        sent_bytes = 0 if run.transfer is None else run.transfer.sent_bytes
        # The plan's digest, not the plan, and no run: those hold gradients, or are many.
        key = run.plan.digest, run.task.index, tuple(run.jobs), sent_bytes
        made = self._made.get(key)
        if made is None:
            if len(self._made) == MOST:
                self._made.clear()
            made = self._made[key] = _caption(run, sent_bytes)
        return made


def _caption(run: Run, sent_bytes: int) -> Fixed:
    task, chunk = run.task, run.chunk
    first = chunk.pieces[0]
    return Fixed(
        {
            "task": task.index,
            "round": task.round,
            "op": task.op,
            "codec": task.codec,
            "chunk": f"{first.bucket}:{first.start}",
            "bucket": list(dict.fromkeys(piece.bucket for piece in chunk.pieces)),
            "bytes": chunk.nbytes,
            "wire_bytes": task.wire_bytes,
            "sent_bytes": sent_bytes,
            "plan": run.plan.digest,
            "params": first_names(span.param for span in run.plan.layout.spans(chunk)),
        }
    )
