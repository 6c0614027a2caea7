"""Numbers for models and batches: the same for every framework, rank and run.

[Note: why integers] Parameters and inputs are small integers, so every product and sum that a small model makes of
them is exact in float32, in whatever order it is added up. A case can therefore demand equal bits without knowing how
an implementation orders a reduction; only a division by something other than a power of two needs a tolerance.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from hpcompat_conformance.framework import Array


def parameter_values(name: str, shape: Sequence[int], *, seed: int) -> Array:
    """float32 array of -1, 0 and 1; depends on the parameter's name, so that no two parameters are alike."""
    return _integers(("parameter", name), shape, low=-1, high=1, seed=seed)


def batch_values(shape: Sequence[int], *, rank: int, step: int, seed: int) -> Array:
    """float32 array of integers from -2 to 2, different for each rank and step (or microbatch)."""
    return _integers(("batch", str(rank), str(step)), shape, low=-2, high=2, seed=seed)


def token_values(shape: Sequence[int], *, vocab: int, rank: int, step: int, seed: int) -> Array:
    """int64 array of token ids below ``vocab``."""
    return _integers(("tokens", str(rank), str(step)), shape, low=0, high=vocab - 1, seed=seed).astype(np.int64)


def bfloat16_exact(array: Array) -> bool:
    """Whether every value of a float32 array is one of bfloat16."""
    return not (np.ascontiguousarray(array, dtype=np.float32).view(np.uint32) & 0xFFFF).any()


def _integers(key: Sequence[str], shape: Sequence[int], *, low: int, high: int, seed: int) -> Array:
    generator = np.random.default_rng([seed, *(zlib.crc32(part.encode()) for part in key)])
    return generator.integers(low, high + 1, size=tuple(shape)).astype(np.float32)
