"""Clocks: the measured offset is never further off than its error says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from commsched.group import Board, Group, Membership
from commsched.tracing.clock import ROUNDS, Clock, compare_clocks
from tests.distributed import ranks


class World:
    """One true time, which passes only while messages travel; so runs are repeatable."""

    def __init__(self, delays_s: list[float]) -> None:
        self.true_s = 100.0
        self._delays_s = delays_s
        self._sent = 0
        self.boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}

    def box(self, source: int, to: int) -> queue.Queue[torch.Tensor]:
        return self.boxes.setdefault((source, to), queue.Queue())

    def travel(self) -> None:
        self.true_s += self._delays_s[self._sent % len(self._delays_s)]
        self._sent += 1


class Done:
    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        self.wait = wait


class Member:
    """One rank's end. A message is there when its travel is over, by the true time."""

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world, self.rank, self.size = world, rank, size

    def send(self, tensor: torch.Tensor, to: int) -> Done:
        self.world.travel()
        self.world.box(self.rank, to).put(tensor.clone())
        return Done()

    def receive(self, tensor: torch.Tensor, source: int) -> Done:
        box = self.world.box(source, self.rank)
        return Done(lambda: tensor.copy_(box.get(timeout=10.0)))


def compared(delays_s: list[float], offsets_s: list[float]) -> list[Clock]:
    """What two ranks find whose clocks are so far ahead of the true time."""
    world = World(delays_s)
    clocks: dict[int, Clock] = {}

    def talk(rank: int) -> None:
        member = Member(world, rank, 2)
        clocks[rank] = compare_clocks(member, lambda: world.true_s + offsets_s[rank])

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [clocks[rank] for rank in range(2)]


DELAYS_S = st.lists(st.floats(1e-6, 0.1), min_size=2, max_size=2 * ROUNDS)


@hypothesis_settings(max_examples=50)
@given(DELAYS_S, st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)))
def test_the_error_bounds_the_offset(delays_s: list[float], offsets_s: tuple[float, float]) -> None:
    zero, one = compared(delays_s, list(offsets_s))
    assert zero == Clock(0.0, 0.0)
    assert abs(one.offset_s - (offsets_s[0] - offsets_s[1])) <= one.error_s + 1e-9


def test_the_shortest_round_wins() -> None:
    slow = [0.05, 0.001] * (ROUNDS - 1)  # lopsided: such a round is 25 ms off
    _, one = compared([*slow, 1e-5, 1e-5], [7.0, 3.0])
    assert one.error_s == pytest.approx(1e-5, rel=1e-3)
    assert one.offset_s == pytest.approx(4.0, abs=1e-7)


@pytest.mark.parametrize("ahead_s", [0.0, 12.5])
@ranks(4)
def test_real_ranks_find_how_far_they_are_apart(rank: int, world_size: int, ahead_s: float) -> None:
    member = Membership(dist.group.WORLD)
    group = Group(member, Board(member), 2, 20.0)
    # One machine has one monotonic clock; each rank's is set forward by as many steps as its rank.
    clock = compare_clocks(group, lambda: time.monotonic() + rank * ahead_s)
    assert abs(clock.offset_s + rank * ahead_s) <= clock.error_s + 1e-6
    assert clock.error_s < 0.5
    assert (clock.error_s == 0.0) == (rank == 0)
    # The group is as good as before.
    assert group.all_gather_bytes(b"%d" % rank) == [b"%d" % one for one in range(world_size)]
