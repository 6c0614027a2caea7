"""Mixture of experts on 2 by 2 ranks: a mesh per parameter, gradients as in one process (PLC-05, PLC-09)."""

from __future__ import annotations

import pytest

from expert_models import Model
from experts import CASES
from hpcompat_conformance.pool import PoolSet


@pytest.mark.parametrize("name", CASES)
def test_experts(pool: PoolSet, name: str) -> None:
    function, options = CASES[name]
    pool(4).run(function, make=Model, **options)
