"""What the benchmarks' rounds have in common, whatever the framework: quiet visits, and intervals of what was seen."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUM_RESAMPLES = 1000

Rounds = list[list[float]]
"""Seconds: `rounds[round][step]`."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage now, and not inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def bootstrap_interval(statistic: Callable[[list[int]], float], *, num_rounds: int) -> tuple[float, float]:
    """5th and 95th percentile of a statistic over resampled rounds; it is given their indices."""
    generator = random.Random(0)
    values = sorted(statistic(generator.choices(range(num_rounds), k=num_rounds)) for _ in range(NUM_RESAMPLES))
    return values[NUM_RESAMPLES // 20], values[-NUM_RESAMPLES // 20]
