"""Errors of the engine, with the task and its parameters in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from commsched.errors import CommSchedError
from commsched.jobs import Run

__all__ = ["CollectiveError", "blaming", "explained"]


@contextlib.contextmanager
def blaming(run: Run) -> Iterator[None]:
    """Name the task in an error of encoding, issuing or decoding it."""
    try:
        yield
    except Exception as error:
        raise CommSchedError(
            f"{run.plan.describe(run.task)}: {type(error).__name__}: {error}. "
            "The process must be restarted."
        ) from error


class CollectiveError(Exception):
    """A collective failed or is late; the lane makes a CommSchedError of it."""

    def __init__(self, run: Run, reason: str) -> None:
        super().__init__(f"{run.plan.describe(run.task)}: {reason}")
        self.run = run


def explained(error: BaseException) -> CommSchedError:
    """`error` as the type that users catch."""
    if isinstance(error, CommSchedError):
        return error
    shown = CommSchedError(f"the engine failed: {type(error).__name__}: {error}")
    shown.__cause__ = error
    return shown
