"""What is measured: the models, in MindSpore, and their sizes. The first two are those of `paired/cases.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hpcompat

NORM_EPS = 1e-6


class TinyBlock(nn.Cell):
    """A pre-norm transformer block of 12 small parameters: 2 LayerNorms (4), q, k, v, o (4), an MLP with biases (4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm((width,))
        self.attention = Attention(width, num_heads=4)
        self.mlp_norm = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 2 * width)
        self.down = nn.Dense(2 * width, width)

    def construct(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(ops.gelu(self.up(self.mlp_norm(hidden))))


class DecoderBlock(nn.Cell):
    """A Llama-style block: RMSNorm, causal attention, SwiGLU, no biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 11 // 4
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, num_heads=8)
        self.mlp_norm = RMSNorm(width)
        self.gate = nn.Dense(width, inner, has_bias=False)
        self.up = nn.Dense(width, inner, has_bias=False)
        self.down = nn.Dense(inner, width, has_bias=False)

    def construct(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(ops.silu(self.gate(normed)) * self.up(normed))


class WideBlock(nn.Cell):
    """Two large products for a few tokens: many bytes to gather and reduce, little to compute with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Dense(width, width, has_bias=False)
        self.down = nn.Dense(width, width, has_bias=False)

    def construct(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(ops.relu(self.up(hidden)))


class Attention(nn.Cell):
    """Causal self-attention: (batch, seq, width) -> (batch, seq, width)."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Dense(width, width, has_bias=False)
        self.key = nn.Dense(width, width, has_bias=False)
        self.value = nn.Dense(width, width, has_bias=False)
        self.out = nn.Dense(width, width, has_bias=False)

    def construct(self, hidden: Tensor) -> Tensor:
        batch, seq_len, width = hidden.shape
        shape = (batch, seq_len, self.num_heads, width // self.num_heads)
        query, key, value = (
            projection(hidden).reshape(shape).swapaxes(1, 2) for projection in (self.query, self.key, self.value)
        )
        scores = ops.matmul(query, key.swapaxes(-1, -2)) / math.sqrt(shape[-1]) + _future(seq_len)
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.out(mixed.swapaxes(1, 2).reshape(batch, seq_len, width))


class RMSNorm(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(width, np.float32)), name="weight")

    def construct(self, hidden: Tensor) -> Tensor:
        return hidden * ops.rsqrt((hidden * hidden).mean(-1, keep_dims=True) + NORM_EPS) * self.weight


class Stack(nn.Cell):
    """The root unit: an input projection and a head around the blocks, each of which is a unit of its own."""

    def __init__(self, blocks: list[nn.Cell], *, width: int, num_outputs: int) -> None:
        super().__init__()
        self.embed = nn.Dense(width, width, has_bias=False)
        self.blocks = nn.CellList(blocks)
        self.norm = nn.LayerNorm((width,))
        self.head = nn.Dense(width, num_outputs, has_bias=False)

    def construct(self, features: Tensor) -> Tensor:
        hidden = self.embed(features)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


_masks: dict[int, Tensor] = {}


def _future(seq_len: int) -> Tensor:
    """Minus infinity above the diagonal; made once."""
    if seq_len not in _masks:
        _masks[seq_len] = Tensor(np.triu(np.full((seq_len, seq_len), -np.inf, np.float32), 1))
    return _masks[seq_len]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    block: Callable[[int], nn.Cell]
    num_blocks: int
    width: int
    batch_size: int
    seq_len: int
    num_outputs: int
    num_rounds: int

    @property
    def num_units(self) -> int:
        return self.num_blocks + 1

    def make_model(self) -> Any:
        """The whole model; every call on every rank gives the same weights."""
        blocks = [self.block(self.width) for _ in range(self.num_blocks)]
        model = Stack(blocks, width=self.width, num_outputs=self.num_outputs)
        numbers = np.random.default_rng(0)
        for name, parameter in hpcompat.named_parameters(model):
            if parameter.ndim > 1:
                scale = 1 / math.sqrt(parameter.shape[-1])
                parameter.set_data(Tensor(numbers.uniform(-scale, scale, parameter.shape).astype(np.float32)))
            elif name.endswith("bias"):
                parameter.set_data(Tensor(np.zeros(parameter.shape, np.float32)))
        return model

    def make_input(self, *, rank: int) -> Tensor:
        """Features (batch, seq, width) in fp32, another batch on each rank."""
        numbers = np.random.default_rng([1, rank])
        return Tensor(numbers.normal(size=(self.batch_size, self.seq_len, self.width)).astype(np.float32))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("tiny24", TinyBlock, 24, width=64, batch_size=4, seq_len=16, num_outputs=64, num_rounds=12),
        Case("decoder6", DecoderBlock, 6, width=512, batch_size=8, seq_len=128, num_outputs=256, num_rounds=6),
        Case("large4", WideBlock, 4, width=1024, batch_size=2, seq_len=16, num_outputs=64, num_rounds=8),
    )
}
