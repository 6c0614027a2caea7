"""Pools of MPI ranks with MindSpore in each, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpi_pool import MpiPool, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(world_size)`` is a pool of that many ranks, always the same one."""
    pools: dict[int, MpiPool] = {}

    def pool_of(world_size: int) -> MpiPool:
        if world_size not in pools:
            pools[world_size] = MpiPool(world_size)
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()
