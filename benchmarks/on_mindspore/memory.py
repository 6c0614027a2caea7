"""Peak bytes of whole parameters and gather buffers in a step of the sharded model.

Every gather's output, and every array that a parameter shows as its whole, is remembered by a weak reference to the
memory behind it. At each of these moments, which are the only ones at which there can be more, the sizes of those still
alive are added up. What a tensor still shows, or a queued operation still needs, is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import hpcompat
from hpcompat_mindspore import collectives
from hpcompat_mindspore.param import ShardedParam
from on_mindspore.cases import Case
from on_mindspore.lanes import make_step, shard

Array = np.ndarray[Any, Any]


class ArrayWatch:
    """Peak of the bytes in the arrays that were noted and are alive."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def note(self, array: Array) -> None:
        while isinstance(array.base, np.ndarray):
            array = array.base
        key = id(array)
        if key not in self._sizes:
            self._sizes[key] = array.nbytes
            weakref.finalize(array, self._sizes.pop, key)
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))

    @property
    def alive_bytes(self) -> int:
        return sum(self._sizes.values())


def measure_bytes(case: Case) -> dict[str, int]:
    """All parameters, the largest unit, the peak of a step, and what is left after it, on the rank where that is most.

    All ranks call this together.
    """
    model = case.make_model()
    sizes = [_num_bytes(block) for block in model.blocks]
    total = _num_bytes(model)
    step = make_step(shard(model), case.make_input(rank=hpcompat.get_rank()))
    step()
    with watching() as watch:
        step()
    return {
        "parameter_bytes": total,
        "largest_unit_bytes": max(*sizes, total - sum(sizes)),
        "peak_whole_bytes": int(hpcompat.all_reduce_scalar(watch.peak_bytes, op="max")),
        "whole_bytes_after_step": int(hpcompat.all_reduce_scalar(watch.alive_bytes, op="max")),
    }


def _num_bytes(module: Any) -> int:
    return sum(parameter.nbytes for parameter in hpcompat.parameters(module))


@contextmanager
def watching() -> Iterator[ArrayWatch]:
    """Watch what is gathered inside the block."""
    watch = ArrayWatch()
    all_gather: Callable[..., Any] = collectives.all_gather
    show_whole: Callable[..., Any] = ShardedParam.show_whole

    def watched_gather(output: Array, input: Array, **options: Any) -> Any:
        watch.note(output)
        return all_gather(output, input, **options)

    def watched_show(param: ShardedParam) -> None:
        watch.note(param.whole_data)
        show_whole(param)

    collectives.all_gather, ShardedParam.show_whole = watched_gather, watched_show
    try:
        yield watch
    finally:
        collectives.all_gather, ShardedParam.show_whole = all_gather, show_whole
