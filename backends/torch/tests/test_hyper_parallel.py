"""hyper-parallel's own DTensor parameters through `optimizer_step`, where its public code can be imported."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hpcompat_conformance.pool import PoolSet

OPTIONS = [{}, {"betas": (0.9, 0.95), "lr": 1e-2, "weight_decay": 0.1}, {"betas": (0.9, 0.95), "foreach": True}]


@pytest.mark.skipif(
    importlib.util.find_spec("hyper_parallel") is None, reason="the package hyper_parallel is not installed"
)
@pytest.mark.parametrize("options", OPTIONS, ids=["defaults", "options", "foreach"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_hyper_parallel_parameters_step_as_native(
    pool: PoolSet, num_ranks: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    counts = pool(num_ranks).run("optimizers.hyper_parallel_side:steps_equal_natives", dtype=dtype, options=options)
    assert all(count > 0 for count in counts)
