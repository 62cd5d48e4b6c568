"""Deferred steps against plain DDP: what programs do with a model between steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from tests.compare import Run, assert_parity
from tests.distributed import ranks
from tests.parity import mlp

STEPS = 15
LATE = 7  # of them at least must be deferred: all but the first few

optim = torch.optim
adamw = partial(optim.AdamW, lr=1e-2)


# Each is a generator: made with what there is, and advanced once after every step.

Doer = Callable[[Run, DDP, torch.optim.Optimizer], Iterator[None]]
DOERS: dict[str, Doer] = {}


def doer(function: Doer) -> Doer:
    """Put it into `DOERS`."""
    DOERS[function.__name__.replace("_", "-")] = function
    return function


@doer
def clamp(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
        yield


@doer
def noise_on_one(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        with torch.no_grad():
            model.module[4].weight.add_(torch.ones(24, 24), alpha=1e-3)
            torch._foreach_mul_([model.module[0].weight, model.module[2].bias], 0.99)
            torch.mul(model.module[2].weight, 0.99, out=model.module[2].weight)
            model.module[2].weight[0] = 0.1
            model.module[6].bias += 0.01
        yield


@doer
def reinit(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        nn.init.uniform_(model.module[4].weight, -0.1, 0.1, torch.Generator().manual_seed(3))
        yield


@doer
def averaged_model(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    while True:
        ema.update_parameters(model.module)
        run.keep(ema.parameters())
        yield


@doer
def average_by_hand(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    while True:
        with torch.no_grad():
            for name, p in model.named_parameters():
                mean[name].lerp_(p, 0.1)
        run.keep(mean.values())
        yield


@doer
def state_dict(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        run.keep(model.state_dict().values())
        yield


@doer
def save(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        file = io.BytesIO()
        torch.save([model.module, list(model.parameters())[3:5]], file)
        file.seek(0)
        module, some = torch.load(file, weights_only=False)
        assert {type(p) for p in [*module.parameters(), *some]} == {nn.Parameter}
        run.keep([*module.parameters(), *some])
        yield


@doer
def deep_copy(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        module, one = copy.deepcopy(model.module), copy.copy(next(model.parameters()))
        assert {type(p) for p in [*module.parameters(), one]} == {nn.Parameter}
        run.keep([*module.parameters(), one])
        yield


@doer
def optimizer_state_dict(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        for state in opt.state_dict()["state"].values():
            run.keep(state.values())
        yield


@doer
def restore(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    yield
    saved = None
    while True:
        saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        for _ in range(6):
            yield
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        yield


@doer
def restore_optimizer_first(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    while True:
        for _ in range(6):
            yield
        opt.load_state_dict(saved[1])
        model.load_state_dict(saved[0])


@doer
def evaluate(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        model.eval()
        with torch.no_grad():
            run.keep([model(torch.ones(3, 24))])
        model.train()
        yield


@doer
def evaluate_module(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        with torch.no_grad():
            run.keep([model.module(torch.ones(3, 24))])
        yield


@doer
def evaluate_module_in_part(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        run.keep([model.module[:5](torch.ones(3, 24))])
        yield


@doer
def inference_mode(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        with torch.inference_mode():
            run.keep([model.module(torch.ones(3, 24))])
            run.keep([model(torch.ones(3, 24))])
        yield


@doer
def evaluate_rank_0(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        if run.rank == 0:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                run.keep([model.module(torch.ones(3, 24))], shared=False)
        yield


@doer
def functional(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        params = dict(model.module.named_parameters())
        run.keep([torch.func.functional_call(model.module, params, torch.ones(3, 24))])
        run.keep([nn.utils.parameters_to_vector(params.values())])
        yield


@doer
def broadcast(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        first, *rest = model.parameters()
        dist.broadcast(rest[4].data, 0)
        with torch.no_grad():
            dist.broadcast(first, 0)
            dist.all_reduce(rest[1])
            rest[1].div_(2)
        got = [torch.empty_like(rest[2]) for _ in range(2)]
        dist.all_gather(got, rest[2].detach())
        run.keep(got)
        yield


@doer
def module_conversion(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        model.to("cpu")
        model.float()
        model.requires_grad_(True)
        run.keep(model.module[4].parameters())
        yield


@doer
def gradients(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        run.synchronize()
        run.keep(p.grad for p in model.parameters() if p.grad is not None)
        yield


@doer
def swap_weights(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    other = [torch.full_like(p, 0.01) for p in model.parameters()]
    while True:
        mine = [p.data for p in model.parameters()]
        for p, weight in zip(model.parameters(), other, strict=True):
            p.data = weight
        with torch.no_grad():
            run.keep([model.module(torch.ones(3, 24))])
        for p, weight in zip(model.parameters(), mine, strict=True):
            p.data = weight
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
        yield


@doer
def deep_copy_optimizer(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    while True:
        twin, module = copy.deepcopy((opt, model.module))
        assert twin.param_groups[0]["params"][3] is list(module.parameters())[3]
        run.keep(module.parameters())
        for state in twin.state.values():
            run.keep(state.values())
        yield


@doer
def checkpoint_api(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    while True:
        params, state = get_state_dict(model, opt)
        run.keep(params.values())
        for values in state["state"].values():
            run.keep(values.values())
        yield


@doer
def under_tracers(run: Run, model: DDP, opt: torch.optim.Optimizer) -> Iterator[None]:
    """Steps that happen to run while somebody traces the model do not become part of the trace."""
    x = torch.ones(3, 24)
    while True:
        run.keep([torch.jit.trace(model.module, x, check_trace=False)(x)])
        yield
        traced = make_fx(lambda x: model.module(x))(x)
        run.keep([traced(x), torch.tensor(len(traced.graph.nodes))])
        yield
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model.module(mode.from_tensor(x))
        run.keep(model.parameters())
        yield
        with FlopCounterMode(display=False) as flops:
            run.keep([model.module(x)])
        run.keep([torch.tensor(flops.get_total_flops())])
        yield


def between_steps(run: Run, name: str) -> None:
    """Train, and do it after each step."""
    model, opt = run.start(mlp(), adamw)
    acting = DOERS[name](run, model, opt)
    run.train(model, range(STEPS), opt, after=partial(next, acting))
    run.keep(model.parameters())


@pytest.mark.parametrize("name", list(DOERS))
@ranks(2)
def test_between_steps(rank: int, name: str) -> None:
    assert_parity(partial(between_steps, name=name), rank, LATE)
