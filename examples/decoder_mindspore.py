"""The decoder in MindSpore, and the functions of `framework.Framework` for it.

Only operators that have a kernel on the CPU. There a product, a mean or an exponential of bf16 has none, so
everything but the sums of a block is computed in fp32 and goes back to the dtype of the input.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NoReturn

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hpcompat
from options import NORM_EPS, VOCABULARY, Options
from weights import initial_weights, rotary_tables

COMPUTE_DTYPES = {"fp32": None, "bf16": mindspore.bfloat16, "fp16": mindspore.float16}
REDUCE_DTYPE = mindspore.float32


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Linear(nn.Cell):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = _parameter(num_out, num_in)

    def construct(self, x: Tensor) -> Tensor:
        return ops.dense(x.float(), self.weight.float()).to(x.dtype)


class Embedding(nn.Cell):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = _parameter(num_rows, width)

    def construct(self, tokens: Tensor) -> Tensor:
        return ops.gather(self.weight.float(), tokens, 0).to(self.weight.dtype)


class RMSNorm(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _parameter(width)

    def construct(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + NORM_EPS)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Cell):
    """Causal self-attention with rotary embeddings; groups of query heads share one key and value head."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.head_size = options.head_size
        self.group_size = options.heads // options.kv_heads
        self.query = Linear(options.width, options.heads * options.head_size)
        self.key = Linear(options.width, options.kv_heads * options.head_size)
        self.value = Linear(options.width, options.kv_heads * options.head_size)
        self.out = Linear(options.heads * options.head_size, options.width)
        # Attributes, not inputs: mixed precision casts the inputs of a unit, and angles need fp32.
        self.cos, self.sin = (Tensor(table) for table in rotary_tables(options))
        self.future = Tensor(np.triu(np.full((options.seq_len, options.seq_len), -np.inf, np.float32), 1))

    def construct(self, x: Tensor) -> Tensor:
        """(batch, seq, width) -> (batch, seq, width)"""
        batch, seq_len, _ = x.shape
        query, key, value = (
            projection(x).float().reshape(batch, seq_len, -1, self.head_size).swapaxes(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = self.rotate(query) / math.sqrt(self.head_size), self.rotate(key)
        key, value = (ops.repeat_interleave(heads, self.group_size, 1) for heads in (key, value))
        scores = ops.matmul(query, key.swapaxes(-1, -2)) + self.future[:seq_len, :seq_len]
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.out(mixed.swapaxes(1, 2).reshape(batch, seq_len, -1).to(x.dtype))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each (i, i + half) pair of a head's features by the position's angle. (batch, head, seq, head_size)"""
        seq_len = x.shape[-2]
        cos, sin = self.cos[:seq_len], self.sin[:seq_len]
        a, b = ops.chunk(x, 2, -1)
        return ops.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SwiGLU(nn.Cell):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.gate = Linear(options.width, options.hidden_size)
        self.up = Linear(options.width, options.hidden_size)
        self.down = Linear(options.hidden_size, options.width)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.silu(self.gate(x).float()).to(x.dtype) * self.up(x))


class Block(nn.Cell):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(options.width)
        self.attention = Attention(options)
        self.feed_forward_norm = RMSNorm(options.width)
        self.feed_forward = SwiGLU(options)

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Cell):
    """(batch, seq) of token numbers -> (batch, seq, VOCABULARY) logits."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, options.width)
        self.blocks = nn.CellList([Block(options) for _ in range(options.layers)])
        self.norm = RMSNorm(options.width)
        self.head = Linear(options.width, VOCABULARY)
        if options.tied:
            self.head.weight = self.embedding.weight

    def construct(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _parameter(*shape: int) -> Parameter:
    return Parameter(Tensor(np.zeros(shape, np.float32)), name="weight")


def build_model(options: Options) -> Decoder:
    model = Decoder(options)
    model.load_state_dict({name: Tensor(array) for name, array in initial_weights(options).items()}, strict=True)
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return ops.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


# ---------------------------------------------------------------------------------------------------------------------
# The process, and what the report needs


def prepare() -> None:
    """Nothing: on the CPU, MindSpore computes the same from run to run."""


def end_process(exit_code: int) -> NoReturn:
    sys.exit(exit_code)


class UnshardedBytes:
    """Samples the bytes of the gathered parameters, in the middle of each block's forward and of its backward.

    Those are the moments when most is gathered. A parameter is gathered when it shows other memory than that of its
    shard. A gather still under way is not counted.
    """

    def __init__(self, model: Decoder) -> None:
        self.peak_bytes = 0
        self._parameters = list(hpcompat.parameters(model))
        self._shards = [parameter.data_ptr() for parameter in self._parameters]
        # On a part that is no unit itself, so that no hook of the library gathers or frees at the same moment.
        self._handles = [block.feed_forward.register_forward_hook(self._after_forward) for block in model.blocks]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after_forward(self, module: nn.Cell, args: Any, output: Tensor) -> None:
        self._sample()
        output.register_hook(lambda gradient: self._sample())

    def _sample(self) -> None:
        pairs = zip(self._parameters, self._shards, strict=True)
        gathered = sum(parameter.nbytes for parameter, shard in pairs if parameter.data_ptr() != shard)
        self.peak_bytes = max(self.peak_bytes, gathered)


def watch_unsharded_bytes(model: Decoder) -> UnshardedBytes:
    return UnshardedBytes(model)
