"""The neutral calls on MindSpore; the checks are those that torch passes too."""

from __future__ import annotations

import mindspore
import pytest

import neutral_calls
from hpcompat_conformance.pytest_plugin import Ranks
from ms_neutral import draw, model

CASES = neutral_calls.cases(model=model, draw=draw, half=mindspore.float16, narrow=mindspore.bfloat16, name="mindspore")


@pytest.mark.parametrize(("name", "num_ranks"), neutral_calls.runs(CASES))
def test_neutral_call(ranks: Ranks, name: str, num_ranks: int) -> None:
    function, options, _ = CASES[name]
    ranks(num_ranks).run(function, **options)
