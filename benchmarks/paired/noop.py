"""Collectives that do nothing, to leave only what the host spends on sharding.

Both implementations look the public functions up on `torch.distributed` at call time, so replacing the module's
attributes replaces the communication of both. That is checked: the calls are counted, and the sequence number of the
process group, which every real collective increments, must not move.

The outputs keep whatever was in their memory, so that the numbers of such a step mean nothing (they may be NaN). Its
speed does not depend on them as long as denormals are flushed, which the workers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GATHERS = ("all_gather_into_tensor", "all_gather_single", "all_gather")
REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter", "all_reduce")


class CompletedWork(dist.Work):
    """What an asynchronous collective returns when there was nothing to do."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class CallCounter:
    """How many collectives were asked for while they were no-ops."""

    def __init__(self) -> None:
        self.num_gathers = 0
        self.num_reductions = 0

    def count_gather(self) -> None:
        self.num_gathers += 1

    def count_reduction(self) -> None:
        self.num_reductions += 1


def sequence_number(group: dist.ProcessGroup) -> int:
    """How many collectives the group has run; the same at two moments if none ran in between."""
    return int(group._get_sequence_number_for_group())


@contextmanager
def noop_collectives(counter: CallCounter) -> Iterator[None]:
    """Replace the collectives of `torch.distributed` inside the block."""
    work = CompletedWork()

    def make(count: Callable[[], None], *, async_position: int) -> Callable[..., dist.Work | None]:
        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> dist.Work | None:
            count()
            asynchronous = args[async_position] if len(args) > async_position else async_op
            return work if asynchronous else None

        return collective

    replaced: dict[str, Any] = {}
    try:
        for names, count in ((GATHERS, counter.count_gather), (REDUCTIONS, counter.count_reduction)):
            for name in names:
                if (original := getattr(dist, name, None)) is not None:
                    replaced[name] = original
                    position = 4 if name.startswith("reduce_scatter") else 3
                    setattr(dist, name, make(count, async_position=position))
        yield
    finally:
        for name, original in replaced.items():
            setattr(dist, name, original)
