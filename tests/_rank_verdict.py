"""How the ranks of a multi-rank test ended, and the text that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

REPORT_LINES = 20  # of a rank's output

Status = Literal["ok", "raised", "hung", "signal", "exit"]


@dataclass(frozen=True)
class Verdict:
    """What became of one rank.

    Attributes:
        status: ``ok``: the body returned (and a fresh process then exited with 0).
            ``raised``: it raised. ``hung``: no result, or a fresh process that did not
            exit, within the limit. ``signal`` / ``exit``: the process died.
        value: what the body returned.
        error_type: the exception's class name.
        error_text: its text; for ``hung``, which limit was exceeded.
        traceback: of the exception; for ``hung``, the stacks of all threads.
        exit_code: of a process that exited.
        signal: name of the signal that killed it, such as ``SIGSEGV``.
        seconds: how long the body ran.
        stderr: the end of what it wrote to stderr and stdout.
    """

    rank: int
    status: Status
    value: Any = None
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: str | None = None
    seconds: float = 0.0
    stderr: str = ""

    def __str__(self) -> str:
        """One line; tracebacks and output are left to ``report``."""
        what = {
            "raised": f"raised {self.error_type}: {self.error_text}",
            "hung": f"hung: {self.error_text}",
            "signal": f"killed by {self.signal}",
            "exit": f"exit code {self.exit_code}",
        }.get(self.status, self.status)
        return f"rank {self.rank}: {what} [{self.seconds:.2f} s]"


def report(title: str, verdicts: list[Verdict]) -> str:
    """All ranks' ends as one text; a traceback that several ranks share is printed once."""
    failed = sum(verdict.status != "ok" for verdict in verdicts)
    lines = [f"{title}: {failed} of {len(verdicts)} ranks failed"]
    printed: dict[str, int] = {}  # text -> the rank it was printed for
    for verdict in verdicts:
        lines.append(str(verdict))
        if verdict.status == "ok":
            continue
        for name, text in (("traceback", verdict.traceback), ("output", verdict.stderr)):
            first = printed.setdefault(text.strip(), verdict.rank)
            if text.strip() and first != verdict.rank:
                lines.append(f"    {name}: same as rank {first}")
            elif text.strip():
                shown = text.rstrip().splitlines()
                shown = shown if name == "traceback" else shown[-REPORT_LINES:]
                lines += [f"    {name}:", *(f"      {line}" for line in shown)]
    return "\n".join(lines)
