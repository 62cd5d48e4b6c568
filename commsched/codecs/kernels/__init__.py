"""CPU kernels of the codecs, one module a family, compiled by numba; torch does without them.

numba is imported by the first codec that wants it, never by ``import commsched``. In the modules:
loops run over slices from 0, or LLVM does not vectorise them; nothing is ``parallel=True``, which
aborts on concurrent use or dies in forked children; results are defined bit for bit, so no
``fastmath`` that changes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["JIT", "load"]

logger = logging.getLogger("commsched")

F = TypeVar("F", bound=Callable[..., Any])

# How every kernel is compiled: without the GIL, kept on disk, C's division.
JIT: dict[str, Any] = {"nogil": True, "cache": True, "boundscheck": False, "error_model": "numpy"}


@cache
def load(family: str) -> ModuleType | None:
    """The module of that name here; None where numba is missing, which is said once."""
    if not _have_numba():
        return None
    try:
        return import_module(f"{__name__}.{family}")
    except RuntimeError:  # a place for numba's cache: the package's folder, or the user's
        if not JIT["cache"]:
            raise
        JIT["cache"] = False
        logger.warning(
            "codecs' kernels are compiled anew in every process, since numba finds no folder to "
            "keep them in; set NUMBA_CACHE_DIR to one that can be written to"
        )
        return load.__wrapped__(family)


@cache
def _have_numba() -> bool:
    try:
        import_module("numba")
    except Exception as error:  # broken installations raise all sorts
        logger.warning(
            "numba cannot be imported (%s): codecs use torch instead, some of them several times "
            "as slowly; pip install numba",
            error,
        )
        return False
    return True
