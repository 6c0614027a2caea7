"""Corners: refused calls, one rank with several axes, empty parameters, what must not outlive its use."""

from __future__ import annotations

import copy
import io
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from behaviour.loading import other_values
from behaviour.models import WIDTH, assert_same_bits, batch, fill, gradients, loss_of, mlp, shard, true_gradients, wrap
from behaviour.registry import behaviour
from hpcompat import FSDPMeshInfo, MixedPrecisionPolicy, ShardPlacementResult


def refusable() -> nn.Module:
    """Its last parameter cannot be sharded."""
    module = nn.Linear(WIDTH, 2)
    module.register_parameter("table", nn.Parameter(torch.ones(2, WIDTH).t()))
    return module


@behaviour(each=[{"several_groups": "without fusion"}, {"several_groups": "replicated"}])
def a_refused_call_with_several_groups_changes_nothing(several_groups: str) -> None:
    module = refusable()
    before = dict(module.named_parameters())
    options: dict[str, Any] = {"comm_fusion": False}
    if several_groups == "replicated":
        options = {"replicate_params": {module.table}}
    with pytest.raises(NotImplementedError, match="'table'"):
        shard(module, **options)
    assert all(parameter is before[name] for name, parameter in module.named_parameters())


@behaviour(2)
def a_state_dict_can_be_copied_and_saved_piece_by_piece() -> None:
    module = wrap(mlp())
    state = module.state_dict()
    copied = copy.deepcopy(state)
    for name, value in state.items():
        assert torch.equal(copied[name].to_local(), value.to_local())
        assert copied[name].to_local().data_ptr() != value.to_local().data_ptr() or not value.to_local().numel()
        file = io.BytesIO()
        torch.save(value.to_local(), file)
        assert file.tell() < 4096 + 2 * value.to_local().nbytes, "not the other parameters of the unit as well"
    kept = {name: value.to_local().clone() for name, value in copied.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert all(torch.equal(copied[name].to_local(), value) for name, value in kept.items())


@behaviour(1, reports=["mindspore-ai/hyper-parallel#306"])
def two_meshes_in_a_unit_work_on_one_rank() -> None:
    """A script that shards experts over another axis must run on one rank as on several."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    infos = {axis: FSDPMeshInfo(mesh[axis], shard_mesh_dim=0) for axis in ("dp", "ep")}
    module = fill(nn.Linear(WIDTH, 2))
    shard(
        module,
        mesh=mesh["dp"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), infos["ep" if p.ndim == 2 else "dp"]),
    )
    loss_of(module, batch()).backward()
    assert_same_bits(gradients(module), true_gradients(fill(nn.Linear(WIDTH, 2))))


@behaviour(2)
def assigned_global_values_do_not_stay_in_memory() -> None:
    model = wrap(mlp())
    model.load_state_dict(other_values(), assign=True)
    for name, parameter in model.named_parameters():
        local, world_size = parameter.to_local(), parameter.device_mesh.size()
        padded = -(-parameter.shape[0] // world_size) * prod(parameter.shape[1:]) * local.itemsize
        assert local.untyped_storage().nbytes() <= padded, name


@behaviour(reports=["mindspore-ai/hyper-parallel#396"])
def zero_grad_clears_main_gradients() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True
    )
    model = wrap(mlp(), mp_policy=policy)
    for _ in range(2):
        loss_of(model, batch()).backward()
        model.zero_grad()
    assert all(getattr(parameter, "main_grad", None) is None for parameter in model.parameters())


@behaviour(reports=["mindspore-ai/hyper-parallel#396"])
def zero_grad_clears_pending_gradients() -> None:
    model = wrap(mlp())
    model.set_requires_gradient_sync(False)
    loss_of(model, batch()).backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(step=1)).backward()
    assert_same_bits(gradients(model), true_gradients(mlp(), step=1))


@behaviour()
def prefetch_lists_may_be_generators() -> None:
    model = wrap(mlp())
    model[0].set_modules_to_forward_prefetch(model[index] for index in (2, 4))
    assert model[0]._unit().forward_prefetch == [model[2]._unit(), model[4]._unit()]


@behaviour(2)
def units_without_a_single_row_train() -> None:
    """A parameter of no rows alone in a unit, with a gradient of no elements."""
    model = fill(nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 0, bias=False), nn.Linear(0, 2)))
    for layer in model:
        shard(layer)
    shard(model)
    loss_of(model, batch()).backward()
    assert gradients(model)["1.weight"].shape == (0, 3)
