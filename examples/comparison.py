"""How two runs of the same training differ: bit for bit, or in the size of the differences between losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Snapshot = dict[str, dict[str, NDArray[Any]]]
"""Kind ("parameters", "gradients", "AdamW states") -> name -> this rank's shard, in a dtype with the same bits."""


class Counts(NamedTuple):
    differing: int
    compared: int


def count_differences(ours: Snapshot, native: Snapshot) -> dict[str, Counts]:
    """For each kind of tensor, the elements of this rank's shards that differ.

    A tensor that only one side has, or that has another shape or dtype there, differs in all its elements.
    """
    return {kind: _count_kind(ours.get(kind, {}), native.get(kind, {})) for kind in sorted(ours.keys() | native.keys())}


def count_loss_differences(ours: list[float], native: list[float]) -> Counts:
    """The losses whose `repr` differs; one that only one side has differs."""
    num_steps = max(len(ours), len(native))
    num_equal = sum(repr(a) == repr(b) for a, b in zip(ours, native, strict=False))
    return Counts(num_steps - num_equal, num_steps)


def relative_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Step by step, relative to the larger loss; infinite where one of the two is no finite number."""
    pairs = zip(first, second, strict=True)
    return [abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


def _count_kind(ours: dict[str, NDArray[Any]], native: dict[str, NDArray[Any]]) -> Counts:
    num_differing = num_elements = 0
    for name in ours.keys() | native.keys():
        sides = [side[name] for side in (ours, native) if name in side]
        size = max(side.size for side in sides)
        num_elements += size
        num_differing += _count_bits(*sides) if len(sides) == 2 else size
    return Counts(num_differing, num_elements)


def _count_bits(a: NDArray[Any], b: NDArray[Any]) -> int:
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.size, b.size)
    # As integers, because -0.0 == 0.0 and nan != nan.
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return int(np.count_nonzero(np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)))
