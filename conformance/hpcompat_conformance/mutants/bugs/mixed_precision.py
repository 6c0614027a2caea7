"""Which dtype where."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

AROUND = "hpcompat.core.around:AroundForward"


@mutant("MPR-02")
def cast_after_the_reduction(plant: Plant) -> None:
    """The reduction runs in the dtype of the gradients instead of the reduce dtype."""

    def forget(tensors: Any) -> None:
        for param in tensors.params:
            param.reduce_dtype = None

    plant.after("hpcompat_torch.group:GroupTensors._fix_dtypes", forget)


@mutant("ACC-06", "MPR-03")
def through_the_parameter_dtype(plant: Plant) -> None:
    """The reduced gradient passes through param_dtype on its way to the shard, and loses bits there."""

    def narrow(reduction: Any) -> None:
        dtype = reduction.params[0].param_dtype
        if dtype != reduction.output.dtype:
            reduction.output.copy_(reduction.output.to(dtype))

    plant.before("hpcompat_torch.reduction:ReductionInFlight._deliver", narrow)


@mutant("MPR-02")
def a_narrow_all_reduce(plant: Plant) -> None:
    """Under HSDP the sum of the shard axis is all-reduced in the parameters' dtype."""

    def narrow(original: Any, reduction: Any, *, async_op: bool) -> None:
        dtype, wide = reduction.params[0].param_dtype, reduction.output
        if dtype == wide.dtype or not reduction.request.all_reduce:
            original(reduction, async_op=async_op)
            return
        reduction._wait_for_work()
        reduction.output = wide.to(dtype)
        original(reduction, async_op=False)
        reduction.output = wide.copy_(reduction.output)

    plant.around("hpcompat_torch.reduction:ReductionInFlight._all_reduce", narrow)


@mutant("MPR-03")
def gradients_stay_in_the_reduce_dtype(plant: Plant) -> None:
    """Gradients reach the shards in the reduce dtype instead of the parameters' own."""

    def as_reduced(reduction: Any) -> None:
        reduction.orig_dtype = reduction.output.dtype

    plant.before("hpcompat_torch.reduction:ReductionInFlight._deliver", as_reduced)


@mutant("MPR-05")
def inputs_are_not_cast(plant: Plant) -> None:
    """Inputs of a unit keep their dtype although its parameters have another."""

    def uncast(original: Any, around: Any, unit: Any, *args: Any) -> Any:
        policy, unit.mp_policy = unit.mp_policy, dataclasses.replace(unit.mp_policy, cast_forward_inputs=False)
        try:
            return original(around, unit, *args)
        finally:
            unit.mp_policy = policy

    plant.around(f"{AROUND}.before", uncast)


@mutant("MPR-06")
def inputs_are_always_cast(plant: Plant) -> None:
    """cast_forward_inputs=False changes nothing."""

    def cast(original: Any, around: Any, unit: Any, *args: Any) -> Any:
        policy, unit.mp_policy = unit.mp_policy, dataclasses.replace(unit.mp_policy, cast_forward_inputs=True)
        try:
            return original(around, unit, *args)
        finally:
            unit.mp_policy = policy

    plant.around(f"{AROUND}.before", cast)


@mutant("MPR-05")
def keyword_arguments_are_not_cast(plant: Plant) -> None:
    """Only positional inputs are cast to param_dtype."""

    def positional(original: Any, around: Any, unit: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        return original(around, unit, fn, args, {})[0], kwargs

    plant.around(f"{AROUND}._replace", positional)


@mutant("MPR-05")
def integers_are_cast(plant: Plant) -> None:
    """Token ids and masks are cast to param_dtype as well."""
    plant.around("hpcompat_torch.hooks:cast_floating", lambda original, tensor, dtype: tensor.to(dtype))


@mutant("MPR-04")
def output_dtype_is_ignored(plant: Plant) -> None:
    """Outputs keep the dtype of the computation."""
    plant.around(f"{AROUND}._cast_output", lambda original, around, unit, output: output)
