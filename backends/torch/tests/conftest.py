"""What tests of one process need (a process group of one) and what tests of several need (the pool of workers)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hpcompat_conformance.pytest_plugin import pool as pool
from hpcompat_torch.distributed import destroy_process_group


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """This process is the only rank of a gloo group.

    For the session, not for a module: DTensor caches specs by mesh value, and the group of a cached spec must stay.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()
