"""What commsched must know of the DDP model behind a hook: the object, its names, its buckets."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from commsched.errors import CommSchedError
from commsched.layout import BucketSpec, ParamSpec, digest_of

__all__ = ["Buckets", "compiled_wrappers", "find_ddp", "unwrap_ddp"]

# Attributes under which wrappers keep what they wrap: torch.compile, Lightning Fabric, plain
# wrappers, Lightning's Trainer and strategy, the HF Trainer.
_WRAPPER_ATTRIBUTES = (
    "_orig_mod",
    "_forward_module",
    "module",
    "model_wrapped",
    "strategy",
    "model",
)


def find_ddp(state: object) -> DistributedDataParallel | None:
    """The DDP object on which `state` was registered as a hook's state; None if it is not found.

    A hook is told neither the model nor its process group, but DDP keeps (hook, state) pairs, so
    one walk over the live objects finds it. Done once, at the first bucket.

    Raises:
        CommSchedError: two models share the state.
    """
    found = [
        ddp
        for ddp in gc.get_objects()
        # type() rather than isinstance(), which asks lazy proxies for __class__ and wakes them
        if issubclass(type(ddp), DistributedDataParallel)
        and any(pair[1] is state for pair in ddp.__dict__.get("_comm_hooks", ()))
    ]
    if len(found) > 1:
        raise CommSchedError(
            f"one commsched.State is registered on {len(found)} DDP models; give each its own State"
        )
    return found[0] if found else None


def unwrap_ddp(model: object) -> DistributedDataParallel:
    """The DDP object in `model`: itself, or inside what frameworks wrap around it.

    Raises:
        CommSchedError: there is none.
    """
    seen: set[int] = set()
    candidates = [model]
    while candidates:
        candidate = candidates.pop(0)
        if isinstance(candidate, DistributedDataParallel):
            return candidate
        if id(candidate) not in seen and len(seen) < 64:
            seen.add(id(candidate))
            candidates.extend(_wrapped(candidate))
    raise CommSchedError(
        f"no DistributedDataParallel inside {type(model).__name__}: call attach() after the "
        "framework has wrapped the model (Lightning: in a callback's on_train_start; Accelerate: "
        "after prepare(); HF Trainer: attach(trainer) in a callback's on_train_begin)"
    )


def _wrapped(obj: Any) -> Iterator[Any]:
    for name in _WRAPPER_ATTRIBUTES:
        try:
            inner = getattr(obj, name, None)
        except Exception:  # properties of half-built trainers raise all sorts of errors
            continue
        if inner is not None:
            yield inner


def compiled_wrappers(ddp: DistributedDataParallel) -> tuple[list[torch.nn.Module], bool]:
    """What torch.compile has made of a model, seen from its parameters.

    Returns:
        The compiled modules around `ddp` or in it; and whether `ddp` was compiled in place, so
        that its own hooks are compiled with it.
    """
    inside = [one for one in ddp.modules() if one._compiled_call_impl is not None]
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # a second to import: only if it is there
    if dynamo is not None:
        modules = [m for m in gc.get_objects() if issubclass(type(m), dynamo.OptimizedModule)]
        mine = {id(module) for module in ddp.modules()}
        inside += [one for one in modules if id(one) in mine or one._orig_mod is ddp]
    return [one for one in inside if one is not ddp], ddp in inside


class Buckets:
    """Recognises a model's buckets by their parameters: DDP's indices change when it rebuilds."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._names = {} if ddp is None else _names_of(ddp)
        self._known: dict[tuple[Any, ...], tuple[int, BucketSpec]] = {}

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model, while it lives."""
        return None if self._ddp is None else self._ddp()

    def recognise(self, bucket: GradBucket, buffer: torch.Tensor) -> tuple[int, BucketSpec]:
        """A number for this bucket, equal whenever it comes again, and what it holds."""
        params = bucket.parameters()
        fingerprint = (*map(id, params), buffer.is_sparse, buffer.dtype, buffer.numel())
        known = self._known.get(fingerprint)
        if known is None:
            self._refuse_strangers(params)
            known = (len(self._known), self._spec(params, buffer))
            self._known[fingerprint] = known
        return known

    @property
    def digest(self) -> str:
        """Equal for models with equal parameter names and shapes; "" where the model is unknown."""
        ddp = self.ddp
        if ddp is None:
            return ""
        return digest_of([[n, list(p.shape)] for n, p in ddp.module.named_parameters()])

    @property
    def numels(self) -> dict[str, int]:
        """Elements of each of the model's parameters; empty where the model is unknown."""
        ddp = self.ddp
        return {} if ddp is None else {n: p.numel() for n, p in ddp.module.named_parameters()}

    def _refuse_strangers(self, params: list[torch.Tensor]) -> None:
        if self._ddp is None:
            return
        if self.ddp is None or any(id(param) not in self._names for param in params):
            raise CommSchedError(
                "a bucket holds parameters that are not of this State's model: one State serves "
                "one DDP model, with the parameters it had at its first backward"
            )

    def _spec(self, params: list[torch.Tensor], buffer: torch.Tensor) -> BucketSpec:
        rows = []
        for param in params:
            # Complex gradients arrive as pairs of floats.
            numel = param.numel() * (2 if param.is_complex() and not buffer.is_complex() else 1)
            rows.append(ParamSpec(self._name(param), numel, tuple(param.shape)))
        return BucketSpec(tuple(rows), str(buffer.dtype).removeprefix("torch."), buffer.is_sparse)

    def _name(self, param: torch.Tensor) -> str:
        # Without the model, a parameter is known by the position at which it first came, which is
        # the same on every rank.
        return self._names.setdefault(id(param), f"param{len(self._names)}")


def _names_of(ddp: DistributedDataParallel) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, param in ddp.module.named_parameters():
        names.setdefault(id(param), name)
    return names
