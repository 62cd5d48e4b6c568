"""int8, int4, fp8, dynamic8: kernels, torch and NumPy agree bit for bit; losses are bounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched.codecs.blocks import Blockwise, most_scale
from commsched.codecs.float8 import FORMATS, ORACLE_MAGNITUDES, ORACLE_TREE, Dynamic8, Fp8
from commsched.codecs.integer import Int4, Int8
from tests.coding import decoded, encoded, normal
from tests.coding import same_values as same

# With the kernels, and with the torch code that stands in for them.
pytestmark = pytest.mark.usefixtures("implementation")

CODECS: list[Blockwise] = [
    Int8(),
    Int8(32),
    Int4(),
    Int4(32),
    Fp8(32),
    Fp8(32, "e5m2"),
    Fp8(),
    Dynamic8(32),
    Dynamic8(),
]
SMALL = [codec for codec in CODECS if codec.block == 32]
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 3e-39, -3e-37, LARGEST, -LARGEST]
FINITE = st.floats(-1.0, 1.0, width=32) | st.floats(-LARGEST, LARGEST, width=32)
FINITE |= st.sampled_from(SPECIAL)
ALL = FINITE | st.sampled_from([float("nan"), float("inf"), -float("inf")])
SIZES = st.integers(1, 9) | st.integers(1, 300)

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: f"{c}/{c.block}")
small_codec = pytest.mark.parametrize("codec", SMALL, ids=str)
some = settings(max_examples=30, deadline=None)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    """Of any magnitudes, or of one, as gradients are."""
    scales = st.sampled_from([1e-44, 1e-38, 1e-36, 1e-20, 1.0, 1e30])
    alike = st.tuples(
        hnp.arrays(np.float32, SIZES, elements=st.floats(-1, 1, width=32)), scales
    ).map(lambda pair: pair[0] * np.float32(pair[1]))
    return hnp.arrays(np.float32, SIZES, elements=elements) | alike


def code_bytes(codec: Blockwise, wire: torch.Tensor, numel: int) -> torch.Tensor:
    return wire[4 * -(-numel // codec.block) :]


def is_sound(codec: Blockwise, array: np.ndarray) -> np.ndarray:
    """For each gradient, whether all of its block are finite."""
    blocks = [array[at : at + codec.block] for at in range(0, array.size, codec.block)]
    return np.concatenate([np.full(x.size, np.isfinite(x).all()) for x in blocks])


# ---------------------------------------------------------------- bits


@every_codec
@given(array=arrays(ALL))
@example(array=np.array([1e-45], np.float32))
@example(array=np.array([-0.0], np.float32))
@example(array=np.full(300, LARGEST, np.float32))
@some
def test_bytes_and_values_are_the_oracles(codec: Blockwise, array: np.ndarray) -> None:
    before = array.copy()
    wire = encoded(codec, torch.from_numpy(array))
    assert same(wire, codec.oracle.encode(codec, before, 0))
    assert same(torch.from_numpy(array), before)

    values = decoded(codec, wire, array.size)
    with np.errstate(invalid="ignore"):
        assert same(values, codec.oracle.decode(codec, wire.numpy(), array.size, 0))
    assert np.array_equal(np.isfinite(values.numpy()), is_sound(codec, array))


@every_codec
@pytest.mark.parametrize("scale", [1e-38, 1e-3, 1e35])
def test_many_normal_gradients_are_as_the_oracles(codec: Blockwise, scale: float) -> None:
    grad = normal(5003) * scale
    wire = encoded(codec, grad)
    assert same(wire, codec.oracle.encode(codec, grad.numpy(), 0))
    assert same(decoded(codec, wire, 5003), codec.oracle.decode(codec, wire.numpy(), 5003, 0))


@every_codec
@given(array=arrays(ALL), kept=arrays(FINITE))
@some
def test_feedback_keeps_what_encoding_drops(
    codec: Blockwise, array: np.ndarray, kept: np.ndarray
) -> None:
    grad = torch.from_numpy(array)
    error = torch.from_numpy(np.resize(kept, array.size))
    u = grad + error
    before = grad.clone()
    wire = torch.full((codec.nbytes(u.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode_feedback(grad, error, wire)
    assert same(wire, encoded(codec, u))
    lost = u - decoded(codec, wire, u.numel())
    assert same(error, torch.from_numpy(np.where(is_sound(codec, u.numpy()), lost, np.float32(0))))
    assert error.isfinite().all()
    assert same(grad, before)


@every_codec
@given(array=arrays(ALL), base=arrays(FINITE))
@some
def test_decode_add_adds_what_decode_says(
    codec: Blockwise, array: np.ndarray, base: np.ndarray
) -> None:
    wire = encoded(codec, torch.from_numpy(array))
    out = torch.from_numpy(np.resize(base, array.size).copy())
    expected = out + decoded(codec, wire, array.size)
    codec.decode_add(wire, out)
    assert same(out, expected)


@every_codec
def test_a_wire_inside_another_tensor_is_all_that_is_written(codec: Blockwise) -> None:
    grad = normal(70)
    numel = codec.nbytes(70)
    room = torch.full((numel + 8,), 0xA5, dtype=torch.uint8)
    codec.encode(grad, room[4 : 4 + numel])
    assert same(room[4 : 4 + numel], encoded(codec, grad))
    assert (room[:4] == 0xA5).all()
    assert (room[-4:] == 0xA5).all()
    assert same(decoded(codec, room[4 : 4 + numel], 70), decoded(codec, encoded(codec, grad), 70))


# ---------------------------------------------------------------- all of a format


@pytest.mark.parametrize("codec", [Fp8(65536), Fp8(65536, "e5m2"), Dynamic8(65536)], ids=str)
def test_every_cell_of_every_format_is_rounded_as_the_oracle_does(codec: Fp8 | Dynamic8) -> None:
    top = FORMATS[codec.kind].top
    cells = np.arange(0, (np.float32(top).view(np.uint32) >> 16) + 1, dtype=np.uint32)
    firsts = FORMATS[codec.kind].firsts
    for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        words = np.concatenate([(cells << 16) + low, firsts, firsts - 1]).astype(np.uint32)
        numbers = np.minimum(words.view(np.float32), np.float32(top))
        numbers[1::2] *= -1
        numbers[0] = top  # so that the scale is 1
        assert numbers.size <= codec.block
        wire = encoded(codec, torch.from_numpy(numbers))
        assert wire[:4].view(torch.float32) == 1.0
        assert same(wire, codec.oracle.encode(codec, numbers, 0))


@pytest.mark.parametrize(
    ("form", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_fp8_rounds_as_torch_casts(form: str, dtype: torch.dtype) -> None:
    numbers = normal(60000) * torch.logspace(-6, 5, 60000)
    numbers = numbers.clamp(-FORMATS[form].top, FORMATS[form].top)
    numbers[0] = FORMATS[form].top
    codec = Fp8(65536, form)
    codes = code_bytes(codec, encoded(codec, numbers), 60000)
    assert torch.equal(codes, numbers.to(dtype).view(torch.uint8))
    magnitudes = ORACLE_MAGNITUDES[form].astype(np.float32)
    assert np.array_equal(FORMATS[form].values[: magnitudes.size], magnitudes)


def test_the_tree_has_the_magnitudes_it_should() -> None:
    values = FORMATS["tree"].values
    magnitudes = values[:128]
    assert same(torch.from_numpy(magnitudes.copy()), ORACLE_TREE)
    assert same(torch.from_numpy(values[128:].copy()), -ORACLE_TREE)
    edges = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert list(np.histogram(magnitudes[1:127], edges)[0]) == [2, 4, 8, 16, 32, 64]
    assert magnitudes[[0, 1, 127]] == pytest.approx([0.0, 2.75e-6, 1.0])
    assert magnitudes[63:65] == pytest.approx([0.1 + 0.0109375 / 2, 0.1 + 0.0109375 * 3 / 2])
    assert magnitudes[95] == pytest.approx(0.45 + 0.0171875 / 2)
    assert (np.diff(magnitudes) > 0).all()


@pytest.mark.parametrize("form", FORMATS)
def test_no_cell_has_two_boundaries(form: str) -> None:
    cells = FORMATS[form].firsts >> 16
    inside = cells[FORMATS[form].firsts % 65536 != 0]
    assert (np.diff(FORMATS[form].firsts) > 0).all()
    assert np.unique(inside).size == inside.size


def test_the_trees_ends_are_where_the_paper_has_them() -> None:
    zero, one = np.float32(1.5e-6), np.float32(0.995703)
    numbers = np.array(
        [1, np.nextafter(zero, zero * 0), zero, one, np.nextafter(one, zero + 1)], np.float32
    )
    wire = encoded(Dynamic8(), torch.from_numpy(numbers))
    assert code_bytes(Dynamic8(), wire, 5)[:5].tolist() == [127, 0, 1, 126, 127]


# ---------------------------------------------------------------- layout


def test_int8_rounds_halfway_to_even() -> None:
    grad = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0])
    wire = encoded(Int8(), grad)
    assert wire[:4].view(torch.float32) == 1.0
    assert wire[4:].view(torch.int8).tolist() == [127, 0, 2, 2, 0, -2, -127, 0]


def test_int4_puts_the_first_of_two_in_the_low_half() -> None:
    wire = encoded(Int4(), torch.tensor([7.0, 1.0, -2.0, 3.0, -7.0]))
    assert wire[:4].view(torch.float32) == 1.0
    assert wire[4:].tolist() == [0x17, 0x3E, 0x09, 0]


@every_codec
def test_scales_lie_before_codes_and_sizes_fit(codec: Blockwise) -> None:
    per_byte = 2 if codec.name == "int4" else 1
    for numel in (1, 31, 32, 33, codec.block, codec.block + 1, 10 * codec.block - 3):
        exact = 4 * -(-numel // codec.block) + -(-numel // per_byte)
        assert codec.nbytes(numel) % 4 == 0
        assert 0 <= codec.nbytes(numel) - exact < 4
    assert codec.nbytes(0) == 0
    grad = torch.ones(3 * codec.block) * codec.top
    grad[codec.block : 2 * codec.block] *= 2
    wire = encoded(codec, grad)
    assert wire[:12].view(torch.float32).tolist() == [1.0, 2.0, 1.0]


# ---------------------------------------------------------------- hostile gradients


@small_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_spoils_its_block_and_no_other(codec: Blockwise, bad: float) -> None:
    grad = normal(100)
    good = decoded(codec, encoded(codec, grad), 100)
    error = torch.full((100,), 1e-3)
    grad[40] = bad
    wire = encoded(codec, grad)
    per_byte = 2 if codec.name == "int4" else 1
    assert not code_bytes(codec, wire, 100)[32 // per_byte : 64 // per_byte].any()
    found = decoded(codec, wire, 100)
    assert found[32:64].isnan().all()
    assert same(found[:32], good[:32])
    assert same(found[64:], good[64:])
    codec.encode_feedback(grad, error, wire)
    assert (error[32:64] == 0.0).all()
    assert (error[:32] != 1e-3).all()


@small_codec
@pytest.mark.parametrize("peak", [0.0, 1e-45, 2.0**-149 * 3, 1e-40, 1e-38, 1e-36])
def test_tiny_blocks_lose_nothing(codec: Blockwise, peak: float) -> None:
    """They travel, or as zeros, with all of them in the error."""
    grad = torch.linspace(-peak, peak, 33)
    error = torch.zeros(33)
    wire = torch.empty(codec.nbytes(33), dtype=torch.uint8)
    codec.encode_feedback(grad, error, wire)
    scales = wire[:8].view(torch.float32)
    assert scales.isfinite().all()
    values = decoded(codec, wire, 33)
    assert torch.allclose(values + error, grad, rtol=0, atol=2.0**-149)
    if scales[0] == 0.0:
        assert not values[:32].any()
        assert not code_bytes(codec, wire, 33)[:16].any()
        assert torch.equal(error[:32], grad[:32])


@small_codec
def test_the_largest_floats_stay_finite(codec: Blockwise) -> None:
    for peak in np.nextafter(np.float32(LARGEST), np.float32(0)), np.float32(LARGEST):
        grad = torch.full((40,), float(peak))
        grad[::2] *= -1
        found = decoded(codec, encoded(codec, grad), 40)
        assert found.isfinite().all()
        assert torch.allclose(found, grad, rtol=1e-6)


@pytest.mark.parametrize("top", [7.0, 127.0, 448.0, 57344.0, 1.0])
def test_the_largest_scale_is_the_largest(top: float) -> None:
    scale = np.float32(most_scale(top))
    with np.errstate(over="ignore"):
        above = np.nextafter(scale, np.float32(np.inf))
        assert np.isfinite(np.float32(top) * scale)
        assert above > LARGEST / np.float32(top) or np.isinf(np.float32(top) * above)


# ---------------------------------------------------------------- how much is lost

# The largest error, relative to the gradient and to the largest of its block.
BOUNDS = {
    "int8": (0.0, 0.5 / 127),
    "int4": (0.0, 0.5 / 7),
    "e4m3": (2.0**-4, 2.0**-10 / 448),
    "e5m2": (2.0**-3, 2.0**-17 / 57344),
    "tree": (0.65, 1.5e-6),
}


@small_codec
@given(array=hnp.arrays(np.float32, SIZES, elements=st.floats(-1, 1, width=32)))
@some
def test_errors_are_bounded(codec: Blockwise, array: np.ndarray) -> None:
    relative, absolute = BOUNDS[getattr(codec, "kind", codec.name)]
    found = decoded(codec, encoded(codec, torch.from_numpy(array)), array.size).numpy()
    size = np.abs(array).astype(np.float64)
    blocks = np.array([size[at : at + 32].max() for at in range(0, array.size, 32)])
    peaks = np.repeat(blocks, 32)[: array.size]
    tiny = codec.top / LARGEST  # below, blocks travel as zeros
    lost = np.abs(found.astype(np.float64) - array)
    assert (lost <= np.maximum(relative * size, absolute * peaks) + 1e-6 * peaks + tiny).all()


def test_of_normal_gradients_little_is_lost() -> None:
    grad = normal(1 << 16)
    expected = {"int8": 0.0075, "int4": 0.118, "fp8": 0.027, "dynamic8": 0.0108}
    for codec in (Int8(), Int4(), Fp8(), Dynamic8()):
        lost = decoded(codec, encoded(codec, grad), grad.numel()) - grad
        relative = float(lost.norm() / grad.norm())
        assert relative == pytest.approx(expected[codec.name], rel=0.1)


@every_codec
def test_over_steps_feedback_sends_it_all(codec: Blockwise) -> None:
    error, sent, wanted = torch.zeros(300), torch.zeros(300), torch.zeros(300)
    wire = torch.empty(codec.nbytes(300), dtype=torch.uint8)
    for step in range(50):
        grad = normal(300, step)
        codec.encode_feedback(grad, error, wire)
        codec.decode_add(wire, sent)
        wanted += grad
    assert torch.allclose(sent + error, wanted, atol=1e-4)
    assert error.abs().max() < 0.5


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("kind", [Int8, Int4, Fp8, Dynamic8])
@pytest.mark.parametrize("block", [0, -32, 16, 33, 96, 131072])
def test_blocks_of_other_sizes_are_refused(kind: type[Blockwise], block: int) -> None:
    with pytest.raises(ValueError, match=f"block={block} .*power of two from 32 to 65536"):
        kind(block=block)


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"format='tree' .*e4m3, e5m2"):
        Fp8(format="tree")


def test_codecs_say_their_options() -> None:
    assert str(Int8()) == "int8"
    assert str(Fp8(64, "e5m2")) == "fp8:block=64,format=e5m2"
    assert str(Dynamic8(1024)) == "dynamic8:block=1024"


@every_codec
def test_prepare_may_be_called_again(codec: Blockwise) -> None:
    codec.prepare()
    codec.prepare()
    assert encoded(codec, torch.ones(1)).any()
