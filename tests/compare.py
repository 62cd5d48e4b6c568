"""A training under plain DDP and the same one with its optimizers handed over, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import commsched
from tests.parity import OPTIMIZERS, SMALL, assert_same, mlp_loss

Loss = Callable[[nn.Module, int, int], torch.Tensor]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Run:
    """One of the two: plain DDP's, or ours.

    Args:
        rank: this one.
        hooked: whether it is ours.
        settings: for `commsched.State`.
    """

    def __init__(self, rank: int, hooked: bool, settings: dict[str, Any] | None = None) -> None:
        self.rank, self.hooked = rank, hooked
        # Explicit: on loopback commsched would find that deferring gains nothing.
        self.settings = {"policy": "priority", **SMALL, **(settings or {})}
        self.states: list[commsched.State] = []
        self.deferred = 0  # calls of `step` that left recorded steps behind
        self.kept: list[torch.Tensor] = []  # to be equal with plain DDP
        self.shared: list[torch.Tensor] = []  # those of them to be equal on all ranks as well

    def ddp(self, module: nn.Module, **ddp: Any) -> DDP:
        """The module under DDP, in several buckets."""
        return DDP(module, **{"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True, **ddp})

    def hand_over(self, ddp: DDP, *optimizers: torch.optim.Optimizer) -> None:
        """Register our hook, where this is ours."""
        if self.hooked:
            state = commsched.State(optimizer=list(optimizers), **self.settings)
            ddp.register_comm_hook(state, commsched.hook)
            self.states.append(state)

    def start(
        self,
        module: nn.Module,
        optimizer: str | Make = "sgd",
        **ddp: Any,
    ) -> tuple[DDP, torch.optim.Optimizer]:
        """A model, and its one optimizer, handed over."""
        model = self.ddp(module, **ddp)
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        opt = make(model.parameters())
        self.hand_over(model, opt)
        return model, opt

    def backward(
        self,
        model: nn.Module,
        step: int,
        loss: Loss = mlp_loss,
    ) -> torch.Tensor:
        """Forward and backward on this step's and rank's data; returns the loss."""
        torch.manual_seed(1000 * step + self.rank)
        value = loss(model, step, self.rank)
        value.backward()
        return value.detach()

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Step the optimizers; notes whether steps were left for later."""
        for optimizer in optimizers:
            optimizer.step()
        self.deferred += self.due() > 0

    def train(
        self,
        model: nn.Module,
        steps: Iterable[int],
        *optimizers: torch.optim.Optimizer,
        loss: Loss = mlp_loss,
        after: Callable[[], Any] | None = None,
    ) -> None:
        """The usual loop; `after` is called at the end of each step."""
        for step in steps:
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.backward(model, step, loss)
            self.step(*optimizers)
            if after is not None:
                after()

    def due(self) -> int:
        """How many parameters' steps are recorded and have not run."""
        overlaps = [state._session.overlap for state in self.states if state._session is not None]
        return sum(len(overlap.deferred.due) for overlap in overlaps if overlap is not None)

    def synchronize(self) -> None:
        """What a program that hands its optimizer over adds to its loop."""
        for state in self.states:
            state.synchronize()

    def keep(self, tensors: Iterable[torch.Tensor], shared: bool = True) -> None:
        """Remember the tensors as they are now."""
        copies = [torch.as_tensor(tensor).detach().clone() for tensor in tensors]
        self.kept += copies
        self.shared += copies if shared else []

    def close(self) -> None:
        """Close the states."""
        for state in self.states:
            state.close()


_plain: dict[str, Run] = {}


def assert_parity(
    scenario: Callable[[Run], None],
    rank: int,
    deferred: int | None,
    rtol: float | None = None,
    known_as: str | None = None,
    **settings: Any,
) -> None:
    """Run `scenario` under plain DDP and under ours; fail unless all it kept is equal.

    Args:
        scenario: trains, and keeps tensors.
        rank: this one.
        deferred: so many steps must have been deferred at least; None: none may be.
        rtol: None: bit for bit.
        known_as: a name under which plain DDP's side is remembered, for other settings.
        settings: for `commsched.State`.
    """
    theirs = None if known_as is None else _plain.get(known_as)
    if theirs is None:
        theirs = _run(scenario, rank, False, {})
        if known_as is not None:
            _plain[known_as] = theirs
    ours = _run(scenario, rank, True, settings)
    assert ours.kept
    assert_same(ours.kept, theirs.kept, rtol)
    assert_equal_on_all_ranks(ours.shared)
    if deferred is None:
        assert ours.deferred == 0
    else:
        assert ours.deferred >= deferred, f"only {ours.deferred} steps were deferred"
    ours.close()


def _run(scenario: Callable[[Run], None], rank: int, hooked: bool, settings: dict[str, Any]) -> Run:
    torch.manual_seed(7)
    run = Run(rank, hooked, settings)
    scenario(run)
    return run


def assert_equal_on_all_ranks(params: list[torch.Tensor]) -> None:
    """Rule: all ranks always hold identical parameters, whatever the codec."""
    for param in params:
        flat = torch.view_as_real(param) if param.is_complex() else param
        rows = [torch.empty_like(flat.contiguous()) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, flat.contiguous())
        for row in rows[1:]:
            assert torch.equal(row, rows[0])
