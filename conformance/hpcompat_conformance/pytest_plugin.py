"""Worker pools for a test session: ``pytest_plugins = ["hpcompat_conformance.pytest_plugin"]``.

def test_sum(pool):
    assert pool(2).run(all_ranks_sum, value=3) == [6, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hpcompat_conformance.pool import PoolSet, WorkerPool

# What a fixture gives that picks set-up and launcher itself: the pool of so many ranks.
Ranks = Callable[..., WorkerPool]


# However many conftests import the fixture: each of them has its own of the name.
_POOLS = PoolSet()


@pytest.fixture(scope="session")
def pool() -> Iterator[PoolSet]:
    """``pool(world_size)`` is a pool of torch workers on gloo, the same one for the whole session;
    ``pool(world_size, setup="module:function", launcher=Mpirun())`` one with another set-up and launcher."""
    yield _POOLS
    _POOLS.close()
