"""Deferred steps against plain DDP: all that models do with parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.compare import Run, assert_parity
from tests.distributed import ranks
from tests.parity import mlp, mlp_loss

STEPS = 15
LATE = 7  # of them at least must be deferred: all but the first few

optim = torch.optim
adamw = partial(optim.AdamW, lr=1e-2)


class Exotic(nn.Module):
    """Parameters tied, of containers, used functionally, parametrized, read by fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.table = nn.Embedding(11, 24)
        self.head = nn.Linear(24, 11)
        self.head.weight = self.table.weight
        self.renormed = nn.Embedding(11, 24, max_norm=0.5)
        self.scales = nn.ParameterList([torch.ones(24), torch.full((24,), 0.5)])
        self.named = nn.ParameterDict({"shift": torch.zeros(24)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(24, 24))
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(24, 2, 24, dropout=0.1, batch_first=True)
        self.unused_module = nn.Linear(24, 24)  # its weight is used, its forward is not
        self.buffered = nn.BatchNorm1d(24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.renormed(ids)
        x = torch.cat([self.token.expand(len(ids), -1, -1), x], 1)
        for scale in self.scales:
            x = x * scale
        x = self.spectral(self.normed(x + self.named["shift"]))
        x = self.encoder(self.lstm(x)[0])
        weight, bias = self.unused_module.parameters()
        x = F.linear(x, weight.t() @ weight, bias)
        x = self.buffered(x.mean(1))
        return F.linear(x, self.table.weight, self.head.bias)


def exotic_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    rows = 4 + step % 3
    return F.cross_entropy(model(torch.randint(0, 11, (rows, 5))), torch.arange(rows))


def exotic(run: Run) -> None:
    """Everything at once, with batches of changing size; evaluated now and then."""
    model, opt = run.start(Exotic(), adamw)
    torch.backends.mha.set_fastpath_enabled(False)  # it refuses models with any forward hooks
    for step in range(STEPS):
        run.train(model, [step], opt, loss=exotic_loss)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                run.keep([model(torch.arange(10).view(2, 5))], shared=False)
            model.train()
    run.keep([*model.parameters(), *model.buffers()], shared=False)  # max_norm differs by rank


def frozen(run: Run) -> None:
    """Layers are frozen for a while; with find_unused_parameters DDP bears it."""
    model, opt = run.start(mlp(), adamw, find_unused_parameters=True)
    for step in range(30):
        model.module[2].requires_grad_(step not in range(10, 18))
        model.module[0].weight.requires_grad_(step < 20)
        run.train(model, [step], opt)
    run.keep(model.parameters())


def fresh_ddp(run: Run, how: str) -> None:
    """Wrapped anew after freezing: the old DDP and State closed, or dropped."""
    module = mlp()
    opt = adamw(module.parameters())
    model = run.ddp(module)
    run.hand_over(model, opt)
    run.train(model, range(10), opt)
    if how == "close":
        run.close()
    run.states.clear()
    del model
    module[0].requires_grad_(False)
    if how == "new-optimizer":
        opt = adamw([p for p in module.parameters() if p.requires_grad])
    model = run.ddp(module)
    run.hand_over(model, opt)
    run.train(model, range(10, 30), opt)
    run.keep(module.parameters())


def penalty_outside(run: Run) -> None:
    """Weights are used in the loss, before and after DDP's forward."""
    model, opt = run.start(mlp(), adamw)

    def loss(m: nn.Module, step: int, rank: int) -> torch.Tensor:
        first, *rest = m.parameters()
        before = rest[2].square().sum()
        return mlp_loss(m, step, rank) + 1e-2 * (before + first.square().sum() + rest[-1].norm())

    # The penalty's share of a gradient comes through DDP's hooks like any other.
    run.train(model, range(STEPS), opt, loss=loss)
    run.keep(model.parameters())


def two_forwards(run: Run) -> None:
    """One parameter serves two forwards of one backward."""
    model, opt = run.start(mlp(), adamw)
    loss: Any = lambda m, s, r: mlp_loss(m, s, r) + m(torch.ones(2, 24)).square().mean()  # noqa: E731
    run.train(model, range(STEPS), opt, loss=loss)
    run.keep(model.parameters())


class Trips(nn.Module):
    """Raises in the middle of forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest, self.trip = mlp(depth=2)[:-1], mlp(depth=3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.trip:
            raise RuntimeError("tripped")
        return self.rest(x)


def forward_raises(run: Run) -> None:
    """A batch is given up in the middle of forward, and the next one taken."""
    model, opt = run.start(Trips(), adamw)
    for step in range(STEPS):
        model.module.trip = step % 5 == 4
        if model.module.trip:
            with pytest.raises(RuntimeError, match="tripped"):
                mlp_loss(model, step, run.rank)
        else:
            run.train(model, [step], opt)
    run.keep(model.parameters())


MODELS: dict[str, tuple[Callable[[Run], None], int]] = {
    "exotic": (exotic, LATE),
    "frozen": (frozen, 10),
    "fresh-ddp-close": (partial(fresh_ddp, how="close"), LATE),
    "fresh-ddp-drop": (partial(fresh_ddp, how="drop"), LATE),
    "fresh-ddp-new-optimizer": (partial(fresh_ddp, how="new-optimizer"), LATE),
    "penalty-outside": (penalty_outside, LATE),
    "two-forwards": (two_forwards, LATE),
    "forward-raises": (forward_raises, 5),
}


@pytest.mark.parametrize("name", list(MODELS))
@ranks(2)
def test_models(rank: int, name: str) -> None:
    scenario, deferred = MODELS[name]
    assert_parity(scenario, rank, deferred)
