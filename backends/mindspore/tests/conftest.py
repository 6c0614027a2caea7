"""Pools of MPI ranks with MindSpore in each, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpi_pool import MpiPool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(world_size)`` is a pool of that many ranks, always the same one; ``queued``: see `MpiPool`."""
    pools: dict[tuple[int, bool], MpiPool] = {}

    def pool_of(world_size: int, *, queued: bool = False) -> MpiPool:
        key = (world_size, queued)
        if key not in pools:
            pools[key] = MpiPool(world_size, queued=queued)
        return pools[key]

    yield pool_of
    for pool in pools.values():
        pool.close()
