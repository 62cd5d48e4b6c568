"""The hooks a benchmark compares, named by a short text: `noop`, `ddp:bucket_cap_mb=8`, ..."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

__all__ = ["BUILT_IN", "HookSpec", "register"]

BUILT_IN = ("noop", "ddp", "allreduce", "fp16", "bf16", "powersgd")

# Settings that go to DistributedDataParallel, whatever the hook, and what they must be.
_DDP_KINDS: dict[str, tuple[type, ...]] = {
    "bucket_cap_mb": (int, float),
    "gradient_as_bucket_view": (bool,),
    "static_graph": (bool,),
    "find_unused_parameters": (bool,),
}
_MEASURING = 12  # steps until a plan is made of what was measured, and has settled
_TRYING = 60  # until the automatic mode has chosen


@dataclass(frozen=True)
class HookSpec:
    """One hook with its settings.

    Attributes:
        text: as given on the command line; the row's name.
        name: one of `BUILT_IN`, or `commsched`.
        settings: keyword arguments of `commsched.State`. `optimizer=true` hands over the
            optimizer itself.
        ddp: keyword arguments of `DistributedDataParallel` for this hook alone.
    """

    text: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> HookSpec:
        """Reads `name` or `name:key=value,key=value`.

        `bucket_cap_mb` (MiB), `gradient_as_bucket_view`, `static_graph` and
        `find_unused_parameters` go to DDP; all else is for `commsched`. With `optimizer=true`
        gradients are views of DDP's buckets unless the text says otherwise.

        Raises:
            ValueError: an unknown hook, or settings that it or DDP does not take.
        """
        name, _, rest = text.partition(":")
        if name not in (*BUILT_IN, "commsched"):
            known = ", ".join(BUILT_IN)
            raise ValueError(f"unknown hook {name!r}: {known} or commsched, then [:k=v,...]")
        settings = _pairs(rest)
        ddp = {key: settings.pop(key) for key in _DDP_KINDS if key in settings}
        _check(name, settings, ddp)
        if settings.get("optimizer"):
            ddp.setdefault("gradient_as_bucket_view", True)
        return cls(text, name, settings, ddp)

    @property
    def is_deferred(self) -> bool:
        """Whether the optimizer is handed over: steps stay under way into the next forward."""
        return bool(self.settings.get("optimizer"))

    def warmup(self, least: int) -> int:
        """Steps before the first round: `least`, and more where something is measured or tried."""
        if self.name != "commsched":
            return least
        if self.settings.get("policy", "auto") == "auto":
            return max(least, _TRYING)
        measures = self.is_deferred or "codec" in self.settings
        return max(least, _MEASURING) if measures else least


def _pairs(rest: str) -> dict[str, Any]:
    pairs = [item.partition("=") for item in rest.split(",") if item]
    if any(not (key and sign) for key, sign, _ in pairs):
        raise ValueError(f"settings must be key=value, not {rest!r}")
    return {key: _value(value) for key, _, value in pairs}


def _check(name: str, settings: dict[str, Any], ddp: dict[str, Any]) -> None:
    if settings and name != "commsched":
        raise ValueError(f"{name!r} takes DDP's {', '.join(_DDP_KINDS)} only, not {[*settings]}")
    for key, kinds in {**_DDP_KINDS, "optimizer": (bool,)}.items():
        value = {**settings, **ddp}.get(key)
        if value is not None and type(value) not in kinds:  # not isinstance: True is an int
            what = "true or false" if bool in kinds else "a number"
            raise ValueError(f"{key} must be {what}, not {value!r}")


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
        "allreduce": default_hooks.allreduce_hook,  # what DDP does by itself, as a hook
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
