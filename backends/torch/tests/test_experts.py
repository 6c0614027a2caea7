"""Mixture of experts on 2 by 2 ranks: a mesh per parameter, gradients as in one process (public report A32)."""

from __future__ import annotations

from typing import Any

import pytest

from expert_models import Model
from hpcompat_conformance.pool import PoolSet

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "by experts": ("experts:train", {}),
    "by columns": ("experts:train", {"shard_degree": 4}),
    "shapes by experts": ("experts:shapes", {"shard_degree": 2, "expected": (1, 6, 6)}),
    "shapes by columns": ("experts:shapes", {"shard_degree": 4, "expected": (2, 3, 6)}),
    "order": ("experts:order", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(pool: PoolSet, name: str) -> None:
    function, options = CASES[name]
    pool(4).run(function, make=Model, **options)
