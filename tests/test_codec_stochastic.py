"""ternary and qsgd: kernels, torch and NumPy agree bit for bit; means are right."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched.codecs import kernels
from commsched.codecs.base import ByteCodec
from commsched.codecs.draws import uniform, uniform_oracle
from commsched.codecs.stochastic import Qsgd, Ternary
from tests.coding import decoded, encoded, normal, same, same_values

# With the kernels, and with the torch code that stands in for them.
pytestmark = pytest.mark.usefixtures("implementation")

LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, LARGEST, -LARGEST, float("nan"), float("inf")]
FLOATS = st.floats(width=32) | st.sampled_from(SPECIAL)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(SPECIAL[:7])
SIZES = st.integers(1, 9) | st.integers(1, 300)
SEEDS = st.integers(0, 2**32 - 1)
CODECS = [
    Ternary(),
    Ternary(64),
    Ternary(64, 2.5),
    Ternary(4096, 1.0),
    Qsgd(),
    Qsgd(1, 64),
    Qsgd(4),
    Qsgd(100, 4096),
]
codecs = st.sampled_from(CODECS)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, SIZES, elements=elements)


def sent(codec: ByteCodec, grad: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decoded(codec, encoded(codec, grad, seed), grad.numel())


# ---------------------------------------------------------------- random numbers


def drawn(seed: int, numel: int) -> torch.Tensor:
    """As the implementation under test draws them."""
    family = kernels.load("stochastic")
    if family is None:
        return uniform(seed, torch.arange(numel))
    out = torch.empty(numel)
    family.uniform(seed, out.numpy())
    return out


@given(SEEDS, st.integers(1, 200))
@example(0, 100)
@example(2**32 - 1, 100)
@example(0x9E3779B9, 1)
@settings(max_examples=40)
def test_all_draw_the_same_numbers(seed: int, numel: int) -> None:
    numbers = drawn(seed, numel)
    assert same(numbers, uniform_oracle(seed, np.arange(numel, dtype=np.uint32)))
    assert same(numbers, uniform(seed, torch.arange(numel)))
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_the_numbers_by_hand() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    seed = 3_000_000_000
    expected = [(mix(i ^ mix(seed ^ 0x9E3779B9)) >> 8) / 2**24 for i in range(50)]
    assert drawn(seed, 50).tolist() == expected


def test_indices_count_in_32_bits() -> None:
    index = torch.tensor([2**31 + 5, 2**32 - 1, 2**32 + 7])
    expected = uniform_oracle(9, (index.numpy() % 2**32).astype(np.uint32))
    assert same(uniform(9, index), expected)


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**32 - 1])
def test_numbers_are_uniform(seed: int) -> None:
    numbers = drawn(seed, 1 << 18)
    counts = torch.histc(numbers, 256, 0.0, 1.0)
    chi2 = ((counts - 1024) ** 2 / 1024).sum()  # of 255 degrees: 255 on average, deviation 22.6
    assert 142 < chi2 < 368
    low_bits = (numbers * 2**24).to(torch.int32) & 255
    counts = torch.bincount(low_bits, minlength=256).float()
    assert 142 < ((counts - 1024) ** 2 / 1024).sum() < 368


@pytest.mark.parametrize("other", [1, 2, 256, 65536, 2**31])
def test_seeds_and_neighbours_are_not_correlated(other: int) -> None:
    numel = 1 << 16
    one, two = drawn(7, numel).double() - 0.5, drawn(7 ^ other, numel).double() - 0.5
    limit = 5 / 12 / numel**0.5  # standard error of a mean of products: 1/12 over the root of n
    assert abs((one * two).mean()) < limit
    for lag in (1, 2, 16, 256):
        assert abs((one[lag:] * one[:-lag]).mean()) < limit
        assert abs((one[lag:] * two[:-lag]).mean()) < limit


def test_one_element_is_uniform_over_seeds() -> None:
    numbers = torch.cat([uniform(seed, torch.tensor([0, 1000])) for seed in range(2048)])
    counts = torch.histc(numbers, 32, 0.0, 1.0)
    assert ((counts - 128) ** 2 / 128).sum() < 31 + 5 * 7.9


# ---------------------------------------------------------------- bits


@given(codecs, arrays(FLOATS), SEEDS)
@example(Ternary(64), np.full(1, 1e-45, np.float32), 0)
@example(Qsgd(), np.full(200, LARGEST, np.float32), 0)
@example(Qsgd(), np.full(1, 1e-45, np.float32), 0)
@settings(max_examples=60)
def test_bytes_and_values_are_the_oracles(codec: ByteCodec, array: np.ndarray, seed: int) -> None:
    before = array.copy()
    wire = encoded(codec, torch.from_numpy(array), seed)
    expected = codec.oracle.encode(codec, before, seed)
    assert same(wire, expected)
    assert same(torch.from_numpy(array), before)
    values = codec.oracle.decode(codec, expected, array.size, seed)
    assert same_values(decoded(codec, wire, array.size), values)


@every_codec
@pytest.mark.parametrize("numel", [63, 64, 65, 257, 9001])
def test_long_inputs_are_the_oracles(codec: ByteCodec, numel: int) -> None:
    grad = normal(numel) * torch.exp(8 * normal(numel, 1))
    wire = encoded(codec, grad, numel)
    assert same(wire, codec.oracle.encode(codec, grad.numpy(), numel))
    assert same(decoded(codec, wire, numel), codec.oracle.decode(codec, wire.numpy(), numel, numel))


@given(codecs, arrays(FLOATS), SEEDS)
@settings(max_examples=30)
def test_feedback_is_encode_of_the_sum_and_keeps_the_rest(
    codec: ByteCodec, array: np.ndarray, seed: int
) -> None:
    grad, error = torch.from_numpy(array), normal(array.size, seed)
    total = grad + error
    wire = torch.empty(codec.nbytes(array.size), dtype=torch.uint8)
    codec.encode_feedback(grad, error, wire, seed)
    assert same(wire, encoded(codec, total, seed))
    left = total - decoded(codec, wire, array.size)
    assert same(error, torch.where(left.isfinite(), left, 0.0))


@given(codecs, arrays(FLOATS), SEEDS)
@settings(max_examples=30)
def test_decode_add_is_decode_and_one_addition(
    codec: ByteCodec, array: np.ndarray, seed: int
) -> None:
    out = normal(array.size, seed)
    wire = encoded(codec, torch.from_numpy(array), seed)
    expected = out + decoded(codec, wire, array.size)
    codec.decode_add(wire, out)
    assert same_values(out, expected)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("codec", "numel", "nbytes"),
    [
        (Ternary(), 0, 0),
        (Ternary(), 1, 8),
        (Ternary(), 16, 8),
        (Ternary(), 17, 12),
        (Ternary(), 256, 68),
        (Ternary(), 257, 76),
        (Ternary(64), 256, 80),
        (Qsgd(), 0, 0),
        (Qsgd(), 1, 8),
        (Qsgd(), 4, 8),
        (Qsgd(), 5, 12),
        (Qsgd(), 128, 132),
        (Qsgd(), 129, 140),
        (Qsgd(block=1024), 1024, 1028),
    ],
)
def test_sizes(codec: ByteCodec, numel: int, nbytes: int) -> None:
    assert codec.nbytes(numel) == nbytes


def test_the_format_of_ternary_by_hand() -> None:
    wire = encoded(Ternary(), torch.tensor([2.0, -2.0, 0.0, -0.0, -2.0]))
    assert wire[:4].view(torch.float32).item() == 2
    assert wire[4:].tolist() == [0b00_00_10_01, 0b10, 0, 0]


def test_the_format_of_qsgd_by_hand() -> None:
    wire = encoded(Qsgd(levels=5), torch.tensor([3.0, -4.0, -0.0, 0.0, 0.0]))
    assert wire[:4].view(torch.float32).item() == 5
    assert wire[4:].view(torch.int8)[:5].tolist() == [3, -4, 0, 0, 0]
    assert wire[9:].tolist() == [0, 0, 0]


@every_codec
def test_slices_of_a_larger_tensor_are_taken_where_they_lie(codec: ByteCodec) -> None:
    whole, nbytes = normal(500), codec.nbytes(203)
    wires = torch.full((nbytes + 8,), 9, dtype=torch.uint8)
    codec.encode(whole[7:210], wires[4 : 4 + nbytes])
    wire = wires[4 : 4 + nbytes].clone()
    assert same(wire, encoded(codec, whole[7:210].clone()))
    assert set(wires[:4].tolist() + wires[4 + nbytes :].tolist()) == {9}
    out = torch.full((500,), 3.0)
    codec.decode(wire, out[13:216])
    assert set(out[:13].tolist() + out[216:].tolist()) == {3.0}
    assert same(out[13:216].clone(), decoded(codec, wire, 203))


# ---------------------------------------------------------------- what they mean


@every_codec
def test_equal_seeds_give_equal_bytes_and_others_do_not(codec: ByteCodec) -> None:
    grad = normal(1000)
    assert same(encoded(codec, grad, 5), encoded(codec, grad, 5))
    assert not same(encoded(codec, grad, 5), encoded(codec, grad, 6))


@pytest.mark.parametrize("codec", [Ternary(), Qsgd(), Qsgd(1), Qsgd(7, 64)], ids=str)
def test_the_mean_over_seeds_is_the_gradient(codec: Ternary | Qsgd) -> None:
    grad, draws = normal(300), 1000
    mean = torch.stack([sent(codec, grad, seed) for seed in range(draws)]).double().mean(0)
    # Rounding |x| = (n + f) steps up with chance f has the variance f * (1 - f) steps squared.
    heads = encoded(codec, grad)[: 4 * -(-300 // codec.block)].view(torch.float32)
    step = heads.double().repeat_interleave(codec.block)[:300] / getattr(codec, "levels", 1)
    part = (grad.abs() / step).frac()
    variance = part * (1 - part) * step**2 / draws
    bias = mean - grad
    assert (bias.abs() <= 5 * variance.sqrt() + 1e-6 * step).all()
    assert bias.sum().abs() <= 5 * variance.sum().sqrt()
    assert (bias * grad.sign()).sum().abs() <= 5 * variance.sum().sqrt()
    assert 0.7 < (bias.square().sum() / variance.sum()) < 1.3  # as noisy as it must be


def test_ternary_hits_as_often_as_it_should() -> None:
    grad = torch.tensor([4.0, 1.0, -2.0, 3.0, -4.0, 0.0])
    values = torch.stack([sent(Ternary(), grad, seed) for seed in range(4000)])
    assert set(values.unique().tolist()) == {-4.0, 0.0, 4.0}
    chance = (values != 0).double().mean(0)
    expected = grad.double().abs() / 4
    assert ((chance - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()


@given(arrays(FINITE), SEEDS, st.sampled_from([1, 5, 127]))
def test_qsgd_is_off_by_less_than_a_level(array: np.ndarray, seed: int, levels: int) -> None:
    codec, grad = Qsgd(levels, 512), torch.from_numpy(array)
    wire = encoded(codec, grad, seed)
    norm = wire[:4].view(torch.float32).double()
    values = decoded(codec, wire, array.size)
    assert values.isfinite().all()
    assert ((values.double() - grad).abs() <= norm / levels + 1e-6 * norm + 1e-45).all()


@given(arrays(FINITE), SEEDS)
def test_ternary_keeps_the_largest_exactly(array: np.ndarray, seed: int) -> None:
    grad = torch.from_numpy(array)
    values = sent(Ternary(512), grad, seed)
    top = grad.abs() == grad.abs().max()
    assert torch.equal(values[top], grad[top])
    assert torch.isin(values.abs(), torch.tensor([0.0, grad.abs().max()])).all()


@every_codec
def test_one_gradient_alone_is_kept(codec: ByteCodec) -> None:
    for value in (1e-45, -1e-42, LARGEST, -LARGEST, 0.0):
        assert sent(codec, torch.tensor([value])).tolist() == torch.tensor([value]).tolist()


@every_codec
def test_large_gradients_stay_finite(codec: ByteCodec) -> None:
    for numel in (1, 70, 300):
        assert sent(codec, torch.full((numel,), LARGEST), 3).isfinite().all()


@every_codec
def test_a_block_that_is_not_finite_is_nan_and_leaves_no_error(codec: Ternary | Qsgd) -> None:
    for bad, at in itertools.product([float("nan"), float("inf"), -float("inf")], [0, 127, 130]):
        grad, error = normal(131), normal(131, 1)
        grad[at] = bad
        wire = torch.empty(codec.nbytes(131), dtype=torch.uint8)
        codec.encode_feedback(grad, error, wire, 1)
        block = torch.arange(131) // codec.block == at // codec.block
        assert torch.equal(decoded(codec, wire, 131).isnan(), block)
        assert not error[block].any()
        assert error.isfinite().all()


def test_clipping_cuts_to_deviations_from_zero() -> None:
    grad = torch.full((64,), 1.0)
    grad[5] = -100.0
    root_mean_square = (grad.double().square().sum() / 64).sqrt()
    values = sent(Ternary(64, 2.5), grad, 1)
    assert values[5].item() == -(2.5 * root_mean_square).float().item()
    assert torch.equal(sent(Ternary(64, 2.5), grad[:5], 1), grad[:5])  # nothing to cut


def test_clipping_is_a_bias_and_so_feeds_errors_back() -> None:
    assert not Ternary().biased
    assert not Ternary.biased
    assert Ternary(clip=2.5).biased
    assert Ternary(clip=2.5) == Ternary(256, 2.5)
    assert str(Ternary(clip=2.5)) == "ternary:clip=2.5"


@pytest.mark.parametrize("block", [0, 32, 100, 131072, -64])
def test_other_block_sizes_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"ternary: .*power of two from 64 to 65536"):
        Ternary(block)
    with pytest.raises(ValueError, match=r"qsgd: .*power of two from 64 to 65536"):
        Qsgd(block=block)


@pytest.mark.parametrize("clip", [-1.0, 0.5, float("nan"), float("inf")])
def test_other_clips_are_refused(clip: float) -> None:
    with pytest.raises(ValueError, match=r"must be 0 .* or at least 1"):
        Ternary(clip=clip)


@pytest.mark.parametrize("levels", [0, -1, 128])
def test_other_levels_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match=r"from 1 to 127"):
        Qsgd(levels)


@every_codec
def test_prepare_may_be_called_again(codec: ByteCodec) -> None:
    codec.prepare()
    codec.prepare()
    assert sent(codec, torch.ones(1)).tolist() == [1.0]
