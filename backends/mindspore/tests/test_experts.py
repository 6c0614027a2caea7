"""Mixture of experts on 2 by 2 ranks: a mesh per parameter, gradients as in one process (PLC-05, PLC-09)."""

from __future__ import annotations

import pytest

from experts import CASES
from hpcompat_conformance.pytest_plugin import Ranks
from ms_experts import Model


@pytest.mark.parametrize("name", CASES)
def test_experts(ranks: Ranks, name: str) -> None:
    function, options = CASES[name]
    ranks(4).run(function, make=Model, **options)
