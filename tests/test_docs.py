"""What the documents show works as they show it."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched import codecs
from tests.averaging import World

NAMES = codecs.names()
TEXT = (Path(__file__).parents[1] / "docs" / "codecs.md").read_text()


@pytest.fixture(scope="module")
def natural() -> Iterator[codecs.Sharded]:
    """The codec of docs/codecs.md, from its text."""
    (source,) = re.findall(r"```python\n(\"\"\"natural.*?)```", TEXT, re.DOTALL)
    before = dict(codecs._CODECS)
    module = types.ModuleType("natural")
    sys.modules["natural"] = module  # where the dataclass looks
    exec(compile(source, "docs/codecs.md", "exec"), module.__dict__)
    found = codecs.get("natural")
    assert isinstance(found, codecs.Sharded)
    yield found
    codecs._CODECS.clear()
    codecs._CODECS.update(before)
    codecs.get.cache_clear()
    del sys.modules["natural"]


@given(
    x=hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32)),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_the_example_codec_is_its_oracles(
    natural: codecs.Sharded, x: np.ndarray, seed: int
) -> None:
    assert natural.oracle is not None
    wire = torch.empty(natural.nbytes(len(x)), dtype=torch.uint8)
    natural.encode(torch.from_numpy(x), wire, seed)
    assert np.array_equal(wire.numpy(), natural.oracle.encode(natural, x, seed))
    out = torch.empty(len(x))
    natural.decode(wire, out)
    theirs = natural.oracle.decode(natural, wire.numpy(), len(x), seed)
    assert np.array_equal(out.numpy(), theirs, equal_nan=True)


def test_the_example_codec_averages(natural: codecs.Sharded) -> None:
    world = World(natural, 3)
    grads = [torch.randn(500, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    mean = torch.stack(grads).mean(0)
    results = []
    for _ in range(300):
        first, *others = world.average(grads)
        assert all(torch.equal(first, other) for other in others)
        results.append(first)
    rows = torch.stack(results).double()
    assert bool(((rows.mean(0) - mean).abs() <= 5 * rows.std(0) / 300**0.5 + 1e-6).all())


def test_all_codecs_are_in_the_table() -> None:
    table, _, _ = TEXT.partition("\n## ")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(NAMES)
