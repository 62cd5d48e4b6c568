"""The hooks a benchmark compares, named by a short text: `noop`, `ddp`, `commsched:codec=fp16`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["BUILT_IN", "HookSpec", "register"]

BUILT_IN = ("noop", "ddp", "fp16", "bf16", "powersgd")


@dataclass(frozen=True)
class HookSpec:
    """One hook with its settings.

    Attributes:
        text: as given on the command line; the row's name.
        name: one of `BUILT_IN`, or `commsched`.
        settings: keyword arguments of `commsched.State`. `optimizer=true` hands over the
            optimizer itself.
    """

    text: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> HookSpec:
        """Reads `name` or `commsched:key=value,key=value`.

        Raises:
            ValueError: an unknown hook, or settings that are not `key=value`.
        """
        name, _, rest = text.partition(":")
        if name not in (*BUILT_IN, "commsched"):
            raise ValueError(f"unknown hook {name!r}: {', '.join(BUILT_IN)} or commsched[:k=v,...]")
        if rest and name != "commsched":
            raise ValueError(f"{name!r} takes no settings")
        pairs = [item.partition("=") for item in rest.split(",") if item]
        if any(not (key and sign) for key, sign, _ in pairs):
            raise ValueError(f"settings must be key=value, not {rest!r}")
        return cls(text, name, {key: _value(value) for key, _, value in pairs})


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def register(spec: HookSpec, ddp: DistributedDataParallel, optimizer: Optimizer) -> Any:
    """Registers the hook on `ddp`.

    Returns:
        The hook's state where it has one.

    Raises:
        Exception: whatever the hook raises when it is refused (torch's `bf16` on a CPU build).
    """
    if spec.name == "ddp":
        return None
    if spec.name == "commsched":
        return _register_commsched(spec, ddp, optimizer)
    if spec.name == "powersgd":
        return _register_powersgd(ddp)
    hooks = {
        "noop": debugging_hooks.noop_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    ddp.register_comm_hook(None, hooks[spec.name])
    return None


def _register_powersgd(ddp: DistributedDataParallel) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        process_group=torch.distributed.group.WORLD,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,  # the earliest that error feedback allows
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return state


def _register_commsched(spec: HookSpec, ddp: DistributedDataParallel, optimizer: Optimizer) -> Any:
    import commsched  # late, so that the other hooks can be measured without it

    settings = dict(spec.settings)
    if settings.pop("optimizer", False):
        settings["optimizer"] = optimizer
    state = commsched.State(**settings)
    ddp.register_comm_hook(state, commsched.hook)
    return state
