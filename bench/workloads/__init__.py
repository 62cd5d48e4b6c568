"""What the benchmarks train: emulated accelerators, a real GPT, a small CNN.

`make(name, seed, ...)` returns a `Workload`; `NAMES` lists them.
"""

from __future__ import annotations

from bench.workloads.base import Workload
from bench.workloads.digits import Digits
from bench.workloads.emulated import Emulated, Tiny
from bench.workloads.gpt import Gpt
from bench.workloads.shapes import ARCHITECTURES

__all__ = ["NAMES", "Workload", "make"]

NAMES = (*ARCHITECTURES, "tiny200", "gpt", "digits")


def make(
    name: str,
    rank: int,
    gradient_mb: float | None = None,
    forward_s: float = 0.25,
    backward_s: float = 0.5,
) -> Workload:
    """Makes a workload.

    Args:
        name: one of `NAMES`.
        rank: the data differ by rank; the initial parameters do not.
        gradient_mb: total gradient of an emulated model in MB (1e6 bytes, fp32); None for its
            default. The other workloads have their true size.
        forward_s: seconds an emulated forward takes.
        backward_s: seconds an emulated backward takes.

    Raises:
        ValueError: unknown name.
    """
    if name in ARCHITECTURES:
        return Emulated(ARCHITECTURES[name], rank, gradient_mb, forward_s, backward_s)
    if name == "tiny200":
        return Tiny(rank)
    if name == "gpt":
        return Gpt(rank)
    if name == "digits":
        return Digits(rank)
    raise ValueError(f"unknown workload {name!r}, choose from {', '.join(NAMES)}")
