"""What the decoder starts from, as numpy arrays: the same bits in every framework."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from options import VOCABULARY, Options

Array = NDArray[np.float32]


def initial_weights(options: Options) -> dict[str, Array]:
    """Name -> float32 array for every parameter of the decoder; the options alone decide the values.

    Matrices are normal with a standard deviation of 0.02, and map inputs of their second dim to outputs of the first.
    The scales of norms are 1. A tied head is listed too, and is the embedding's array itself.
    """
    generator = np.random.default_rng(options.seed)
    weights = {name: _initial(shape, generator) for name, shape in _shapes(options).items()}
    if options.tied:
        weights["head.weight"] = weights["embedding.weight"]
    return weights


def rotary_tables(options: Options) -> tuple[Array, Array]:
    """Cosines and sines of the rotary embeddings' angles, each (seq_len, head_size / 2)."""
    frequencies = 10_000.0 ** (-np.arange(0, options.head_size, 2) / options.head_size)
    angles = np.outer(np.arange(options.seq_len), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _initial(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return generator.standard_normal(shape, np.float32) * np.float32(0.02)


def _shapes(options: Options) -> dict[str, tuple[int, ...]]:
    width, hidden = options.width, options.hidden_size
    query_size, key_size = options.heads * options.head_size, options.kv_heads * options.head_size
    block = {
        "attention_norm.weight": (width,),
        "attention.query.weight": (query_size, width),
        "attention.key.weight": (key_size, width),
        "attention.value.weight": (key_size, width),
        "attention.out.weight": (width, query_size),
        "feed_forward_norm.weight": (width,),
        "feed_forward.gate.weight": (hidden, width),
        "feed_forward.up.weight": (hidden, width),
        "feed_forward.down.weight": (width, hidden),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(options.layers) for name, shape in block.items()}
    ends = {"embedding.weight": (VOCABULARY, width), "norm.weight": (width,), "head.weight": (VOCABULARY, width)}
    return {**blocks, **ends}
