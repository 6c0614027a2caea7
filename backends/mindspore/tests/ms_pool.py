"""What the ranks run to fail in the ways in which training scripts do."""

from __future__ import annotations

import faulthandler
import os

import numpy as np

from hpcompat_mindspore.job import world


def gather() -> list[float]:
    """The ranks, as each of them hears it from the others."""
    group = world()
    output = np.zeros(group.size(), np.float32)
    group.all_gather(output, np.full(1, group.rank(), np.float32)).wait()
    return output.tolist()


def process() -> int:
    return os.getpid()


def raise_on(rank: int) -> list[float]:
    if world().rank() == rank:
        raise LookupError(f"rank {rank} does not come")
    return gather()


def exit_on(rank: int) -> list[float]:
    if world().rank() == rank:
        os.write(1, b"last words")
        os._exit(7)
    return gather()


def crash_on(rank: int) -> list[float]:
    if world().rank() == rank:
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    return gather()


def wait_in_different_collectives() -> None:
    """The first rank waits for a barrier of a group of its own order, the others for a gather."""
    other = world().separate()
    if world().rank() == 0:
        other.barrier()
    gather()


def issue_on(rank: int) -> None:
    """Does not wait for it."""
    if world().rank() == rank:
        world().all_gather(np.zeros(world().size(), np.float32), np.zeros(1, np.float32))
