"""What collectives must give: known data, the right results, and counting what is not right."""

from __future__ import annotations

import torch

from commsched.linkprobe.collectives import ROOT, Call, Wires

__all__ = ["count_unequal", "count_wrong", "expected", "pattern"]


def pattern(name: str, rank: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What a rank gives. Differs by rank and place; sums and products are exact in any dtype."""
    places = torch.arange(numel, dtype=torch.int32)
    if name not in ("all_reduce", "reduce_scatter"):
        return ((places + 31 * rank) % 127).to(dtype)
    kinds = 2 if op == "prod" or dtype in (torch.int8, torch.uint8) else 5
    values = (places % 127 + 3 * rank) % kinds + (op == "prod")
    return values.to(dtype)


def expected(call: Call, wires: Wires, dtype: torch.dtype, op: str) -> torch.Tensor:
    """What `call.recv` must hold, computed without any communication."""
    name, peers, part = call.name, range(wires.size), call.numel // wires.size
    if name == "broadcast":
        return pattern(name, ROOT, call.numel, dtype, op)
    if name == "all_gather":
        return torch.cat([pattern(name, peer, part, dtype, op) for peer in peers])
    own = slice(wires.rank * part, (wires.rank + 1) * part)
    rows = [pattern(name, peer, call.numel, dtype, op) for peer in peers]
    if name == "all_to_all":
        return torch.cat([row[own] for row in rows])
    wide = torch.stack([row.to(torch.float64) for row in rows])
    reduce = {"sum": wide.sum, "avg": wide.mean, "prod": wide.prod}
    found = reduce[op](0) if op in reduce else getattr(wide, op)(0).values
    total = found.to(torch.int64).to(dtype) if not dtype.is_floating_point else found.to(dtype)
    return total[own] if name == "reduce_scatter" else total


def count_wrong(result: torch.Tensor, right: torch.Tensor, ulps: float = 0.0) -> int:
    """Elements that differ by more than `ulps` relative roundings; NaN is always wrong."""
    if not ulps:
        return int((result.cpu() != right).sum())
    wide, other = result.cpu().double(), right.double()
    close = (wide - other).abs() <= ulps * torch.finfo(right.dtype).eps * other.abs()
    return int((~close).sum())


def count_unequal(result: torch.Tensor, first: torch.Tensor) -> int:
    """Elements that are not finite, or not bit for bit those of `first`."""
    same = _bytes(result) == _bytes(first)
    return int((~(same.all(1) & result.isfinite())).sum())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(tensor.numel(), -1)
