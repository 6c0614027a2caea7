"""The neutral calls on MindSpore; the checks are those that torch passes too."""

from __future__ import annotations

from typing import Any

import mindspore
import pytest

from hpcompat_conformance.pytest_plugin import Ranks
from ms_neutral import draw, model

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "scalars": ("neutral_calls:scalars", {}, (1, 2, 4)),
    "agreement": ("neutral_calls:agreement", {}, (1, 2, 4)),
    "agreement in a group": ("neutral_calls:agreement_in_a_group", {}, (4,)),
    "groups": ("neutral_calls:groups", {}, (4,)),
    "wrong mesh": ("neutral_calls:wrong_mesh", {}, (2,)),
    "numpy": ("neutral_calls:numpy_and_back", {"half": mindspore.float16, "narrow": mindspore.bfloat16}, (1,)),
    "gradients": ("neutral_calls:gradients", {"model": model}, (1, 2, 4)),
    "wrong gradients": ("neutral_calls:wrong_gradients", {"model": model}, (2,)),
    "states of an optimizer": ("neutral_calls:states_of_an_optimizer", {"model": model}, (1, 2)),
    "parameters": ("neutral_calls:parameters", {"model": model, "names": NAMES}, (1, 2)),
    "no gradients": ("neutral_calls:no_gradients", {"model": model}, (2,)),
    "one backend": ("neutral_calls:one_backend", {"name": "mindspore"}, (2,)),
    "seeds": ("neutral_calls:seeds", {"draw": draw}, (1,)),
}


@pytest.mark.parametrize(("name", "num_ranks"), [(name, num) for name, case in CASES.items() for num in case[2]])
def test_neutral_call(ranks: Ranks, name: str, num_ranks: int) -> None:
    function, options, _ = CASES[name]
    ranks(num_ranks).run(function, **options)
