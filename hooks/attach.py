"""attach: register the hook on a model that a framework has wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from commsched.errors import CommSchedError
from commsched.hooks.hook import hook
from commsched.model import unwrap_ddp
from commsched.state import State

__all__ = ["attach"]


def attach(
    model: object, optimizer: Optimizer | Sequence[Optimizer] | None = None, **settings: Any
) -> State:
    """Register `commsched.hook` on the DDP model inside `model`, and return its State.

    With an optimizer DDP must have been made with ``gradient_as_bucket_view=True``, and gains from
    a small ``bucket_cap_mb`` (4, say; a log line says which one would be best).

    Args:
        model: a DistributedDataParallel, or what wraps one: a compiled module, a Fabric module, a
            Lightning Trainer or strategy, an HF Trainer (after it has wrapped its model).
        optimizer: the model's optimizer, or a list of them, as for `State`.
        **settings: as for `State`. DDP's process group is used unless ``process_group`` says
            otherwise.

    Raises:
        CommSchedError: there is no DDP model inside, it has a communication hook already, or the
            optimizer cannot be handed over.
        SettingsError: as for `State`.

    Example::

        ddp = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
        state = commsched.attach(ddp, optimizer=optimizer)
    """
    ddp = unwrap_ddp(model)
    if ddp._comm_hooks:
        # DDP refuses too, but only after it has recorded the second hook as registered.
        name = getattr(ddp._comm_hooks[0][0], "__qualname__", "unknown")
        raise CommSchedError(f"this DDP model has a communication hook already ({name})")
    settings.setdefault("process_group", ddp.process_group)
    state = State(optimizer=optimizer, **settings)
    state.bind(ddp)  # may refuse
    ddp.register_comm_hook(state, hook)
    return state
