"""Values that are loaded: which shapes they may have, and this rank's part of them, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hpcompat.core.unit import unit_of
from hpcompat.errors import StateDictError
from hpcompat_torch.param import ShardedParam

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedUnit


def units_below(module: nn.Module) -> Iterable[HookedUnit]:
    """The units at and below ``module``."""
    return dict.fromkeys(unit for below in module.modules() if (unit := unit_of(below)) is not None)


def reshard_below(module: nn.Module) -> None:
    """Every unit at and below ``module`` shows its shards."""
    for unit in units_below(module):
        for group in unit.groups:
            group.to_sharded_for_loading()


def shards_of(module: nn.Module, state_dict: Mapping[str, Any], *, assign: bool) -> dict[str, Any]:
    """``state_dict`` with plain tensors of the global shape as DTensors like their parameters.

    Raises:
        StateDictError: a value has another shape than the whole parameter.
    """
    owners = {
        param.sharded_param: param
        for unit in units_below(module)
        for group in unit.groups
        for param in group.tensors.params  # type: ignore[attr-defined]
    }
    loaded, misfits = dict(state_dict), {}
    for name, parameter, value in _distributed_values(module, loaded):
        if value.shape != parameter.shape:
            local_shape = parameter._local_tensor.shape
            is_local = value.shape == local_shape and not isinstance(value, DTensor)
            misfits[name] = (tuple(parameter.shape), tuple(value.shape), is_local)
        elif not isinstance(value, DTensor):
            shard = _cut(value, parameter, owners.get(parameter))
            # A view would keep the global tensor alive for as long as the parameter.
            loaded[name] = shard.clone() if assign else shard
    if misfits:
        raise StateDictError.of_shapes(type(module).__name__, misfits)
    return loaded


def load_local_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    reshard_below(module)
    loaded, misfits = dict(state_dict), {}
    for name, parameter, value in _distributed_values(module, loaded):
        if isinstance(value, DTensor):
            continue
        local_shape = parameter._local_tensor.shape
        if value.shape != local_shape:
            misfits[name] = (tuple(local_shape), tuple(value.shape), False)
        else:
            loaded[name] = _like(value, parameter)
    if misfits:
        raise StateDictError.of_shapes(type(module).__name__, misfits, are_local=True)
    return module.load_state_dict(loaded, strict=strict)


def _distributed_values(
    module: nn.Module, state_dict: Mapping[str, Any]
) -> Iterable[tuple[str, DTensor, torch.Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(name)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            yield name, parameter, value


def _cut(value: torch.Tensor, parameter: DTensor, owner: ShardedParam | None) -> DTensor:
    if owner is not None and owner.spec.unsharded is None:
        return _like(owner.cut(value), parameter)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """``local`` as this rank's part of a DTensor like ``parameter``."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
