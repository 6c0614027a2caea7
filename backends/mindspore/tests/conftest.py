"""Pools of MPI ranks with MindSpore in each, for the whole session."""

from __future__ import annotations

import pytest

from hpcompat_conformance.adapters.hpcompat_mindspore import ADAPTER
from hpcompat_conformance.mpirun import Mpirun
from hpcompat_conformance.pool import PoolSet, WorkerPool
from hpcompat_conformance.pytest_plugin import Ranks
from hpcompat_conformance.pytest_plugin import pool as pool


@pytest.fixture(scope="session")
def ranks(pool: PoolSet) -> Ranks:
    """``ranks(world_size)`` is a pool of that many ranks, always the same one; ``queued``: see `Mpirun`."""

    def pool_of(world_size: int, *, queued: bool = False) -> WorkerPool:
        return pool(world_size, setup=ADAPTER.worker_setup, launcher=Mpirun(queued=queued))

    return pool_of
