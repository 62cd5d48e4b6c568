"""Memory: numbers keep to their gradients, however chunks are cut; none is lost or doubled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commsched.layout import Span
from commsched.memory import Memory

Range = tuple[str, int, int, int]  # parameter, its elements, first of them, how many
SIZES = {"a": 7, "b": 1, "c": 12, "d": 4}
TOTAL = sum(SIZES.values())


def spans_of(ranges: Sequence[Range]) -> tuple[Span, ...]:
    """One chunk of these ranges, in that order."""
    spans, start = [], 0
    for param, param_numel, param_start, numel in ranges:
        spans.append(Span(param, param_numel, param_start, start, numel))
        start += numel
    return tuple(spans)


def whole(*params: str) -> tuple[Span, ...]:
    return spans_of([(param, SIZES[param], 0, SIZES[param]) for param in params])


def part(param: str, start: int, numel: int, of: int | None = None) -> tuple[Span, ...]:
    return spans_of([(param, of or SIZES[param], start, numel)])


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[Span, ...]]:
    """All gradients in chunks: parameters in some order, cut anywhere; some may be left out."""
    order = draw(st.permutations(list(SIZES)))
    bounds = sorted(draw(st.sets(st.integers(1, TOTAL - 1), max_size=6)))
    rows: list[list[Range]] = [[]]
    place = 0
    for param in order:
        start = 0
        while start < SIZES[param]:
            until = next((bound for bound in bounds if bound > place), TOTAL)
            taken = min(SIZES[param] - start, until - place)
            rows[-1].append((param, SIZES[param], start, taken))
            start, place = start + taken, place + taken
            if place == until:
                rows.append([])
    chunks = [spans_of(row) for row in rows if row]
    return [chunk for chunk in chunks if draw(st.integers(0, 5))]


def blank() -> dict[str, torch.Tensor]:
    return {param: torch.zeros(numel) for param, numel in SIZES.items()}


def of(truth: dict[str, torch.Tensor], spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([truth[s.param][s.param_start : s.param_start + s.numel] for s in spans])


def assert_holds(memory: Memory, name: str, truth: dict[str, torch.Tensor]) -> None:
    kept = memory.slots().get(name, {})
    for param, numbers in truth.items():
        assert torch.equal(kept.get(param, torch.zeros_like(numbers)), numbers), (name, param)


# ---------------------------------------------------------------- anything may be cut anew


@given(
    st.lists(st.tuples(cuts(), st.sampled_from(["error", "momentum"])), max_size=7), st.booleans()
)
def test_numbers_stay_with_their_gradients_through_any_cuts(
    steps: list[tuple[list[tuple[Span, ...]], str]], reload: bool
) -> None:
    """What a codec finds in a slot is what was left for these very gradients, however cut then."""
    memory = Memory()
    truth = {"error": blank(), "momentum": blank()}
    value = 0.0
    for chunks, name in steps:
        for spans in chunks:
            flat = memory.slot(name, spans)
            assert (flat.dtype, flat.dim(), flat.is_contiguous()) == (torch.float32, 1, True)
            assert torch.equal(flat, of(truth[name], spans))
            value += 1
            flat.add_(torch.arange(value, value + len(flat)))
            for span in spans:
                mine = truth[name][span.param][span.param_start : span.param_start + span.numel]
                mine.copy_(flat[span.start : span.start + span.numel])
        for each, numbers in truth.items():
            assert_holds(memory, each, numbers)
        if reload:
            copy = Memory()
            copy.set_slots(memory.slots())
            memory = copy


@given(cuts(), cuts())
def test_the_sum_over_all_is_kept(
    first: list[tuple[Span, ...]], second: list[tuple[Span, ...]]
) -> None:
    memory = Memory()
    given_ = 0.0
    for spans in first:
        flat = memory.slot("error", spans).fill_(1.0)
        given_ += float(flat.sum())
    for spans in second:
        memory.slot("error", spans)
    kept = memory.slots().get("error", {})
    assert sum(float(numbers.sum()) for numbers in kept.values()) == given_


# ---------------------------------------------------------------- one by one


def test_a_slot_begins_with_zeros_and_is_the_same_tensor_again() -> None:
    memory = Memory()
    flat = memory.slot("error", whole("a", "c"))
    assert flat.tolist() == [0.0] * 19
    flat.fill_(3.0)
    assert memory.slot("error", list(whole("a", "c"))) is flat  # kernels write into it in place


def test_slots_of_other_names_are_apart() -> None:
    memory = Memory()
    memory.slot("error", whole("a")).fill_(1.0)
    assert not memory.slot("momentum", whole("a")).any()
    memory.slot("momentum", part("a", 2, 3)).fill_(2.0)
    assert memory.slot("error", whole("a")).tolist() == [1.0] * 7
    assert memory.slots()["momentum"]["a"].tolist() == [0, 0, 2, 2, 2, 0, 0]


def test_neighbours_do_not_disturb_each_other() -> None:
    """Two halves of one parameter, and a third chunk of another: all stay where they are."""
    memory = Memory()
    first = memory.slot("error", part("a", 0, 4)).fill_(1.0)
    second = memory.slot("error", part("a", 4, 3)).fill_(2.0)
    memory.slot("error", whole("c"))
    assert memory.slot("error", part("a", 0, 4)) is first
    assert memory.slot("error", part("a", 4, 3)) is second


def test_one_element_in_common_is_an_overlap() -> None:
    memory = Memory()
    memory.slot("error", part("a", 0, 4)).copy_(torch.arange(4.0))
    assert memory.slot("error", part("a", 3, 4)).tolist() == [3, 0, 0, 0]
    assert memory.slots()["error"]["a"].tolist() == [0, 1, 2, 3, 0, 0, 0]
    assert memory.slot("error", part("a", 0, 3)).tolist() == [0, 1, 2]


def test_what_the_new_chunk_does_not_carry_waits_for_later() -> None:
    """A fused bucket that is missing in one step keeps its errors until it comes again."""
    memory = Memory()
    memory.slot("error", whole("a", "b", "d")).copy_(torch.arange(1.0, 13.0))
    memory.slot("error", whole("a", "d")).add_(100.0)
    assert memory.slots()["error"]["b"].tolist() == [8.0]
    flat = memory.slot("error", whole("a", "b", "d"))
    assert flat.tolist() == [*range(101, 108), 8, *range(109, 113)]


def test_the_order_of_parameters_may_change() -> None:
    memory = Memory()
    memory.slot("error", whole("b", "d")).copy_(torch.arange(5.0))
    assert memory.slot("error", whole("d", "b")).tolist() == [1, 2, 3, 4, 0]


def test_numbers_that_are_not_finite_are_moved_like_others() -> None:
    memory = Memory()
    memory.slot("error", whole("d")).copy_(torch.tensor([float("nan"), 1.0, float("inf"), -0.0]))
    moved = memory.slot("error", part("d", 0, 3))
    assert moved.isnan().tolist() == [True, False, False]
    assert moved[1:].tolist() == [1.0, float("inf")]


# ---------------------------------------------------------------- out and in again


def test_slots_are_copies() -> None:
    memory = Memory()
    memory.slot("error", whole("d")).fill_(1.0)
    memory.slots()["error"]["d"].fill_(9.0)
    assert memory.slots()["error"]["d"].tolist() == [1.0] * 4
    taken = memory.slots()
    memory.slot("error", whole("d")).fill_(5.0)
    assert taken["error"]["d"].tolist() == [1.0] * 4
    given_ = {"error": {"d": torch.ones(4)}}
    memory.set_slots(given_)
    given_["error"]["d"].fill_(7.0)
    assert memory.slot("error", whole("d")).tolist() == [1.0] * 4
    memory.slot("error", whole("d")).fill_(8.0)
    assert given_["error"]["d"].tolist() == [7.0] * 4


def test_setting_replaces_all_that_was_there() -> None:
    memory = Memory()
    old = memory.slot("error", whole("a", "b")).fill_(1.0)
    memory.slot("momentum", whole("a")).fill_(2.0)
    memory.set_slots({"error": {"b": torch.tensor([5.0])}})
    assert memory.slots() == {"error": {"b": torch.tensor([5.0])}}
    assert memory.slot("error", whole("a", "b")).tolist() == [0.0] * 7 + [5.0]
    assert memory.slot("error", whole("a", "b")) is not old
    memory.set_slots({})
    assert memory.slots() == {}


def test_nothing_kept_is_nothing_said() -> None:
    assert Memory().slots() == {}
    assert Memory().step == -1
    assert dict(Memory().factors) == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_other_dtypes_and_shapes_become_flat_float32(dtype: torch.dtype) -> None:
    memory = Memory()
    memory.set_slots({"error": {"d": torch.arange(4).to(dtype).view(2, 2)}})
    flat = memory.slot("error", whole("d"))
    assert flat.dtype == torch.float32
    assert flat.tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- of another model

OTHER_SIZES = [1, 3, 4, 12]


@pytest.mark.parametrize("numel", OTHER_SIZES)
def test_what_was_kept_for_a_parameter_of_another_size_is_ignored(numel: int) -> None:
    memory = Memory()
    memory.set_slots({"error": {"a": torch.ones(numel), "d": torch.full((4,), 2.0)}})
    assert memory.slot("error", whole("a", "d")).tolist() == [0.0] * 7 + [2.0] * 4
    memory.slot("error", whole("a", "d")).add_(1.0)
    assert memory.slot("error", part("a", 2, 5)).tolist() == [1.0] * 5


@pytest.mark.parametrize("numel", OTHER_SIZES)
def test_and_it_does_not_come_out_again(numel: int) -> None:
    memory = Memory()
    memory.set_slots({"error": {"a": torch.ones(numel)}})
    memory.slot("error", whole("a")).fill_(3.0)
    kept = memory.slots()["error"]["a"]
    assert kept.tolist() == [3.0] * 7


def test_a_parameter_that_changes_its_size_starts_anew() -> None:
    memory = Memory()
    memory.slot("error", part("a", 0, 7)).fill_(1.0)
    assert memory.slot("error", part("a", 0, 9, of=9)).tolist() == [0.0] * 9
    memory.slot("error", part("a", 0, 9, of=9)).fill_(2.0)
    assert memory.slot("error", part("a", 3, 6, of=9)).tolist() == [2.0] * 6
    assert memory.slots()["error"]["a"].tolist() == [2.0] * 9
