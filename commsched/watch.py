"""Watching who reads which parameter when: for the profile, and to catch what is read too early."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from commsched.errors import CommSchedError
from commsched.jobs import Job
from commsched.layout import first_names
from commsched.pending import mark_param, unmark
from commsched.recorder import Recorder

__all__ = ["Watch"]

logger = logging.getLogger("commsched")


class _Observer:
    """Owner of parameters of which we only want to know that they are read."""

    def __init__(self, seen: Callable[[torch.Tensor], None]) -> None:
        self._seen = seen

    def settle(self, tensor: torch.Tensor) -> None:
        unmark(tensor)
        self._seen(tensor)


class Watch:
    """Who is read when, in one model.

    A parameter that gets a gradient although nothing of its use was seen in the forward before was
    read in a way that is hidden from us. While the profile is taken this only means that its
    deferred steps must not be late; afterwards it means that it was read before its step had run.

    Args:
        recorder: is told of first reads.
        names: of the model's parameters, by id.
        find_unused: parameters may be left out of a forward, and still come in a bucket.
    """

    def __init__(self, recorder: Recorder, names: Mapping[int, str], find_unused: bool) -> None:
        self.unseen: set[int] = set()  # ids of those read without our seeing it
        self._recorder = recorder
        self._names = names
        self._find_unused = find_unused
        self._used: set[int] = set()
        self._late: set[int] = set()  # stepped only when forward had ended

    def name(self, param: torch.Tensor) -> str:
        """Its name in the model."""
        return self._names.get(id(param), "a parameter outside the model")

    def observe(self, params: Iterable[nn.Parameter]) -> None:
        """Note when each of them is read in the coming forward."""
        observer = _Observer(self.saw)
        for param in params:
            if id(param) in self._names:
                mark_param(param, observer)

    def saw(self, param: torch.Tensor) -> None:
        """It is read."""
        self._used.add(id(param))
        self._recorder.used(self.name(param))

    def conclude(self, params: Iterable[int]) -> None:
        """The profile is taken: those of `params` (ids) that nobody was seen to read are hidden."""
        self.unseen = {one for one in params if one in self._names} - self._used
        if self.unseen:
            names = first_names(self._names[one] for one in self.unseen)
            logger.info("not seen to be read, so stepped when forward begins: %s", names)
        self._used.clear()

    def forget_late(self) -> None:
        """A forward begins."""
        self._late.clear()

    def note_late(self, params: Iterable[nn.Parameter]) -> None:
        """A forward has ended, and only then these were stepped. They may be read before backward.

        An unused parameter's old gradient, where the program keeps it, would look like a new one.
        """
        late = [one for one in params if not self._find_unused or one.grad is None]
        self._late = {id(param) for param in late}
        observer = _Observer(lambda param: self._late.discard(id(param)))
        for param in late:
            mark_param(param, observer)

    def refuse_late(self, job: Job, params: Sequence[torch.Tensor]) -> None:
        """A bucket has come.

        Raises:
            CommSchedError: a late parameter got a gradient.
        """
        for param, (start, stop) in zip(params, job.ranges(), strict=True):
            if id(param) not in self._late:
                continue
            if self._find_unused and not job.buffer[start:stop].any():
                continue
            raise CommSchedError(
                f"{self.name(param)} got a gradient, but its use in forward was not seen (an "
                "extension in C++, or an alias made before?), so it was read before its deferred "
                "step had run. Call state.synchronize() before each forward, or leave optimizer= "
                "out"
            )
