"""The errors commsched raises: two classes, both RuntimeErrors, so existing handlers see them."""

from __future__ import annotations

__all__ = ["CommSchedError", "SettingsError", "fresh"]


class CommSchedError(RuntimeError):
    """Gradient communication failed, or cannot work as it was set up; the text says what to do."""


class SettingsError(CommSchedError, ValueError):
    """A setting is unknown, does not parse, is out of range, or differs between ranks."""


def fresh(error: BaseException) -> BaseException:
    """A copy of `error` to raise.

    One raised twice collects the frames of both places, and keeps their gradients alive.
    """
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
