"""Gathering and freeing."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcompat_conformance.mutants.plant import Plant, mutant

GROUP = "hpcompat.core.param_group:ParamGroup"
TENSORS = "hpcompat_torch.group:GroupTensors"


@mutant("RED-01", "PLC-02")
def lose_the_last_rank_s_rows(plant: Plant) -> None:
    """The last rank's part of every gather arrives as zeros."""

    def lose(gather: Any) -> None:
        if gather.output is not None:
            gather.output.view(gather.world_size, -1)[-1].zero_()

    plant.after("hpcompat_torch.collectives:GatherInFlight.wait", lose)


@mutant("LIF-10", "ACC-08", "SDT-03")
def stale_weights_after_a_step(plant: Plant) -> None:
    """Forward goes on with the values of the first gather after the optimizer has changed the shards."""

    def stale(original: Any, tensors: Any, request: Any) -> Any:
        if not hasattr(tensors, "first_shards"):
            tensors.first_shards = [param.shard_data.clone() for param in tensors.params]
        now = [param.shard_data.clone() for param in tensors.params]
        _fill(tensors, tensors.first_shards)
        try:
            flight = original(tensors, dataclasses.replace(request, async_op=False))
        finally:
            _fill(tensors, now)
        return flight

    plant.around(f"{TENSORS}.all_gather", stale)


def _fill(tensors: Any, values: Any) -> None:
    for param, value in zip(tensors.params, values, strict=True):
        param.shard_data.copy_(value)


@mutant("RSF-02", "LIF-03")
def reshard_too_early(plant: Plant) -> None:
    """Parameters are freed after forward although reshard_after_forward is off."""

    def always(group: Any) -> None:
        if group.training_state.name == "FORWARD":
            group.to_sharded()

    plant.before(f"{GROUP}.reshard", always)


@mutant("RSF-01")
def never_freed_after_forward(plant: Plant) -> None:
    """Parameters stay in full after forward although they should be freed: right numbers, too much memory."""

    def keep(original: Any, group: Any) -> None:
        if group.training_state.name != "FORWARD":
            original(group)

    plant.around(f"{GROUP}.reshard", keep)


@mutant("LIF-03")
def never_freed_after_backward(plant: Plant) -> None:
    """Parameters stay in full after backward, so that the optimizer and the checkpoint meet the wrong ones."""

    def keep(original: Any, group: Any) -> None:
        if group.training_state.name != "POST_BACKWARD":
            original(group)

    plant.around(f"{GROUP}.reshard", keep)


@mutant("RSF-05")
def the_root_is_freed_too(plant: Plant) -> None:
    """A root without a policy of its own is freed after forward and gathered again at once."""

    def keep_policy(original: Any, root: Any, **options: Any) -> None:
        policies = [group.post_forward_mesh_info for group in root.groups]
        original(root, **options)
        for group, policy in zip(root.groups, policies, strict=True):
            group.post_forward_mesh_info = policy

    plant.around("hpcompat.core.unit:init_root", keep_policy)


@mutant("RSF-14")
def the_root_does_not_listen(plant: Plant) -> None:
    """set_reshard_after_forward(True) before the first forward does not free a root that was left at None."""

    def still_automatic(module: Any, *args: Any, **options: Any) -> None:
        module._unit().auto_reshard_after_forward = True

    plant.after("hpcompat.module:HSDPModule.set_reshard_after_forward", still_automatic)


@mutant("RSF-03")
def a_smaller_group_of_distant_ranks(plant: Plant) -> None:
    """reshard_after_forward=k makes groups of every so many ranks instead of neighbours."""

    def strided(original: Any, mesh_info: Any, size: int) -> Any:
        mesh = mesh_info.mesh
        return type(mesh)(mesh.device_type, mesh.mesh.view(-1).view(size, -1).T.contiguous())

    plant.around("hpcompat_torch.mesh:post_forward_mesh", strided)


@mutant("RSF-09")
def the_handle_does_not_wait(plant: Plant) -> None:
    """wait() of the handle of unshard(async_op=True) returns at once, the parameters still sharded."""
    plant.instead("hpcompat.module:UnshardHandle.wait")


@mutant("RSF-10")
def always_freed_after_backward(plant: Plant) -> None:
    """set_reshard_after_backward(False) changes nothing."""
    plant.instead("hpcompat.module:HSDPModule.set_reshard_after_backward")


@mutant("LIF-06")
def unfreezing_is_not_noticed(plant: Plant) -> None:
    """A parameter that is unfrozen after the first forward never gets a gradient."""

    def stay_frozen(tensors: Any) -> None:
        for param in tensors.params:
            param.unsharded_param.requires_grad_(param.requires_grad)

    plant.after(f"{TENSORS}.to_unsharded", stay_frozen)


@mutant("LIF-06", "SCH-08")
def frozen_parameters_are_reduced(plant: Plant) -> None:
    """Frozen parameters are reduced as zeros and get a gradient."""

    def with_zeros(original: Any, param: Any, *, fill_unused: bool) -> Any:
        unsharded = param.unsharded_param
        if param.accumulated_grad is None and unsharded is not None and not unsharded.requires_grad:
            return param.zero_gradient()
        return original(param, fill_unused=fill_unused)

    plant.around("hpcompat_torch.param:ShardedParam.take_gradient", with_zeros)


@mutant("SCH-11")
def a_wrong_prefetch_is_kept(plant: Plant) -> None:
    """A gather that backward prefetched in vain is used by the next forward, with the values before the step."""
    plant.instead(f"{GROUP}.drop_gather")
