"""The decoder in PyTorch, and the functions of `framework.Framework` for it."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from options import NORM_EPS, VOCABULARY, Options
from weights import initial_weights, rotary_tables

COMPUTE_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
REDUCE_DTYPE = torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings; groups of query heads share one key and value head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.head_size = options.head_size
        self.query = _linear(options.width, options.heads * options.head_size)
        self.key = _linear(options.width, options.kv_heads * options.head_size)
        self.value = _linear(options.width, options.kv_heads * options.head_size)
        self.out = _linear(options.heads * options.head_size, options.width)
        # Buffers, not inputs: mixed precision casts the inputs of a unit, and angles need fp32.
        for name, table in zip(("cos", "sin"), rotary_tables(options), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, width) -> (batch, seq, width)"""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query), self.rotate(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each (i, i + half) pair of a head's features by the position's angle. (batch, head, seq, head_size)"""
        seq_len = x.shape[-2]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.gate = _linear(options.width, options.hidden_size)
        self.up = _linear(options.width, options.hidden_size)
        self.down = _linear(options.hidden_size, options.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.attention = Attention(options)
        self.feed_forward_norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.feed_forward = SwiGLU(options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """(batch, seq) of token numbers -> (batch, seq, VOCABULARY) logits."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.RMSNorm(options.width, eps=NORM_EPS)
        self.head = _linear(options.width, VOCABULARY)
        if options.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


def build_model(options: Options) -> Decoder:
    model = Decoder(options)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in initial_weights(options).items()})
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------------------------------------
# The process, and what the report needs


def prepare() -> None:
    # Without these, an accelerator may add up in another order from run to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def end_process(exit_code: int) -> NoReturn:
    # Not through the interpreter's shutdown: a gloo thread that drops its last tensor in there aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class UnshardedBytes:
    """Samples the bytes of the plain parameters, in the middle of each block's forward and of its backward.

    Those are the moments when most is gathered. hpcompat and native FSDP2 both register a plain parameter while its
    unit is gathered, and a DTensor otherwise, so one measure serves both. A gather still under way is not counted.
    """

    def __init__(self, model: Decoder) -> None:
        self.peak_bytes = 0
        self._model = model
        # On a part that is no unit itself, so that no hook of the library gathers or frees at the same moment.
        self._handles = [block.feed_forward.register_forward_hook(self._after_forward) for block in model.blocks]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._sample()
        output.register_hook(lambda gradient: self._sample())

    def _sample(self) -> None:
        gathered = (p for p in self._model.parameters() if not isinstance(p, DTensor))
        self.peak_bytes = max(self.peak_bytes, sum(p.nbytes for p in gathered if p.untyped_storage().nbytes()))


def watch_unsharded_bytes(model: Decoder) -> UnshardedBytes:
    return UnshardedBytes(model)
