"""Plan: JSON both ways, printable, frozen; policies are pure; ranks agree on rank 0's."""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commsched import codecs, policies
from commsched.codecs import ByteCodec, Summed
from commsched.cutting import cut
from commsched.errors import CommSchedError
from commsched.layout import BucketSpec, Chunk, Layout, ParamSpec, Piece
from commsched.plan import Plan, Task, agree
from commsched.policies import fifo
from commsched.profile import Profile
from commsched.rules import chunks_of, codec_of, used
from commsched.settings import MB, Settings
from tests.mixed import mixed_settings, registered, shaped

DTYPES = ("float32", "float64", "float16", "int64", "complex64")


def bucket(name: str, *numels: int, dtype: str = "float32", sparse: bool = False) -> BucketSpec:
    params = tuple(ParamSpec(f"{name}.{at}", numel) for at, numel in enumerate(numels))
    return BucketSpec(params, dtype, sparse)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rows = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 600), max_size=4), st.sampled_from(DTYPES), st.booleans()
            ),
            max_size=6,
        )
    )
    return Layout(
        tuple(
            bucket(f"layer{index}", *numels, dtype=dtype, sparse=sparse and dtype == "float32")
            for index, (numels, dtype, sparse) in enumerate(rows)
        )
    )


@st.composite
def effective_settings(draw: st.DrawFn) -> Settings:
    sizes = st.floats(64 / MB, 4096 / MB)
    return Settings(
        policy=draw(st.sampled_from(policies.names())),
        codec=draw(st.sampled_from(codecs.names())),
        chunk_mb=draw(sizes),
        fusion_mb=draw(sizes | st.just(0.0)),
        credit_mb=draw(sizes | st.just(0.0)),
    )


@pytest.fixture(scope="module", autouse=True)
def made_up_codecs() -> Iterator[None]:
    with registered():
        yield


def blank(layout: Layout) -> Profile:
    return Profile.unmeasured(layout, 2)


def plan_of(layout: Layout, chosen: Settings) -> Plan:
    return policies.get(chosen.policy)(blank(layout), chosen)


any_layout = layouts() | shaped()
any_settings = effective_settings() | mixed_settings()
any_plan = st.builds(plan_of, any_layout, any_settings)
LAYOUT = Layout((bucket("head", 30, 4), bucket("body", 900), bucket("table", 50, sparse=True)))
SMALL = Settings(policy="fifo", chunk_mb=1024 / MB, fusion_mb=256 / MB, codec="bf16")


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("name", policies.names())
@given(layout=any_layout, chosen=any_settings)
@settings(deadline=None)
def test_policies_are_pure(name: str, layout: Layout, chosen: Settings) -> None:
    policy = policies.get(name)
    first = policy(blank(layout), chosen)
    again = policy(*pickle.loads(pickle.dumps((blank(layout), chosen))))
    assert again == first
    assert again.digest == first.digest
    assert first.policy == name
    assert first.layout == layout


@pytest.mark.parametrize("name", policies.names())
@given(layout=any_layout, chosen=any_settings)
@settings(deadline=None)
def test_plans_carry_every_element_once(name: str, layout: Layout, chosen: Settings) -> None:
    plan = policies.get(name)(blank(layout), chosen)
    counts = [torch.zeros(spec.numel, dtype=torch.int) for spec in layout.buckets]
    for task in plan.tasks:
        for piece in task.chunk.pieces:
            if task.round == 0:
                counts[piece.bucket][piece.start : piece.start + piece.numel] += 1
    assert all(bool((count == 1).all()) for count in counts)
    assert [task.index for task in plan.tasks] == list(range(len(plan.tasks)))


@pytest.mark.parametrize("name", policies.names())
@given(layout=any_layout, chosen=any_settings)
@settings(deadline=None)
def test_a_chunks_tasks_are_its_codecs_rounds_in_their_order(
    name: str, layout: Layout, chosen: Settings
) -> None:
    plan = policies.get(name)(blank(layout), chosen)
    rounds: dict[Chunk, list[tuple[int, str]]] = {}
    for task in plan.tasks:
        rounds.setdefault(task.chunk, []).append((task.round, task.op))
    for task in plan.tasks:
        assert rounds[task.chunk] == list(enumerate(codecs.get(task.codec).ops))


@pytest.mark.parametrize("name", policies.names())
@given(layout=any_layout, chosen=any_settings)
@settings(deadline=None)
def test_only_the_codec_that_was_asked_for(name: str, layout: Layout, chosen: Settings) -> None:
    """Exactly: `tests/test_rules.py` says which; every task of a chunk by the same one."""
    for task in policies.get(name)(blank(layout), chosen).tasks:
        dtype = getattr(torch, task.chunk.dtype)
        assert task.codec in {"none", *used(chosen)}
        assert task.codec == codec_of(layout, task.chunk, chosen)
        assert codecs.get(task.codec).supports(dtype)
        assert task.codec == "none" or not task.chunk.sparse
    for codec in ("fp16", "bf16"):  # for all that they support
        for task in policies.get(name)(blank(layout), Settings(codec=codec)).tasks:
            dtype = getattr(torch, task.chunk.dtype)
            supported = codecs.get(codec).supports(dtype) and not task.chunk.sparse
            assert task.codec == (codec if supported else "none")


@given(any_layout, any_settings)
@settings(deadline=None)
def test_fifo_is_bucket_order(layout: Layout, chosen: Settings) -> None:
    plan = policies.get("fifo")(blank(layout), chosen)
    chunks = tuple(task.chunk for task in plan.tasks if task.round == 0)
    size = chosen.chunk_bytes or fifo.CHUNK_BYTES
    assert chunks == chunks_of(layout, chosen, size)
    assert plan.credit_bytes == (chosen.credit_bytes or fifo.CREDIT_BYTES)
    exact = policies.get("fifo")(blank(layout), replace(chosen, codec="none", codec_rules=""))
    assert tuple(task.chunk for task in exact.tasks) == cut(layout, size, chosen.fusion_bytes)
    assert {task.op for task in exact.tasks} <= {"all_reduce"}


def test_fifo_chooses_sizes_where_the_user_does_not() -> None:
    large = Layout((bucket("layer", 5 * MB),))
    plan = plan_of(large, Settings(policy="fifo"))
    assert max(task.chunk.nbytes for task in plan.tasks) == fifo.CHUNK_BYTES
    assert plan.credit_bytes == fifo.CREDIT_BYTES
    chosen = Settings(policy="fifo", chunk_mb=2.0, credit_mb=3.0)
    assert max(task.chunk.nbytes for task in plan_of(large, chosen).tasks) == 2 * MB
    assert plan_of(large, chosen).credit_bytes == 3 * MB


# ---------------------------------------------------------------- the plan


@given(any_plan)
@settings(deadline=None)
def test_json_round_trip(plan: Plan) -> None:
    copy = Plan.from_json(plan.to_json())
    assert copy == plan
    assert copy.digest == plan.digest
    assert copy.to_json() == plan.to_json()
    assert json.loads(plan.to_json())["policy"] == plan.policy


@given(any_plan)
@settings(deadline=None)
def test_print_mentions_every_task_and_its_first_parameters(plan: Plan) -> None:
    head, *lines = str(plan).splitlines()
    assert plan.digest in head
    assert plan.policy in head
    assert len(lines) == len(plan.tasks)
    for task, line in zip(plan.tasks, lines, strict=True):
        spec = plan.layout.buckets[task.chunk.pieces[0].bucket]
        assert f"task {task.index}: {task.op} " in line
        assert task.codec in line
        assert task.chunk.dtype in line
        for piece in task.chunk.pieces:
            assert str(piece.bucket) in line
        assert any(param.name in line for param in spec.params)


@given(any_plan)
@example(
    plan_of(
        Layout((bucket("layer", 64, 64, 64, 64, 64),)), Settings(policy="fifo", chunk_mb=256 / MB)
    )
)
@settings(deadline=None)
def test_a_described_task_names_a_parameter_that_it_carries(plan: Plan) -> None:
    for task in plan.tasks:
        names = plan.describe(task).rpartition(": ")[2]
        carried = {span.param for span in plan.layout.spans(task.chunk)}
        assert carried & {name.strip() for name in names.split(",")}


CHUNK = Chunk((Piece(0, 0, 34),), "float32")
PLAN = Plan("fifo", LAYOUT, (Task(0, "all_reduce", CHUNK, "none"),), 1000)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(PLAN, policy="other"),
        dataclasses.replace(PLAN, layout=Layout(LAYOUT.buckets[:2])),
        dataclasses.replace(PLAN, tasks=()),
        dataclasses.replace(PLAN, credit_bytes=1001),
        dataclasses.replace(PLAN, tasks=(*PLAN.tasks, Task(1, "all_reduce", CHUNK, "none"))),
        dataclasses.replace(PLAN, tasks=(Task(1, "all_reduce", CHUNK, "none"),)),
        dataclasses.replace(PLAN, tasks=(Task(0, "all_gather", CHUNK, "none"),)),
        dataclasses.replace(PLAN, tasks=(Task(0, "all_reduce", CHUNK, "none", 1),)),
        dataclasses.replace(
            PLAN,
            tasks=(Task(0, "all_reduce", Chunk((Piece(0, 0, 34, 2),), "float32"), "none"),),
        ),
        dataclasses.replace(PLAN, tasks=(Task(0, "all_reduce", CHUNK, "bf16"),)),
        dataclasses.replace(
            PLAN, tasks=(Task(0, "all_reduce", Chunk((Piece(0, 1, 33),), "float32"), "none"),)
        ),
        dataclasses.replace(
            PLAN,
            tasks=(Task(0, "all_reduce", dataclasses.replace(CHUNK, sparse=True), "none"),),
        ),
    ],
)
def test_the_digest_differs_when_anything_does(other: Plan) -> None:
    assert other.digest != PLAN.digest
    assert Plan.from_json(other.to_json()) == other


def test_the_order_of_tasks_is_part_of_the_digest() -> None:
    plan = plan_of(LAYOUT, SMALL)
    assert len(plan.tasks) > 2
    assert dataclasses.replace(plan, tasks=plan.tasks[::-1]).digest != plan.digest


def test_plans_are_frozen() -> None:
    for item in (PLAN, PLAN.tasks[0]):
        field = dataclasses.fields(item)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(item, field, getattr(item, field))


@given(any_plan)
@settings(deadline=None)
def test_wire_bytes_are_those_of_the_encoded_chunk(plan: Plan) -> None:
    for task in plan.tasks:
        codec = codecs.get(task.codec)
        assert task.wire_bytes == codec.wire(task.chunk, task.round).empty().nbytes
        if task.codec == "none":
            assert task.wire_bytes == task.chunk.nbytes
        elif isinstance(codec, (Summed, ByteCodec)):
            gradients = torch.zeros(task.chunk.numel)
            wire = torch.full((task.wire_bytes,), 77, dtype=torch.uint8)
            codec.encode(gradients, wire.view(codec.wire(task.chunk).dtype))
            assert not wire.any()  # all of it was written


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@given(plan=any_plan)
@settings(deadline=None, max_examples=20)
def test_sent_bytes_are_the_collectives_share_of_the_wire(plan: Plan, world_size: int) -> None:
    others = world_size - 1
    for task in plan.tasks:
        if task.op == "gather":
            expected = others * task.wire_bytes
        else:
            halves = 2 if task.op == "all_reduce" else 1
            expected = halves * others / world_size * task.wire_bytes
        assert task.sent_bytes(world_size) == pytest.approx(expected)


@given(any_plan)
@settings(deadline=None)
def test_a_task_covers_every_parameter_that_it_carries(plan: Plan) -> None:
    """What is not covered would count as whole before it is."""
    assert len(plan.covers) == len(plan.tasks)
    for task, covers in zip(plan.tasks, plan.covers, strict=True):
        names = [
            plan.layout.buckets[bucket].params[place].name
            for bucket, places in covers.items()
            for place in places
        ]
        assert sorted(names) == sorted(span.param for span in plan.layout.spans(task.chunk))
        assert list(covers) == list(dict.fromkeys(piece.bucket for piece in task.chunk.pieces))


def test_two_pieces_of_one_bucket_in_a_chunk_are_both_covered() -> None:
    params = [ParamSpec("a", 40, (10, 4)), ParamSpec("bias", 4, (4,)), ParamSpec("b", 40, (10, 4))]
    layout = Layout((BucketSpec(tuple(params), "float32"),))
    plan = plan_of(layout, Settings(policy="fifo", codec="fp16", codec_rules="bias=none"))
    assert [task.codec for task in plan.tasks] == ["fp16", "none"]
    assert plan.covers == ({0: (0, 2)}, {0: (1,)})


# ---------------------------------------------------------------- agreeing


class World:
    """Ranks as threads: a barrier before and after each exchange of bytes."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.rows: list[bytes] = [b""] * size

    def exchange(self, rank: int, payload: bytes) -> list[bytes]:
        self.rows[rank] = payload
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class Group:
    """One rank's view of a `World`; counts its collectives."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.calls = world, rank, 0

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self.calls += 1
        return self.world.exchange(self.rank, payload)

    def broadcast_bytes(self, payload: bytes) -> bytes:
        self.calls += 1
        return self.world.exchange(self.rank, payload)[0]


class LyingGroup(Group):
    """What it hears of a broadcast is another plan than the one sent."""

    def broadcast_bytes(self, payload: bytes) -> bytes:
        plan = Plan.from_json(super().broadcast_bytes(payload).decode())
        return dataclasses.replace(plan, tasks=plan.tasks[::-1]).to_json().encode()


Policy = Callable[[Layout], Plan]


def agree_on(
    layouts: list[Layout], policies: list[Policy], liar: int | None = None
) -> list[Plan | BaseException]:
    """What `agree` gives or raises on each rank."""
    world = World(len(layouts))
    groups = [(LyingGroup if r == liar else Group)(world, r) for r in range(len(layouts))]

    def rank(group: Group, layout: Layout, policy: Policy) -> Plan | BaseException:
        try:
            return agree(group, layout, policy)
        except CommSchedError as error:
            return error

    with ThreadPoolExecutor(len(layouts)) as pool:
        ends = list(pool.map(rank, groups, layouts, policies))
    assert len({group.calls for group in groups}) == 1  # else a later collective is mismatched
    return ends


def with_chunks(nbytes: int) -> Policy:
    chosen = Settings(policy="fifo", chunk_mb=nbytes / MB, fusion_mb=0.0)
    return lambda layout: plan_of(layout, chosen)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_0s_plan_wins(size: int) -> None:
    policies = [with_chunks(512 * (rank + 1)) for rank in range(size)]
    plans = agree_on([LAYOUT] * size, policies)
    assert plans == [policies[0](LAYOUT)] * size
    assert size == 1 or policies[1](LAYOUT) != policies[0](LAYOUT)


def test_only_rank_0_is_asked_for_a_plan() -> None:
    def never(layout: Layout) -> Plan:
        raise AssertionError("asked")

    plans = agree_on([LAYOUT] * 3, [with_chunks(512), never, never])
    assert all(isinstance(plan, Plan) for plan in plans)


FIRST, SECOND = LAYOUT.buckets[:2]
OTHERS = {
    "dtype": (
        Layout((FIRST, dataclasses.replace(SECOND, dtype="float64"), LAYOUT.buckets[2])),
        ["bucket 1", "float64", "float32"],
    ),
    "size": (
        Layout((FIRST, bucket("body", 901), LAYOUT.buckets[2])),
        ["bucket 1", "901", "900"],
    ),
    "order": (
        Layout((SECOND, FIRST, LAYOUT.buckets[2])),
        ["bucket 0", "body.0 (900)", "head.0 (30)"],
    ),
}


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("kind", OTHERS)
def test_another_layout_is_an_error_everywhere_that_names_it(kind: str, odd: int) -> None:
    other, words = OTHERS[kind]
    ends = agree_on([other if rank == odd else LAYOUT for rank in range(4)], [with_chunks(512)] * 4)
    assert all(isinstance(end, CommSchedError) for end in ends)
    assert len({str(end) for end in ends}) == 1
    text = str(ends[0])
    named = {rank for rank in range(1, 4) if f"rank {rank}: " in text}
    assert named == ({odd} if odd else {1, 2, 3})
    for word in words:
        assert word in text


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("odd", [0, 1])
def test_another_number_of_buckets_is_an_error_that_tells_both(count: int, odd: int) -> None:
    layouts = [LAYOUT, LAYOUT]
    layouts[odd] = Layout(LAYOUT.buckets[:count])
    first, second = (len(layout.buckets) for layout in layouts)
    for end in agree_on(layouts, [with_chunks(512)] * 2):
        assert isinstance(end, CommSchedError)
        assert f"rank 1: {second} buckets where rank 0 has {first}" in str(end)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(FIRST, sparse=True),
        bucket("head", 29, 5),
        BucketSpec((ParamSpec("head.0", 30, (5, 6)), ParamSpec("head.1", 4)), "float32"),
    ],
    ids=["sparse", "parameter sizes", "parameter shapes"],
)
def test_the_difference_is_visible_in_the_text(other: BucketSpec) -> None:
    ends = agree_on([Layout((FIRST,)), Layout((other,))], [with_chunks(512)] * 2)
    assert all(isinstance(end, CommSchedError) for end in ends)
    ours, _, theirs = str(ends[0]).partition("rank 1: bucket 0 ")[2].partition(" where rank 0 ")
    assert theirs
    assert ours.split(" ", 1)[1] != theirs.removeprefix("has ")


def test_a_late_parameters_other_name_is_visible_in_the_text() -> None:
    params = tuple(ParamSpec(f"p{at}", 3) for at in range(6))
    renamed = (*params[:4], ParamSpec("other", 3), params[5])
    layouts = [Layout((BucketSpec(names, "float32"),)) for names in (params, renamed)]
    ends = agree_on(layouts, [with_chunks(512)] * 2)
    assert all(isinstance(end, CommSchedError) for end in ends)
    assert "other" in str(ends[0])


def test_a_plan_that_arrives_changed_is_an_error_everywhere() -> None:
    ends = agree_on([LAYOUT] * 3, [with_chunks(512)] * 3, liar=2)
    assert all(isinstance(end, CommSchedError) for end in ends)
    assert all("digest" in str(end) for end in ends)
