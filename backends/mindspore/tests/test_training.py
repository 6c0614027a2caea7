"""Sharded training gives the numbers of single-process training. The ranks check; a test names the scenario."""

from __future__ import annotations

from typing import Any

import pytest

from hpcompat_conformance.pytest_plugin import Ranks

SCENARIOS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "plain": ("ms_modules:plain", {}, (1, 2, 4)),
    "root only": ("ms_modules:root_only", {}, (1, 2)),
    "kept after forward": ("ms_modules:plain", {"reshard_after_forward": False}, (2,)),
    "freed after forward, the root too": ("ms_modules:plain", {"reshard_after_forward": True}, (2,)),
    "slices after forward": ("ms_modules:plain", {"reshard_after_forward": 2}, (4,)),
    "slices after forward of uneven shards": ("ms_modules:plain", {"reshard_after_forward": 2, "hidden": 3}, (4,)),
    "uneven and empty shards": ("ms_modules:plain", {"hidden": 3}, (2, 4)),
    "one unit per parameter": ("ms_modules:plain", {"comm_fusion": False}, (2,)),
    "no flat buffer": ("ms_modules:plain", {"comm_fusion_zero_copy": False}, (2,)),
    "hsdp 2 x 1": ("ms_modules:hsdp", {"shape": (2, 1)}, (2,)),
    "hsdp 1 x 2": ("ms_modules:hsdp", {"shape": (1, 2)}, (2,)),
    "hsdp 2 x 2": ("ms_modules:hsdp", {"shape": (2, 2)}, (4,)),
    "hsdp of one": ("ms_modules:hsdp", {"shape": (1, 1)}, (1,)),
    "shard dim 1": ("ms_modules:shard_dim", {"dim": 1}, (1, 2, 4)),
    "shard dim -1": ("ms_modules:shard_dim", {"dim": -1}, (2,)),
    "module lists": ("ms_modules:module_list", {}, (2,)),
    "frozen": ("ms_modules:frozen", {}, (2,)),
    "thawed later": ("ms_modules:thawed_later", {}, (2,)),
    "tied": ("ms_modules:tied", {}, (1, 2)),
    "ignored": ("ms_modules:ignored", {}, (2,)),
    "replicated": ("ms_modules:replicated", {"shape": (2,)}, (2,)),
    "replicated under hsdp": ("ms_modules:replicated", {"shape": (2, 2)}, (4,)),
    "replicate": ("ms_modules:replicate", {}, (1, 2, 4)),
    "replicate beside sharded": ("ms_modules:replicate_beside_sharded", {}, (2,)),
    "explicit prefetch": ("ms_modules:prefetch", {}, (2,)),
    "separate reduce-scatter group": ("ms_modules:separate_group", {}, (2,)),
    "several dtypes": ("ms_modules:several_dtypes", {}, (1, 2)),
    "accumulation without sync": ("ms_gradients:accumulate", {}, (1, 2)),
    "accumulation on shards": ("ms_gradients:accumulate_sharded", {}, (2,)),
    "accumulation without all-reduce": ("ms_gradients:partial_all_reduce", {}, (2, 4)),
    "several forwards": ("ms_gradients:several_forwards", {}, (2,)),
    "forwards and backwards in turn": ("ms_gradients:forward_twice_backward_twice", {}, (2,)),
    "unused on some ranks": ("ms_gradients:unused_parameter", {"fill": True}, (2,)),
    "20 steps of SGD": ("ms_gradients:twenty_steps", {"kind": "sgd"}, (2,)),
    "20 steps of AdamW": ("ms_gradients:twenty_steps", {"kind": "adamw"}, (2,)),
    "divide factor": ("ms_gradients:divide", {"factor": 3.0}, (1, 2)),
    "sum": ("ms_gradients:divide", {"op": "sum"}, (2,)),
    "scaling factor": ("ms_gradients:divide", {"scale": 0.5}, (2,)),
    "our value_and_grad": ("ms_styles:value_and_grad", {"kind": "ours"}, (1, 2)),
    "MindSpore's value_and_grad": ("ms_styles:value_and_grad", {"kind": "mindspore"}, (1, 2)),
    "evaluation without gradients": ("ms_styles:no_grad_evaluation", {}, (2,)),
    "float16": ("ms_gradients:mixed_precision", {"param": "float16", "reduce": None}, (1, 2)),
    "float16 reduced in float32": ("ms_gradients:mixed_precision", {"param": "float16", "reduce": "float32"}, (2,)),
    "bfloat16": ("ms_gradients:mixed_precision", {"param": "bfloat16", "reduce": None, "net": "elementwise"}, (1, 2)),
    "bfloat16 reduced in float32": (
        "ms_gradients:mixed_precision",
        {"param": "bfloat16", "reduce": "float32", "net": "elementwise"},
        (2,),
    ),
    "output dtype": ("ms_gradients:output_dtype", {}, (2,)),
    "inputs not cast": ("ms_gradients:inputs_not_cast", {}, (1,)),
    "main grad": ("ms_gradients:main_grad", {}, (2,)),
    "exception in forward": ("ms_styles:failing", {"where": "forward"}, (2,)),
    "exception in backward": ("ms_styles:failing", {"where": "backward"}, (2,)),
    "exception in a reduction": ("ms_styles:failing", {"where": "reduction"}, (2,)),
    "state dict": ("ms_modules:state_dict", {}, (1, 2)),
    "state dict of uneven shards": ("ms_modules:state_dict", {}, (4,)),
    "set_data by hand": ("ms_modules:set_data_by_hand", {}, (2,)),
    "another parameter, before a step": ("ms_modules:another_parameter", {"when": "before a step"}, (2,)),
    "another parameter, after a step": ("ms_modules:another_parameter", {"when": "after a step"}, (1, 2)),
    "meta device": ("ms_modules:meta_device", {}, (2,)),
    "penalty on shards": ("ms_gradients:penalty_on_shards", {}, (1, 2)),
    "penalty in the same backward": ("ms_gradients:penalty_in_the_same_backward", {}, (1, 2)),
    "custom communication": ("ms_modules:custom_comms", {}, (1, 2)),
    "all-reduce hook": ("ms_gradients:all_reduce_hook", {}, (2,)),
    "other methods": ("ms_modules:methods", {}, (2,)),
    "a slice of a container": ("ms_modules:sliced_container", {}, (1,)),
    "TrainOneStepCell with SGD": ("ms_styles:train_one_step_cell", {"optimizer": "SGD"}, (1, 2)),
    "TrainOneStepCell with Adam": ("ms_styles:train_one_step_cell", {"optimizer": "Adam"}, (2,)),
    "value_and_grad of a cell": ("ms_styles:grad_of_a_cell", {}, (1, 2)),
    "value_and_grad while recording": ("ms_styles:value_and_grad_while_recording", {}, (2,)),
    "backward without recording": ("ms_styles:backward_without_recording", {}, (1,)),
    "loss.backward()": ("ms_styles:backward_compat", {}, (2,)),
    "sync off": ("ms_styles:sync_off_is_refused_by_mindspores_own", {}, (2,)),
    "statistics stay whole": ("ms_modules:statistics_stay_whole", {}, (2,)),
    "freed with the model": ("ms_modules:is_collected", {}, (1, 2)),
    "only shards are alive": ("ms_modules:only_shards_are_alive", {}, (1, 2)),
    "unshard by hand": ("ms_modules:unshard_by_hand", {}, (2,)),
}
CASES = [(name, num) for name, (_, _, worlds) in SCENARIOS.items() for num in worlds]


@pytest.mark.parametrize(("name", "num_ranks"), sorted(CASES, key=lambda case: case[1]))
def test_training(ranks: Ranks, name: str, num_ranks: int) -> None:
    function, options, _ = SCENARIOS[name]
    ranks(num_ranks).run(function, **options)
