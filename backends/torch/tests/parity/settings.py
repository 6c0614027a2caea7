"""What a combination means in calls: arguments of `fully_shard`, and setters."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from parity.combos import Combo


def policy(source: ModuleType, name: str) -> Any:
    """The mixed precision policy of that name, made from the implementation's own class."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    arguments: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"param_dtype": bf16, "reduce_dtype": fp32},
        "fp16": {"param_dtype": fp16, "reduce_dtype": fp16},
        "bf16-both": {"param_dtype": bf16},
        "bf16-reduce": {"reduce_dtype": bf16},
        "fp16-fp32": {"param_dtype": fp16, "reduce_dtype": fp32},
        "output": {"param_dtype": bf16, "reduce_dtype": fp32, "output_dtype": fp32},
        "no-cast": {"param_dtype": fp32, "reduce_dtype": bf16, "cast_forward_inputs": False},
    }
    return source.MixedPrecisionPolicy(**arguments[name])


def wrap_kwargs(source: ModuleType, combo: Combo) -> dict[str, Any]:
    """Keyword arguments of every `fully_shard` call of the combination, without the mesh."""
    kwargs: dict[str, Any] = {"reshard_after_forward": combo.reshard, "mp_policy": policy(source, combo.policy)}
    if "automatic" in combo.options:
        kwargs["reshard_after_forward"] = None
    if "offload" in combo.options:
        kwargs["offload_policy"] = source.CPUOffloadPolicy(pin_memory=False)
    if "columns" in combo.options:
        kwargs["shard_placement_fn"] = by_columns
    if "dp-dims" in combo.options:
        shard = tuple(axis for axis in combo.mesh_axes if axis.startswith("shard"))
        replicate = "replicate" if "replicate" in combo.mesh_axes else None
        kwargs["dp_mesh_dims"] = source.DataParallelMeshDims(shard=shard, replicate=replicate)
    return kwargs


def by_columns(parameter: nn.Parameter) -> Shard | None:
    """Matrices whose second dim divides by 4 are sharded along it, all else by rows."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None


def after_wrap(source: ModuleType, combo: Combo, module: nn.Module) -> None:
    """Setters that are called once, right after wrapping."""
    units = [child for child in module.modules() if isinstance(child, source.FSDPModule)]
    for option in combo.options:
        name, _, value = option.partition("=")
        if name == "factor":
            for unit in units:
                unit.set_gradient_divide_factor(float(value))
        elif name == "force-sum":
            for unit in units:
                unit.set_force_sum_reduction_for_comms(True)
        elif name == "no-unshard-in-backward":
            for unit in units:
                unit.set_unshard_in_backward(False)
        elif name == "fill-unused":
            module.set_reduce_scatter_unused_params(True)
        elif name == "setter-reshard":
            module.set_reshard_after_forward(True)
        elif name == "prefetch":
            prefetch_next(units)


def prefetch_next(units: list[Any]) -> None:
    """Every unit but the root gathers the next two in forward and the previous two in backward."""
    inner = units[1:]
    for index, unit in enumerate(inner):
        unit.set_modules_to_forward_prefetch(inner[index + 1 : index + 3])
        unit.set_modules_to_backward_prefetch(inner[max(index - 2, 0) : index][::-1])


def before_microbatch(combo: Combo, unit: Any, *, is_last: bool) -> None:
    """Setters that follow the microbatch. Plain accumulation turns the whole gradient sync off until the last."""
    if combo.accumulation == 1:
        return
    if "sync-always" not in combo.options and "no-all-reduce" not in combo.options:
        unit.set_requires_gradient_sync(is_last)
    if "no-all-reduce" in combo.options:
        unit.set_requires_all_reduce(is_last)
    if "keep-unsharded" in combo.options:
        unit.set_reshard_after_backward(is_last)
    if "last-backward" in combo.options:
        unit.set_is_last_backward(is_last)
