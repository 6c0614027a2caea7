"""Optimizers and clipping on shards. The ranks check; a test names the scenario."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpcompat_conformance.pytest_plugin import Ranks

Scenario = tuple[str, dict[str, Any], tuple[int, ...]]


def _steps(kind: str, layout: str, *worlds: int, **options: Any) -> Scenario:
    return "ms_optimizers:steps_on_shards", {"kind": kind, "layout": layout, **options}, worlds


SCENARIOS: dict[str, Scenario] = {
    "AdamW, sharded": _steps("AdamW", "sharded", 1, 2, 4),
    "AdamW, bfloat16": _steps("AdamW", "sharded", 1, 2, 4, dtype="bfloat16"),
    "AdamW, float16": _steps("AdamW", "sharded", 2, dtype="float16"),
    "AdamW, empty shards": _steps("AdamW", "sharded", 4, hidden=3),
    "AdamW, empty shards, bfloat16": _steps("AdamW", "one unit", 4, hidden=3, dtype="bfloat16"),
    "AdamW, no flat buffer": _steps("AdamW", "no flat buffer", 2),
    "AdamW, one unit per parameter": _steps("AdamW", "one unit per parameter", 2),
    "AdamW, shard dim 1": _steps("AdamW", "shard dim 1", 2, hidden=8),
    "AdamW, hsdp": _steps("AdamW", "hsdp 2 x n", 2, 4),
    "AdamW, replicate": _steps("AdamW", "replicate", 2),
    "AdamW, mixed": _steps("AdamW", "mixed", 2, 4),
    "AdamW, two meshes": _steps("AdamW", "two meshes", 4),
    "AdamW, inside a plain one": _steps("AdamW", "inside a plain one", 2),
    "Adam, amsgrad": _steps("Adam", "mixed", 2, amsgrad=True, weight_decay=0.1),
    "SGD": _steps("SGD", "mixed", 2),
    "SGD, momentum": _steps("SGD", "sharded", 2, 4, momentum=0.9, nesterov=True, weight_decay=0.1),
    "forward sees the step": ("ms_optimizers:forward_sees_the_step", {"layout": "mixed"}, (1, 2)),
    "training by backward": ("ms_optimizers:trains", {"style": "backward"}, (1, 2)),
    "training by closure": ("ms_optimizers:trains", {"style": "closure"}, (2,)),
    "training by value_and_grad": ("ms_optimizers:trains", {"style": "value_and_grad"}, (2,)),
    "step while unsharded": ("ms_optimizers:steps_while_unsharded", {}, (1, 2)),
    "groups and dtypes": ("ms_optimizers:groups_and_dtypes", {}, (1, 2)),
    "main grad": ("ms_optimizers:main_grad", {}, (2,)),
    "state of AdamW": ("ms_optimizers:state_round_trip", {"kind": "AdamW", "layout": "mixed", "amsgrad": True}, (1, 2)),
    "state of SGD": ("ms_optimizers:state_round_trip", {"kind": "SGD", "layout": "sharded", "momentum": 0.9}, (4,)),
    "states without a step": ("ms_optimizers:states_without_a_step", {}, (4,)),
    "dtypes of states": ("ms_optimizers:dtypes_of_states", {}, (1,)),
    **{
        f"zero_grad of a {target}, {kind}": ("ms_optimizers:zero_grad", {"target": target, "kind": kind}, (2,))
        for target in ("cell", "optimizer")
        for kind in ("reduced", "without sync", "partial", "main grad")
    },
    **{
        f"MindSpore's {kind}": ("ms_optimizers:foreign", {"kind": kind, "layout": "mixed"}, (2,))
        for kind in ("SGD", "Momentum", "Adam", "Adam in groups", "ASGD", "experimental AdamW")
    },
    "refusals": ("ms_optimizers:foreign_refusals", {}, (2,)),
    "neutral calls": ("ms_optimizers:neutral_calls", {}, (2,)),
    "named parameters": ("ms_optimizers:named_parameters", {}, (1,)),
    "float64": ("ms_optimizers:float64", {}, (1,)),
    "mistakes": ("ms_optimizers:mistakes", {}, (2,)),
    "tiny gradient": ("ms_arithmetic:tiny_gradient_moves_nothing", {}, (1,)),
    "denormals": ("ms_arithmetic:no_operations_of_mindspore", {}, (1,)),
    "multiply-add": ("ms_arithmetic:multiply_add_is_rounded_once", {}, (1,)),
    **{
        f"{kind} by device operations, {dtype}": (
            "ms_arithmetic:device_operations",
            {"kind": kind, "dtype": dtype},
            (1,),
        )
        for kind in ("Adam", "SGD")
        for dtype in ("bfloat16", "float16", "float32")
    },
    **{
        f"clipping, {layout}": ("ms_clipping:clips", {"layout": layout}, worlds)
        for layout, worlds in {
            "sharded": (1, 2, 4),
            "shard dim 1": (2,),
            "hsdp 2 x n": (2, 4),
            "hsdp n x 1": (4,),
            "hsdp 1 x n": (4,),
            "replicate": (2,),
            "mixed": (2, 4),
            "two meshes": (4,),
            "inside a plain one": (2,),
        }.items()
    },
    "clipping, empty shards": ("ms_clipping:clips", {"layout": "sharded", "hidden": 3}, (4,)),
    "clipping, bfloat16": ("ms_clipping:clips", {"layout": "mixed", "dtype": "bfloat16"}, (2,)),
    "clipping, float16": ("ms_clipping:clips", {"layout": "sharded", "dtype": "float16"}, (2,)),
    "one norm": ("ms_clipping:norm_is_one_value", {}, (2, 4)),
    "one norm, empty shards": ("ms_clipping:norm_is_one_value", {"hidden": 3}, (4,)),
    "norm of trained gradients": ("ms_clipping:trained_gradients", {"tied": False}, (1, 2, 4)),
    "norm of tied parameters": ("ms_clipping:trained_gradients", {"tied": True}, (2,)),
    "clipping what value_and_grad returned": ("ms_clipping:returned_gradients", {}, (2,)),
    "rank without gradients": ("ms_clipping:rank_without_gradients", {}, (2, 4)),
    "ignored gradients that differ": ("ms_clipping:plain_gradients_that_differ", {}, (2, 4)),
    "clipping float64": ("ms_clipping:float64", {}, (1,)),
    "infinite gradient": ("ms_clipping:not_finite", {"value": math.inf}, (2,)),
    "NaN in a gradient": ("ms_clipping:not_finite", {"value": math.nan}, (2,)),
    "no gradients": ("ms_clipping:none_at_all", {}, (2,)),
    "clipping many of bfloat16": ("ms_clipping:large_and_narrow", {"dtype": "bfloat16"}, (1,)),
    "clipping many of float16": ("ms_clipping:large_and_narrow", {"dtype": "float16"}, (1,)),
    "clipping main grads": ("ms_clipping:main_grad", {}, (2,)),
    "one gradient of two parameters": ("ms_clipping:shared_gradient", {}, (1,)),
    "ranks agree on the norm": ("ms_clipping:ranks_agree", {}, (2, 4)),
}
CASES = [(name, num) for name, (_, _, worlds) in SCENARIOS.items() for num in worlds]


@pytest.mark.parametrize(("name", "num_ranks"), sorted(CASES, key=lambda case: case[1]))
def test_optimizers(ranks: Ranks, name: str, num_ranks: int) -> None:
    function, options, _ = SCENARIOS[name]
    ranks(num_ranks).run(function, **options)
