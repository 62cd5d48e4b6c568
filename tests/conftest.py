"""Makes ``from tests.distributed import ...`` work everywhere and closes the rank pools."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Registered by hand: it then depends neither on the import mode nor on the
# repository root being on sys.path (`pytest` does not put it there), and a
# stray top-level `tests` in site-packages cannot win.
_TESTS = str(Path(__file__).resolve().parent)
if _TESTS not in [str(path) for path in getattr(sys.modules.get("tests"), "__path__", [])]:
    _package = sys.modules["tests"] = ModuleType("tests")
    _package.__path__ = [_TESTS]

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from commsched.codecs import kernels  # noqa: E402
from tests import distributed  # noqa: E402

# What a shell puts into the background ignores Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("calm", deadline=None, max_examples=50)
hypothesis.settings.load_profile("calm")


@pytest.fixture(params=["numba", "torch"], scope="module")
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """A module's tests twice: with the kernels, and with the torch code that stands in for them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(kernels, "load", lambda _: None)
        else:
            assert kernels.load("select") is not None  # numba is installed
        yield request.param


def pytest_sessionfinish() -> None:
    """Also runs when the session is interrupted (Ctrl-C, ``pytest.exit``)."""
    distributed.close_pools()
