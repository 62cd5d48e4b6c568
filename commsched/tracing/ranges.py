"""Ranges: what commsched does, in torch's profiler and in NVIDIA's.

A torch profiler sees the thread that started it: there are `wait` and `deferred step`. The engine
has a thread of its own, whose `encode`, `comm` and `decode` come with ::

    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profile: ...
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler as _profiler

__all__ = ["profiled"]

NOTHING: AbstractContextManager[object] = nullcontext()
_cuda: Any = torch.cuda  # neither has types, nor
_nvtx: Any = torch.cuda.nvtx


class _Range:
    """A range in torch's profile, and in NVIDIA's where this process uses CUDA."""

    __slots__ = ("_name", "_nvtx", "_recorded")

    def __init__(self, name: str, recorded: bool, nvtx: bool) -> None:
        self._name = f"commsched.{name}"
        self._nvtx = nvtx
        # A tenth of the cost of torch.profiler.record_function, which is an operator.
        make: Any = torch._C._profiler._RecordFunctionFast
        self._recorded = make(self._name) if recorded else NOTHING

    def __enter__(self) -> None:
        if self._nvtx:
            _nvtx.range_push(self._name)
        self._recorded.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recorded.__exit__(*error)
        if self._nvtx:
            _nvtx.range_pop()


def profiled(name: str) -> AbstractContextManager[object]:
    """The range ``commsched.<name>`` in whichever profiler is there; next to nothing without one.

    NVTX ranges come wherever CUDA is in use, since nobody can ask whether they are looked at.
    """
    recorded, nvtx = _profiler._is_profiler_enabled, _cuda.is_initialized()
    return _Range(name, recorded, nvtx) if recorded or nvtx else NOTHING
