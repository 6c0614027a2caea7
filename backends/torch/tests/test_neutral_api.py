"""The neutral calls on torch; the checks are those that MindSpore passes too."""

from __future__ import annotations

import pytest
import torch

import neutral_calls
from hpcompat_conformance.pool import PoolSet
from neutral_models import draw, model

CASES = neutral_calls.cases(model=model, draw=draw, half=torch.float16, narrow=torch.bfloat16, name="torch")


@pytest.mark.parametrize(("name", "num_ranks"), neutral_calls.runs(CASES))
def test_neutral_call(pool: PoolSet, name: str, num_ranks: int) -> None:
    function, options, _ = CASES[name]
    pool(num_ranks).run(function, **options)
