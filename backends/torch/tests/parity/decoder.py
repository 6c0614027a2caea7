"""A llama-style decoder small enough to train in milliseconds: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the decoder.

    `vocab` is odd on purpose: its rows never divide evenly over 2 or 4 ranks. Layer i is `ffn + 4 * i` wide, so that
    the size of a collective tells which layer it belongs to.
    """

    vocab: int = 33
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 24
    layers: int = 2
    length: int = 8
    tied: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


def rotary_tables(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles: two fp32 tables of shape (length, size)."""
    frequencies = 1.0 / (100.0 ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, length, size), in fp32, back in the dtype of the input."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (heads.float() * cos + turned * sin).to(heads.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention without biases."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            proj(hidden).view(batch, length, -1, self.config.head_size).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = self.config.heads // self.config.kv_heads
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.ffn = SwiGLU(config.hidden, config.ffn + 4 * index)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin)
        return hidden + self.ffn(self.ffn_norm(hidden))


class Decoder(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocab)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_tables(config.length, config.head_size)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        return self.head(self.norm(hidden))
