"""The code for Ascend over a stand-in: it has not run on the hardware. Calls must fit the installed functions."""

from __future__ import annotations

from typing import Any

import pytest

from hpcompat_conformance.pytest_plugin import Ranks

JOBS: list[tuple[str, int, dict[str, Any]]] = [
    ("training", 2, {"shape": (2,)}),
    ("training", 4, {"shape": (4,), "hidden": 3}),
    ("training", 4, {"shape": (2, 2)}),
    ("training", 4, {"shape": (4,), "reshard_after_forward": 2}),
    ("shard_dim_1", 2, {}),
    ("accumulation_and_slices", 4, {}),
    ("mixed_precision", 2, {}),
]


@pytest.mark.parametrize(("job", "num_ranks", "options"), JOBS)
def test_ascend(ranks: Ranks, job: str, num_ranks: int, options: dict[str, Any]) -> None:
    ranks(num_ranks).run(f"ms_hccl:{job}", **options)
