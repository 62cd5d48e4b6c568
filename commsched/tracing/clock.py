"""Clocks: how far a rank's is from rank 0's, so that ranks' spans can be drawn on one time line.

As in NTP (RFC 5905): a rank asks, rank 0 answers with its time, and the answer is taken to be of
the middle between asking and hearing. It was between the two at any rate, so half of that is the
error at most. The shortest of several rounds is the one that nothing disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Clock", "Pending", "Talk", "compare_clocks"]

ROUNDS = 16  # the first one waits for rank 0's turn


@dataclass(frozen=True)
class Clock:
    """What to add to a rank's times to get rank 0's; and by how much that may be wrong."""

    offset_s: float
    error_s: float


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Until it is sent, or has come."""
        ...


class Talk(Protocol):
    """What comparing needs of a group: messages between two ranks."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, to: int) -> Pending:
        """Start sending `tensor`."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> Pending:
        """Start filling `tensor`."""
        ...


def compare_clocks(group: Talk, now: Callable[[], float] = time.monotonic) -> Clock:
    """This rank's clock against rank 0's. Collective; blocks; a millisecond or so a rank.

    Args:
        group: with nothing on the wire.
        now: the clock, in seconds.
    """
    if group.rank:
        return min((_ask(group, now) for _ in range(ROUNDS)), key=lambda clock: clock.error_s)
    for rank in range(1, group.size):  # one at a time: two would disturb each other
        for _ in range(ROUNDS):
            _answer(group, rank, now)
    return Clock(0.0, 0.0)


def _ask(group: Talk, now: Callable[[], float]) -> Clock:
    answer = torch.zeros(1, dtype=torch.float64)
    coming = group.receive(answer, 0)  # first, so that the answer finds its place
    asked_s = now()
    group.send(torch.zeros(1, dtype=torch.float64), 0).wait()
    coming.wait()
    heard_s = now()
    return Clock(float(answer) - (asked_s + heard_s) / 2, (heard_s - asked_s) / 2)


def _answer(group: Talk, rank: int, now: Callable[[], float]) -> None:
    group.receive(torch.zeros(1, dtype=torch.float64), rank).wait()
    group.send(torch.tensor([now()], dtype=torch.float64), rank).wait()
