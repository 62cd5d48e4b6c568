"""While steps are deferred nothing is silently wrong: exact, or an error saying what to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from tests.deferring import Training, differ, grads, slow_wire
from tests.distributed import ranks
from tests.parity import mlp_loss

# ---- gradients in flight ---------------------------------------------------------------------


def scale_one(training: Training) -> None:
    grads(training)[3].mul_(0.5)


def replace_one(training: Training) -> None:
    param = next(training.model.parameters())
    param.grad = None if param.grad is None else param.grad * 0.5


def scaler(training: Training) -> Any:
    made = torch.amp.GradScaler("cpu", init_scale=4.0)
    made.scale(torch.ones(()))
    return made


def unscale(training: Training) -> None:
    made = scaler(training)
    made.unscale_(training.optimizer)
    made.step(training.optimizer)


def clip_by_logged_norm(training: Training) -> None:
    # Reads only; what is read decides.
    norm = torch.stack([grad.norm() for grad in grads(training)]).norm()
    for group in training.optimizer.param_groups:
        group["lr"] = 0.01 * float(norm)


def all_reduce_all(training: Training) -> None:
    for grad in grads(training):
        torch.distributed.all_reduce(grad)


Touch = Callable[[Training], Any]
# Between backward() and step():
TOUCHES: dict[str, Touch] = {
    "clip_grad_norm_": lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 0.01),
    "clip_grad_value_": lambda t: nn.utils.clip_grad_value_(t.model.parameters(), 1e-4),
    "mul_": scale_one,
    "add_ to all": lambda t: [grad.add_(1e-3) for grad in grads(t)],
    "a view": lambda t: grads(t)[0].view(-1)[:1].zero_(),
    "replaced": replace_one,
    "one left out": lambda t: setattr(t.model.module[4].weight, "grad", None),
    "zeroed": lambda t: t.model.zero_grad(set_to_none=False),
    ".data": lambda t: [grad.data.clamp_(-1e-4, 1e-4) for grad in grads(t)],
    "numpy": lambda t: [grad.numpy().__iadd__(1e-3) for grad in grads(t)],
    "all_reduce": all_reduce_all,
    "unscale_": unscale,
    "read": clip_by_logged_norm,
}


def says_what_to_do(text: str) -> None:
    assert "gradients" in text
    assert "state.synchronize()" in text
    assert "optimizer= out" in text or "Call the DDP model" in text


def touched(training: Training, rank: int, name: str) -> list[torch.Tensor]:
    for _ in range(2):
        training.backward(rank)
        TOUCHES[name](training)
        if name != "unscale_":
            training.optimizer.step()
    training.backward(rank)
    return training.values()


@pytest.mark.parametrize("name", TOUCHES)
@ranks(2)
def test_gradients_touched_after_backward(rank: int, name: str) -> None:
    theirs = touched(Training(plain=True).run(rank), rank, name)
    training = Training().run(rank)
    with slow_wire():
        try:
            ours = touched(training, rank, name)
        except commsched.CommSchedError as error:
            says_what_to_do(str(error))
        else:
            assert not differ(ours, theirs)
    training.close()


@pytest.mark.parametrize("name", [n for n in TOUCHES if n not in ("unscale_", "replaced")])
@ranks(2)
def test_gradients_touched_after_the_step(rank: int, name: str) -> None:
    # Plain DDP has used them, so nothing may come of it but an error.
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        try:
            with slow_wire():
                training.step(rank)
                TOUCHES[name](training)
                training.step(rank)
                results.append(training.values())
        except commsched.CommSchedError as error:
            says_what_to_do(str(error))
        training.close()
    assert len(results) == 1 or not differ(*results)


@pytest.mark.parametrize("name", TOUCHES)
@ranks(2)
def test_gradients_may_be_touched_after_synchronize(rank: int, name: str) -> None:
    results = []
    for plain in (True, False):
        training = Training(plain=plain).run(rank)
        with slow_wire():
            for _ in range(2):
                training.backward(rank)
                training.synchronize()
                TOUCHES[name](training)
                if name != "unscale_":
                    training.optimizer.step()
            results.append(training.values())
        training.close()
    assert not differ(*results)


def scaled(training: Training, rank: int) -> list[torch.Tensor]:
    for number in range(3):
        # An infinity on one rank: sums have it on every rank, and nobody steps.
        training.backward(rank, float("inf") if number == 1 and rank == 0 else 4.0)
        scaler(training).step(training.optimizer)
    return training.values()


@ranks(2)
def test_an_infinity_on_one_rank_is_seen_by_all(rank: int) -> None:
    theirs = scaled(Training(plain=True).run(rank), rank)
    training = Training().run(rank)
    with slow_wire():
        try:
            ours = scaled(training, rank)
        except commsched.CommSchedError as error:
            says_what_to_do(str(error))
        else:
            assert not differ(ours, theirs)
    training.close()


def logged(training: Training, rank: int) -> list[float]:
    seen = []
    for _ in range(3):
        training.step(rank)
        seen += [float(grad.sum()) for grad in grads(training)]
    return seen


@ranks(2)
def test_gradients_read_after_the_step_are_sums(rank: int) -> None:
    # As loggers do. An error would do as well.
    theirs = logged(Training(plain=True).run(rank), rank)
    training = Training().run(rank)
    with slow_wire():
        try:
            ours = logged(training, rank)
        except commsched.CommSchedError as error:
            says_what_to_do(str(error))
        else:
            assert ours == theirs
    training.close()


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda grad: grad.mul_(0.5),
    "foreach": lambda grad: torch._foreach_mul_([grad], 0.5),
    "a view": lambda grad: grad.view(-1)[0].zero_(),
}


@pytest.mark.parametrize("name", ALIASES)
@ranks(2)
def test_gradients_touched_through_what_was_taken_before(rank: int, name: str) -> None:
    # The memory stays the same from step to step, and its tensors share one version.
    training = Training().run(rank)
    training.synchronize()
    taken = [grad.view(-1) for grad in grads(training)]
    training.backward(rank)
    with slow_wire(), pytest.raises(commsched.CommSchedError) as caught:  # noqa: PT012
        ALIASES[name](taken[3])
        training.optimizer.step()
        training.values()
    says_what_to_do(str(caught.value))
    training.close()


@ranks(2)
def test_a_second_backward_of_a_kept_graph(rank: int) -> None:
    training = Training().run(rank)
    training.optimizer.zero_grad()
    loss = mlp_loss(training.model, 0, rank)
    loss.backward(retain_graph=True)
    with pytest.raises(commsched.CommSchedError) as caught:  # noqa: PT012
        loss.backward()
        training.optimizer.step()
        training.values()
    says_what_to_do(str(caught.value))
    training.close()


class Slowly(torch.optim.SGD):
    """Takes its time, so that another thread comes in the middle."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.002)
        return super().step(closure)


@ranks(2)
def test_another_thread_reads_while_forward_runs(rank: int) -> None:
    # As evaluation or a checkpoint in the background does.
    training = Training(optimizer=Slowly).run(rank)
    plain = Training(plain=True, optimizer=Slowly).run(rank)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            training.model.module.state_dict()
        except BaseException as error:
            errors.append(error)

    for _ in range(5):
        for one in (training, plain):
            one.step(rank)
        reader = threading.Thread(target=read)
        reader.start()
        training.backward(rank)
        training.optimizer.step()
        reader.join()
        plain.step(rank)
    assert all(isinstance(error, commsched.CommSchedError) for error in errors), errors
    assert not differ(training.values(), plain.values())
    training.close()
