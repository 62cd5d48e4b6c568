"""How encoded chunks are averaged over ranks, for the three kinds of codecs in `base`.

Error feedback keeps one tensor a rank. Where shards have owners, the owner adds its own share as it
is: nothing of it travels, so nothing of it is lost. The same place of the tensor then keeps what
the owner's encoding of the average loses. So, summed over all ranks, average + errors = true
average + errors before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from commsched import exchange

if TYPE_CHECKING:
    from commsched.codecs.base import ByteCodec, Summed
    from commsched.parcel import Parcel, Rounds

__all__ = ["all_reduce", "gather", "shards", "spread_and_add"]


def all_reduce(codec: Summed, parcel: Parcel) -> Rounds:
    """Encode, sum on the wire, decode."""
    grad = parcel.take()
    seed = parcel.seed()
    spec = codec.wire(parcel.chunk, 0, parcel.step)
    wire = parcel.pool.take(spec.dtype, spec.numel)
    _encode(codec, grad, parcel.slot("error"), wire, seed)
    total = yield exchange.summed(wire, parcel.size)
    codec.decode(total, grad, seed)
    parcel.pool.give(wire)
    parcel.put(grad)


def gather(codec: ByteCodec, parcel: Parcel) -> Rounds:
    """Encode, send to all, decode and add up in rank order, this rank's own like the others'."""
    grad = parcel.take()
    own = parcel.pool.take(torch.uint8, codec.nbytes(grad.numel(), parcel.step))
    _encode(codec, grad, parcel.slot("error"), own, parcel.seed(parcel.rank))
    yield from spread_and_add(codec, parcel, own, grad)


def spread_and_add(
    codec: ByteCodec, parcel: Parcel, own: torch.Tensor, grad: torch.Tensor
) -> Rounds:
    """Send `own` to all, add up all ranks' in `grad`, and put that. `own` is the pool's."""
    received = parcel.pool.take(torch.uint8, own.numel() * parcel.size)
    yield exchange.spread(own, received, [own.numel()] * parcel.size, parcel.rank)
    grad.zero_()
    for wire in torch.split(received, own.numel()):
        codec.decode_add(wire, grad)
    parcel.pool.give(own)
    parcel.pool.give(received)
    parcel.put(grad)


def shards(codec: ByteCodec, parcel: Parcel) -> Rounds:
    """All-to-all of encoded shards; their owners add up, encode again, and send to all."""
    rank, pool = parcel.rank, parcel.pool
    grad = parcel.take()
    shares = torch.split(grad, exchange.shard_sizes(grad.numel(), parcel.size))
    sizes = [codec.nbytes(share.numel(), parcel.step) for share in shares]
    error = parcel.slot("error")
    numels = [share.numel() for share in shares]
    errors = [None] * parcel.size if error is None else torch.split(error, numels)
    others = [size if peer != rank else 0 for peer, size in enumerate(sizes)]
    travels = pool.take(torch.uint8, sum(others))
    for peer, wire in enumerate(torch.split(travels, others)):
        if others[peer]:
            _encode(codec, shares[peer], errors[peer], wire, parcel.seed(rank, peer))

    own_sizes = [sizes[rank] if peer != rank else 0 for peer in range(parcel.size)]
    received = pool.take(torch.uint8, sum(own_sizes))
    yield exchange.swapped(travels, received, others, own_sizes)
    for wire in torch.split(received, own_sizes):
        if wire.numel():
            codec.decode_add(wire, shares[rank])
    pool.give(received)
    pool.give(travels)

    own = pool.take(torch.uint8, sizes[rank])
    if sizes[rank]:
        _encode(codec, shares[rank], errors[rank], own, parcel.seed(rank, rank))
    filled = pool.take(torch.uint8, sum(sizes))
    yield exchange.spread(own, filled, sizes, rank)
    for share, wire in zip(shares, torch.split(filled, sizes), strict=True):
        if wire.numel():
            codec.decode(wire, share)
    pool.give(own)
    pool.give(filled)
    parcel.put(grad)


def _encode(
    codec: Summed | ByteCodec,
    grad: torch.Tensor,
    error: torch.Tensor | None,
    out: torch.Tensor,
    seed: int,
) -> None:
    if error is None:
        codec.encode(grad, out, seed)
    else:
        codec.encode_feedback(grad, error, out, seed)
