"""One way to run a comparison on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hpcompat_conformance.pool import PoolSet
from parity.combos import Combo
from parity.running import Compare


@pytest.fixture
def compare(pool: PoolSet) -> Compare:
    """`compare(combo, **kwargs)` runs `parity.compare.compare` on every rank of the combination's world."""

    def run(combo: Combo, **kwargs: Any) -> list[dict[str, Any]]:
        return pool(combo.world).run("parity.compare:compare", combo=combo.to_dict(), **kwargs)

    return run
