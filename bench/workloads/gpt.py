"""A real GPT of about 22 million parameters on real text: Python's own language reference."""

from __future__ import annotations

from collections.abc import Iterable
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

__all__ = ["Gpt"]

_WIDTH = 512
_LAYERS = 7
_HEADS = 8
_CONTEXT = 64
_BATCH = 4
_BYTES = 256


def text() -> Tensor:
    """All help topics of `pydoc` as one row of bytes, int64."""
    return torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.proj = nn.Linear(_WIDTH, _WIDTH)
        self.norm2 = nn.LayerNorm(_WIDTH)
        self.fc1 = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.fc2 = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, _WIDTH))
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return out


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(_BYTES, _WIDTH)
        self.position = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, bytes_: Tensor) -> Tensor:
        x = self.token(bytes_) + self.position.weight[: bytes_.shape[1]]
        # The output matrix is the embedding: its gradient comes last and is needed first.
        return functional.linear(self.norm(self.blocks(x)), self.token.weight)


class Gpt:
    """Bytes in, bytes out; one thread per rank, since the ranks share the machine.

    Args:
        rank: the batches differ by rank.
    """

    name = "gpt"

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self._text = text()
        self._rank = rank

    def model(self) -> nn.Module:
        """A new model."""
        torch.manual_seed(0)
        return _Model()

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW, fused: the plain one would take longer than the backward pass."""
        return torch.optim.AdamW(params, lr=3e-4, fused=True)

    def step(self, model: nn.Module, optimizer: Optimizer, step_index: int) -> float | None:
        """One step on a batch that depends on the step and the rank only."""
        generator = torch.Generator().manual_seed(step_index * 1000 + self._rank)
        last = len(self._text) - _CONTEXT - 1
        starts = torch.randint(last, (_BATCH,), generator=generator)
        rows = torch.stack([self._text[s : s + _CONTEXT + 1] for s in starts.tolist()])
        optimizer.zero_grad(set_to_none=True)
        logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.reshape(-1, _BYTES), rows[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())
