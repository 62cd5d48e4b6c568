"""Gauge: measures a model whose optimizer is not handed over."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from commsched.edges import Edge
from commsched.jobs import Job
from commsched.recorder import Recorder

__all__ = ["Gauge"]


class Gauge:
    """Tells a recorder where forward and backward begin and end. For the training thread.

    Args:
        ddp: the model.
        recorder: is told.
    """

    def __init__(self, ddp: DistributedDataParallel, recorder: Recorder) -> None:
        self.recorder = recorder
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(Edge(self.forward_begins)),
            ddp.register_forward_hook(Edge(self.forward_ends)),
        ]

    def forward_begins(self) -> None:
        """DDP's forward begins."""
        self.recorder.forward_begins()

    def forward_ends(self) -> None:
        """DDP's forward has returned."""
        self.recorder.forward_ends()

    def on_bucket(self, job: Job, *_: object) -> None:
        """A bucket has come."""
        self.recorder.bucket_ready(job.key, job.spec)

    def end_of_backward(self) -> None:
        """All gradients are computed."""
        self.recorder.backward_ends()

    def close(self) -> None:
        """Leave the model alone."""
        for handle in self._handles:
            handle.remove()
