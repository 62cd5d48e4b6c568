"""powersgd, acpsgd: a gradient matrix as the product of two thin ones, which are summed instead.

A matrix M of rows x columns is approximated by ``P.T @ Q``, with P of rank x rows and Q of
rank x columns: factors lie transposed, as BLAS is faster on them. One of the two is an orthonormal
basis that all ranks share; the other holds M's coefficients in it. Coefficients are linear in M, so
they may be summed on the wire.

Bases are made of sums, and of what earlier sums left. So all ranks make the same ones, and put the
same bytes, where their BLAS rounds alike: on one kind of CPU, with equal numbers of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isqrt
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from commsched import exchange
from commsched.codecs.base import Codec, Oracle, WireSpec
from commsched.codecs.factors import Factor, drawn, facing, largest, orthonormal, subtract
from commsched.layout import Piece

if TYPE_CHECKING:
    from commsched.layout import Chunk
    from commsched.memory import Memory
    from commsched.parcel import Parcel, Rounds

__all__ = ["AcpSgd", "PowerSgd"]


@dataclass(frozen=True)
class _Matrix:
    """One parameter's gradient that is factored.

    Attributes:
        param: its name.
        rank: of the factors.
        source: share of the mean plus error, rows x columns; later the new error.
        mean: where the average goes, likewise.
    """

    param: str
    rank: int
    source: torch.Tensor
    mean: torch.Tensor

    def length(self, factor: Factor) -> int:
        return self.source.shape[0 if factor == "p" else 1]


class _Load:
    """A parcel's gradients, as matrices to be factored and the rest, which travels as it is.

    All are views of two flat tensors: the shares, and the error slot, to which they are added.
    Without error feedback there is only the first.
    """

    def __init__(self, codec: _LowRank, parcel: Parcel) -> None:
        self.shares = parcel.take()
        error = parcel.slot("error")
        self.feedback = error is not None
        source = self.shares if error is None else error.add_(self.shares)
        self.matrices: list[_Matrix] = []
        self.rest: list[tuple[torch.Tensor, torch.Tensor]] = []  # source, mean
        sizes = [piece.numel for piece in parcel.chunk.pieces]
        pairs = zip(torch.split(source, sizes), torch.split(self.shares, sizes), strict=True)
        for piece, span, pair in zip(parcel.chunk.pieces, parcel.spans, pairs, strict=True):
            if rank := codec.rank_of(piece):
                views = [one.view(piece.rows, -1) for one in pair]
                self.matrices.append(_Matrix(span.param, rank, *views))
            else:
                self.rest.append(pair)

    def factors(self, wire: torch.Tensor, factor: Factor) -> list[torch.Tensor]:
        """The place of each matrix's factor in a wire tensor: rank x its length."""
        sizes = [matrix.rank * matrix.length(factor) for matrix in self.matrices]
        parts = torch.split(wire[: sum(sizes)], sizes) if sizes else ()
        pairs = zip(parts, self.matrices, strict=True)
        return [part.view(matrix.rank, -1) for part, matrix in pairs]

    def send_rest(self, wire: torch.Tensor) -> None:
        """Write the rest to the end of the wire. It loses nothing, so its errors are 0."""
        if not self.rest:
            return
        sources = [source for source, _ in self.rest]
        torch._foreach_copy_(_last(wire, sources), sources)
        if self.feedback:
            torch._foreach_zero_(sources)

    def receive_rest(self, wire: torch.Tensor) -> None:
        """The other way, of the sum."""
        if self.rest:
            means = [mean for _, mean in self.rest]
            torch._foreach_copy_(means, _last(wire, means))


@dataclass(frozen=True)
class _LowRank(Codec):
    """What both codecs share: options, and which gradients are factored.

    Attributes:
        rank: of the approximation; less where a matrix has fewer rows or columns.
        min_rate: a matrix is factored where it has more than `min_rate` times as many numbers as
            its two factors together. Others, and vectors, travel as they are, in float32.
        seed: of the first bases, which are drawn.
    """

    whole_params: ClassVar[bool] = True
    rank: int = 4
    min_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} is not allowed: it must be 1 or more")
        if not 0.0 < self.min_rate < inf:
            raise ValueError(f"min_rate={self.min_rate} is not allowed: it must be more than 0")

    def rank_of(self, piece: Piece) -> int:
        """The rank of this piece's factors; 0 where it travels as it is."""
        if not piece.rows:
            return 0
        cols = piece.numel // piece.rows
        rank = min(self.rank, piece.rows, cols)
        return rank if piece.numel > self.min_rate * rank * (piece.rows + cols) else 0

    def _numel(self, chunk: Chunk, factor: Factor) -> int:
        """Numbers in that factor of all matrices."""
        pieces = [piece for piece in chunk.pieces if self.rank_of(piece)]
        lengths = [p.rows if factor == "p" else p.numel // p.rows for p in pieces]
        return sum(self.rank_of(p) * n for p, n in zip(pieces, lengths, strict=True))

    def _rest_numel(self, chunk: Chunk) -> int:
        return sum(piece.numel for piece in chunk.pieces if not self.rank_of(piece))

    def _kept_basis(self, memory: Memory, matrix: _Matrix, factor: Factor) -> torch.Tensor:
        """Made of the factor that is kept; of one that is drawn where none is."""
        shape = matrix.rank, matrix.length(factor)
        kept = memory.factors.get(matrix.param, {}).get(f"{self.name}.{factor}")
        if kept is None or kept.shape != shape:
            kept = drawn(f"{self.seed}:{matrix.param}:{factor}", *shape)
        return orthonormal(kept)

    def _keep(self, memory: Memory, matrix: _Matrix, factor: Factor, total: torch.Tensor) -> None:
        """Keep a summed factor, unless it is 0 or not finite: no basis can be made of that."""
        if 0.0 < largest(total) < inf:
            memory.factors[matrix.param][f"{self.name}.{factor}"] = total.clone()


# In NumPy: one matrix, as nearly square as its size allows, on one rank, on step 0, with nothing
# kept; its parameter is called by the seed. What is not factored is encoded as it is.


def _oracle_basis(codec: Codec, numel: int, seed: int) -> tuple[int, np.ndarray | None]:
    """The matrix's rows; and Q's basis, columns x rank, or None where it is not factored."""
    rows = next(rows for rows in range(isqrt(numel), 0, -1) if numel % rows == 0)
    lowrank = cast(_LowRank, codec)
    rank = lowrank.rank_of(Piece(0, 0, numel, rows))
    if not rank:
        return rows, None
    q = drawn(f"{lowrank.seed}:{seed}:q", rank, numel // rows).numpy()
    return rows, np.linalg.qr(q.T.astype(np.float64))[0]


def _bytes(*factors: np.ndarray) -> np.ndarray:
    flat: np.ndarray = np.concatenate([factor.T.ravel() for factor in factors])
    return flat.astype(np.float32).view(np.uint8)


def _acpsgd_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    rows, basis = _oracle_basis(codec, grad.size, seed)
    return grad.view(np.uint8) if basis is None else _bytes(grad.reshape(rows, -1) @ basis)


def _from_acpsgd(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    rows, basis = _oracle_basis(codec, numel, seed)
    values: np.ndarray = wire.view(np.float32)
    if basis is None:
        return values
    p = values.reshape(-1, rows).T
    return np.asarray(p @ basis.T, np.float32).ravel()


def _powersgd_bytes(codec: Codec, grad: np.ndarray, seed: int) -> np.ndarray:
    """The wires of both rounds, one after the other."""
    rows, basis = _oracle_basis(codec, grad.size, seed)
    if basis is None:
        return grad.view(np.uint8)
    matrix = grad.reshape(rows, -1).astype(np.float64)
    p = matrix @ basis
    return _bytes(p, matrix.T @ np.linalg.qr(p)[0])


def _from_powersgd(codec: Codec, wire: np.ndarray, numel: int, seed: int) -> np.ndarray:
    rows, basis = _oracle_basis(codec, numel, seed)
    values: np.ndarray = wire.view(np.float32)
    if basis is None:
        return values
    rank = basis.shape[1]
    p, q = np.split(values.astype(np.float64), [rank * rows])
    left = np.linalg.qr(p.reshape(rank, rows).T)[0]
    return np.asarray(left @ q.reshape(rank, -1), np.float32).ravel()


@dataclass(frozen=True)
class PowerSgd(_LowRank):
    """One step of power iteration a training step, in two rounds.

    ``P = M Q`` is summed and made orthonormal, then ``Q = M.T P`` is summed; the average is
    ``P Q.T``. Q is kept for the next step. Results are defined up to rounding, as the module says.

    Source: Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization (NeurIPS 2019). Q is made orthonormal too, which changes nothing but
    rounding and range, and brings back columns that once were 0.
    """

    name = "powersgd"
    ops = ("all_reduce", "all_reduce")
    oracle = Oracle(_powersgd_bytes, _from_powersgd)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """First all P and what travels as it is; then all Q, of which there may be none."""
        if round == 0:
            return WireSpec(torch.float32, self._numel(chunk, "p") + self._rest_numel(chunk))
        return WireSpec(torch.float32, self._numel(chunk, "q"))

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        load, memory, pool = _Load(self, parcel), parcel.memory, parcel.pool
        wire = pool.take(torch.float32, self.wire(parcel.chunk, 0).numel)
        for matrix, p in zip(load.matrices, load.factors(wire, "p"), strict=True):
            torch.mm(self._kept_basis(memory, matrix, "q"), matrix.source.t(), out=p)
        load.send_rest(wire)
        total = yield exchange.summed(wire, parcel.size)
        load.receive_rest(total)
        bases = [orthonormal(p) for p in load.factors(total, "p")]
        pool.give(wire)

        wire = pool.take(torch.float32, self.wire(parcel.chunk, 1).numel)
        for matrix, basis, q in zip(load.matrices, bases, load.factors(wire, "q"), strict=True):
            torch.mm(basis, matrix.source, out=q)
            if load.feedback:
                subtract(basis, q, matrix.source)
        total = yield exchange.summed(wire, parcel.size)
        for matrix, basis, q in zip(load.matrices, bases, load.factors(total, "q"), strict=True):
            torch.mm(basis.t(), q, out=matrix.mean)
            self._keep(memory, matrix, "q", q)
        pool.give(wire)
        parcel.put(load.shares)


@dataclass(frozen=True)
class AcpSgd(_LowRank):
    """Half a step of power iteration a training step, in one round.

    On even steps ``P = M Q`` is summed, with Q made orthonormal, and kept; on odd steps
    ``Q = M.T P``, with P made orthonormal. The average is ``P Q.T`` each time. Results are defined
    up to rounding, as the module says.

    Source: Zhang, Zhang, Shi, Chu, Li: Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning (ICDCS 2023).
    """

    name = "acpsgd"
    ops = ("all_reduce",)
    oracle = Oracle(_acpsgd_bytes, _from_acpsgd)

    def wire(self, chunk: Chunk, round: int = 0, step: int | None = None) -> WireSpec:  # noqa: A002
        """One factor and what travels as it is. Without a step: of the larger factor."""
        factors: Sequence[Factor] = ("p", "q") if step is None else (_sent_on(step),)
        numel = max(self._numel(chunk, factor) for factor in factors)
        return WireSpec(torch.float32, numel + self._rest_numel(chunk))

    def rounds(self, parcel: Parcel) -> Rounds:
        """See `Codec`."""
        load, memory, pool = _Load(self, parcel), parcel.memory, parcel.pool
        sent = _sent_on(parcel.step)
        known: Factor = "q" if sent == "p" else "p"
        bases = [self._kept_basis(memory, matrix, known) for matrix in load.matrices]
        wire = pool.take(torch.float32, self.wire(parcel.chunk, 0, parcel.step).numel)
        for matrix, basis, factor in zip(
            load.matrices, bases, load.factors(wire, sent), strict=True
        ):
            source = facing(matrix.source, known)
            torch.mm(basis, source, out=factor)
            if load.feedback:
                subtract(basis, factor, source)
        load.send_rest(wire)
        total = yield exchange.summed(wire, parcel.size)
        load.receive_rest(total)
        for matrix, basis, factor in zip(
            load.matrices, bases, load.factors(total, sent), strict=True
        ):
            torch.mm(basis.t(), factor, out=facing(matrix.mean, known))
            self._keep(memory, matrix, sent, factor)
        pool.give(wire)
        parcel.put(load.shares)


def _sent_on(step: int) -> Factor:
    """By the step, which is equal on all ranks and goes on where a checkpoint left it."""
    return "p" if step % 2 == 0 else "q"


def _last(wire: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The end of the wire, cut into parts of the sizes of `likes`."""
    sizes = [like.numel() for like in likes]
    return list(torch.split(wire[wire.numel() - sum(sizes) :], sizes))
