"""The sign codec: kernels, torch and NumPy agree bit for bit; what it does is what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commsched.codecs.lanes import lane_sum, lane_sums
from commsched.codecs.sign import Sign
from tests.coding import decoded, encoded, normal, same

# With the kernels, and with the torch code that stands in for them.
pytestmark = pytest.mark.usefixtures("implementation")

BLOCKS = [64, 1024, 65536]
LARGEST = float(np.finfo(np.float32).max)
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-40, LARGEST, -LARGEST, float("nan"), float("inf")]
FLOATS = st.floats(width=32) | st.sampled_from(SPECIAL)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from(SPECIAL[:7])
SIZES = st.integers(1, 9) | st.integers(1, 300)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.float32, SIZES, elements=elements)


# ---------------------------------------------------------------- bits


@given(arrays(FLOATS), st.sampled_from(BLOCKS))
@example(np.full(1, 1e-45, np.float32), 64)
@example(np.full(200, LARGEST, np.float32), 64)
@settings(max_examples=30)
def test_bytes_and_values_are_the_oracles(array: np.ndarray, block: int) -> None:
    codec = Sign(block)
    before = array.copy()
    wire = encoded(codec, torch.from_numpy(array))
    expected = Sign.oracle.encode(codec, before, 0)
    assert same(wire, expected)
    assert same(torch.from_numpy(array), before)
    assert same(
        decoded(codec, wire, array.size), Sign.oracle.decode(codec, expected, array.size, 0)
    )


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("numel", [63, 64, 65, 1023, 1025, 70_001])
def test_long_inputs_are_the_oracles(block: int, numel: int) -> None:
    codec, grad = Sign(block), normal(numel) * torch.exp(8 * normal(numel, 1))
    wire = encoded(codec, grad)
    assert same(wire, Sign.oracle.encode(codec, grad.numpy(), 0))
    assert same(decoded(codec, wire, numel), Sign.oracle.decode(codec, wire.numpy(), numel, 0))


@given(arrays(FLOATS), st.sampled_from(BLOCKS), st.integers(0, 99))
@settings(max_examples=30)
def test_feedback_is_encode_of_the_sum_and_keeps_the_rest(
    array: np.ndarray, block: int, seed: int
) -> None:
    codec, grad, error = Sign(block), torch.from_numpy(array), normal(array.size, seed)
    total = grad + error
    wire = torch.empty(codec.nbytes(array.size), dtype=torch.uint8)
    codec.encode_feedback(grad, error, wire)
    assert same(wire, encoded(codec, total))
    left = total - decoded(codec, wire, array.size)
    assert same(error, torch.where(left.isfinite(), left, 0.0))


@given(arrays(FLOATS), st.integers(0, 99))
@settings(max_examples=30)
def test_decode_add_is_decode_and_one_addition(array: np.ndarray, seed: int) -> None:
    codec, out = Sign(64), normal(array.size, seed)
    wire = encoded(codec, torch.from_numpy(array))
    expected = out + decoded(codec, wire, array.size)
    codec.decode_add(wire, out)
    assert torch.equal(out.isnan(), expected.isnan())
    assert same(out.nan_to_num(), expected.nan_to_num())


@given(st.integers(1, 400), st.integers(0, 99))
@settings(max_examples=30)
def test_lane_sums_are_lane_sum_of_each_row(numel: int, seed: int) -> None:
    terms = torch.zeros(2, -(-numel // 64) * 64, dtype=torch.float64)
    terms[:, :numel] = normal(2 * numel, seed).double().view(2, -1).exp() ** 20
    expected = [lane_sum(row[:numel].numpy()) for row in terms]
    assert lane_sums(terms).tolist() == expected


# ---------------------------------------------------------------- what it means


def test_the_format_by_hand() -> None:
    grad = torch.tensor([1.0, -2.0, 3.0, -0.0, 0.0, -4.0, 5.0, 6.0, -7.0])
    wire = encoded(Sign(), grad)
    assert wire[:4].view(torch.float32).item() == torch.tensor(28 / 9).item()
    assert wire[4:].tolist() == [0b00101010, 0b1, 0, 0]
    assert (decoded(Sign(), wire, 9) / wire[:4].view(torch.float32)).tolist() == [
        1, -1, 1, -1, 1, -1, 1, 1, -1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("block", "numel", "nbytes"),
    [
        (1024, 0, 0),
        (1024, 1, 8),
        (1024, 32, 8),
        (1024, 33, 12),
        (1024, 1024, 132),
        (1024, 1025, 140),
        (64, 1024, 192),
    ],
)
def test_sizes(block: int, numel: int, nbytes: int) -> None:
    assert Sign(block).nbytes(numel) == nbytes


@pytest.mark.parametrize("value", [1e-45, -1e-42, LARGEST, -LARGEST, 0.0])
@pytest.mark.parametrize("numel", [1, 63, 65, 1025])
def test_equal_magnitudes_lose_nothing(value: float, numel: int) -> None:
    grad = torch.full((numel,), value)
    error, wire = torch.zeros(numel), torch.empty(Sign().nbytes(numel), dtype=torch.uint8)
    Sign().encode_feedback(grad, error, wire)
    assert same(decoded(Sign(), wire, numel), grad)
    assert not error.any()


@given(arrays(FINITE))
def test_finite_stays_finite(array: np.ndarray) -> None:
    wire = encoded(Sign(64), torch.from_numpy(array))
    assert decoded(Sign(64), wire, array.size).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [64, 127, 130])
def test_a_block_that_is_not_finite_is_nan_and_leaves_no_error(bad: float, at: int) -> None:
    grad, error = normal(131), normal(131, 1)
    grad[at] = bad
    wire = torch.empty(Sign(64).nbytes(131), dtype=torch.uint8)
    Sign(64).encode_feedback(grad, error, wire)
    block = torch.arange(131) // 64 == at // 64
    values = decoded(Sign(64), wire, 131)
    assert torch.equal(values.isnan(), block)
    assert torch.equal(error == 0, block)


def test_an_overflow_of_gradient_plus_error_is_not_hidden() -> None:
    grad = torch.full((3,), LARGEST)
    error, wire = grad.clone(), torch.empty(Sign().nbytes(3), dtype=torch.uint8)
    Sign().encode_feedback(grad, error, wire)
    assert decoded(Sign(), wire, 3).isnan().all()
    assert error.tolist() == [0, 0, 0]


def test_with_feedback_the_mean_of_what_is_sent_comes_to_the_gradient() -> None:
    grad = normal(3000)
    error, sent, steps = torch.zeros(3000), torch.zeros(3000), 400
    wire = torch.empty(Sign(64).nbytes(3000), dtype=torch.uint8)
    for _ in range(steps):
        Sign(64).encode_feedback(grad, error, wire)
        Sign(64).decode_add(wire, sent)
    torch.testing.assert_close(sent + error, steps * grad, rtol=1e-4, atol=1e-2)
    assert (sent / steps - grad).abs().mean() < 0.02


def test_slices_of_a_larger_tensor_are_taken_where_they_lie() -> None:
    whole, wires = normal(500), torch.full((200,), 9, dtype=torch.uint8)
    nbytes = Sign(64).nbytes(203)
    Sign(64).encode(whole[7:210], wires[4 : 4 + nbytes])
    assert same(wires[4 : 4 + nbytes].clone(), encoded(Sign(64), whole[7:210].clone()))
    assert set(wires[:4].tolist() + wires[4 + nbytes :].tolist()) == {9}
    out = torch.zeros(500)
    Sign(64).decode(wires[4 : 4 + nbytes], out[13:216])
    assert not out[:13].any()
    assert not out[216:].any()
    assert torch.equal(out[13:216].sign(), whole[7:210].sign())


@pytest.mark.parametrize("block", [0, 32, 100, 131072, -64])
def test_other_block_sizes_are_refused(block: int) -> None:
    with pytest.raises(ValueError, match="power of two from 64 to 65536"):
        Sign(block)


def test_prepare_may_be_called_again() -> None:
    Sign().prepare()
    Sign().prepare()
    assert str(Sign()) == "sign"
    assert str(Sign(64)) == "sign:block=64"
