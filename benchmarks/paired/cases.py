"""What is measured: the models, their sizes, and how often each is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class TinyBlock(nn.Module):
    """A pre-norm transformer block of 12 small parameters: 2 LayerNorms (4), q, k, v, o (4), an MLP with biases (4)."""

    def __init__(self, width: int, *, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        mixed = _attend(self.query(normed), self.key(normed), self.value(normed), num_heads=self.num_heads)
        hidden = hidden + self.out(mixed)
        return hidden + self.down(functional.gelu(self.up(self.mlp_norm(hidden))))


class DecoderBlock(nn.Module):
    """A Llama-style block: RMSNorm, causal attention, SwiGLU, no biases."""

    def __init__(self, width: int, *, num_heads: int = 8) -> None:
        super().__init__()
        self.num_heads = num_heads
        inner = width * 11 // 4
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        mixed = _attend(self.query(normed), self.key(normed), self.value(normed), num_heads=self.num_heads)
        hidden = hidden + self.out(mixed)
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    """The root unit: an input projection and a head around the blocks, each of which is a unit of its own."""

    def __init__(self, blocks: list[nn.Module], *, width: int, num_outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.embed(features)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def _attend(query: Tensor, key: Tensor, value: Tensor, *, num_heads: int) -> Tensor:
    def heads(states: Tensor) -> Tensor:
        return states.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    mixed = functional.scaled_dot_product_attention(heads(query), heads(key), heads(value), is_causal=True)
    return mixed.transpose(1, 2).flatten(-2)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    block: Callable[[int], nn.Module]
    num_blocks: int
    width: int
    batch_size: int
    seq_len: int
    num_outputs: int
    group: str
    """Cases of one group take turns in the same rounds, so that their times may be divided by each other."""
    num_rounds: int
    noop_collectives: bool = False
    ratio_of_overhead: bool = False
    """What `ratio` compares: the time of a step, or what sharding adds to the step of the bare model."""

    @property
    def num_units(self) -> int:
        return self.num_blocks + 1

    def make_model(self, device: torch.device) -> Stack:
        """The whole model; every call on every rank gives the same weights."""
        torch.manual_seed(0)
        blocks = [self.block(self.width) for _ in range(self.num_blocks)]
        return Stack(blocks, width=self.width, num_outputs=self.num_outputs).to(device)

    def make_input(self, device: torch.device, *, rank: int, one_token: bool = False) -> Tensor:
        """Features (batch, seq, width) in fp32, another batch on each rank; or (1, 1, width)."""
        generator = torch.Generator().manual_seed(1 + rank)
        batch, seq = (1, 1) if one_token else (self.batch_size, self.seq_len)
        return torch.randn(batch, seq, self.width, generator=generator).to(device)


def _tiny(name: str, *, num_blocks: int, group: str, num_rounds: int, host_only: bool = False) -> Case:
    return Case(
        name=name,
        block=TinyBlock,
        num_blocks=num_blocks,
        width=64,
        batch_size=4,
        seq_len=16,
        num_outputs=64,
        group=group,
        num_rounds=num_rounds,
        noop_collectives=host_only,
        ratio_of_overhead=host_only,
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _tiny("tiny24", num_blocks=24, group="tiny", num_rounds=16),
        _tiny("tiny24-host", num_blocks=24, group="host", num_rounds=24, host_only=True),
        Case(
            name="decoder6",
            block=DecoderBlock,
            num_blocks=6,
            width=512,
            batch_size=8,
            seq_len=128,
            num_outputs=256,
            group="decoder",
            num_rounds=8,
        ),
        _tiny("tiny96", num_blocks=96, group="tiny", num_rounds=16),
    )
}
