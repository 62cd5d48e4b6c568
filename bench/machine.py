"""What machine and which versions a result comes from: what every result file should say."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe"]

_PACKAGES = ("torch", "numba", "numpy")


def describe() -> dict[str, Any]:
    """The head of a result file: command, date, machine and versions."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version()}
        | {package: _version(package) for package in _PACKAGES},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
