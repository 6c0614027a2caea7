"""Which meshes are accepted, what the others are told, and the groups that follow from an accepted one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hpcompat
from hpcompat.errors import UserError
from hpcompat.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    check_reshard_after_forward,
    replicate_world_size,
    shard_rank,
    shard_world_size,
    validate_mesh,
)
from hpcompat_conformance import numpy_reference as ref


@pytest.fixture(autouse=True)
def _rank(reference: ref.NumpyBackend) -> Iterator[None]:
    """Rank 5 of 8."""
    with ref.DryWorld(8).rank(5):
        yield


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> ref.DeviceMesh:
    return ref.init_device_mesh(shape, mesh_dim_names=names)


# Accepted


def test_one_axis_needs_no_name() -> None:
    validate_mesh(mesh(8), None)
    validate_mesh(mesh(8, names=("tp",)), None)


@pytest.mark.parametrize(
    "names",
    [
        ("replicate", "shard"),
        ("dp_replicate", "dp_shard"),
        ("dp_replicate", "dp_shard_cp"),
        ("ddp", "fsdp"),
        ("outer", "inner"),
        ("node", "local"),
    ],
)
def test_two_axes_that_may_be_replicate_and_shard_are_accepted(names: tuple[str, str]) -> None:
    validate_mesh(mesh(2, 4, names=names), None)


# Refused


@pytest.mark.parametrize(
    ("names", "culprit"),
    [
        (("dp_shard", "cp"), "cp"),
        (("dp_replicate", "cp"), "cp"),
        (("dp", "tp"), "tp"),
        (("dp", "TP"), "TP"),
        (("ep", "dp"), "ep"),
        (("pp", "dp"), "pp"),
        (("dp", "sp"), "sp"),
        (("dp_shard", "dp_replicate"), "dp_shard"),
        (("Shard", "other"), "Shard"),
        (("fully_sharded", "x"), "fully_sharded"),
    ],
)
def test_names_that_contradict_replicate_and_shard_are_refused(names: tuple[str, str], culprit: str) -> None:
    """Such a mesh would silently train as HSDP (ENT-10)."""
    with pytest.raises(
        ValueError, match=rf"axis 0 replicates and whose axis 1 shards.*{culprit!r} says otherwise"
    ) as refusal:
        validate_mesh(mesh(2, 4, names=names), None)
    message = str(refusal.value)
    assert f"replicated over {names[0]!r} and sharded only over {names[1]!r}" in message
    assert f"mesh[{names!r}]._flatten('{names[0]}_{names[1]}')" in message, (
        "the fix for those who meant to shard over both"
    )
    assert "dp_mesh_dims" in message


def test_the_fix_in_the_message_works() -> None:
    wrong = mesh(2, 4, names=("dp_shard", "cp"))
    flattened = wrong["dp_shard", "cp"]._flatten("dp_shard_cp")
    validate_mesh(flattened, None)
    model = hpcompat.fully_shard(ref.Linear(4, 16), mesh=flattened)
    assert model.weight.data.shape == (2, 4)


def test_two_axes_without_names_are_refused() -> None:
    with pytest.raises(UserError, match="Please init the 2D mesh for HSDP with mesh_dim_names specified"):
        validate_mesh(mesh(2, 4), None)
    with pytest.raises(AssertionError):  # what FSDP2 raises there
        validate_mesh(mesh(2, 4), None)


@pytest.mark.parametrize("names", [None, ("dp_replicate", "dp_shard", "tp")])
def test_more_axes_are_refused(names: tuple[str, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"expects a 1D or 2D DeviceMesh but got .*; pass dp_mesh_dims"):
        validate_mesh(mesh(2, 2, 2, names=names), None)


@pytest.mark.parametrize("names", [("dp_shard", "cp"), None])
def test_fully_shard_refuses_before_it_changes_anything(names: tuple[str, str] | None) -> None:
    model = ref.Linear(4, 4)
    weight = model.weight
    with pytest.raises(ValueError, match="axis 0 replicates"):
        hpcompat.fully_shard(model, mesh=mesh(2, 4, names=names))
    assert type(model) is ref.Linear
    assert model.weight is weight
    assert not model.hooks


# dp_mesh_dims

NAMED = ("pp", "dp_replicate", "dp_shard")


@pytest.mark.parametrize(
    ("names", "dims", "message"),
    [
        (NAMED, DataParallelMeshDims(shard=()), "At least one of shard or replicate must be set"),
        (None, DataParallelMeshDims(shard="dp_shard"), "must have mesh_dim_names"),
        (NAMED, DataParallelMeshDims(shard="shard"), "'shard',? not found in mesh.mesh_dim_names"),
        (NAMED, DataParallelMeshDims(shard="dp_shard", replicate="ddp"), "'ddp',? not found in mesh.mesh_dim_names"),
        (NAMED, DataParallelMeshDims(shard=("dp_shard", "dp_shard")), "every mesh axis once"),
        (NAMED, DataParallelMeshDims(shard="dp_shard", replicate="dp_shard"), "every mesh axis once"),
    ],
)
def test_dims_that_the_mesh_does_not_have_are_refused(
    names: tuple[str, ...] | None, dims: DataParallelMeshDims, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate_mesh(mesh(2, 2, 2, names=names), dims)


def test_dims_of_no_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set in DataParallelMeshDims"):
        DataParallelMeshDims()


@pytest.mark.parametrize(
    ("dims", "shards", "replicas"),
    [
        (DataParallelMeshDims(shard="dp_shard"), 2, 1),
        (DataParallelMeshDims(shard=("dp_replicate", "dp_shard")), 4, 1),
        (DataParallelMeshDims(shard="dp_shard", replicate="dp_replicate"), 2, 2),
        (DataParallelMeshDims(shard="dp_shard", replicate=("pp", "dp_replicate")), 2, 4),
        (DataParallelMeshDims(replicate="dp_replicate"), 1, 2),
    ],
)
def test_dims_pick_and_flatten_axes(dims: DataParallelMeshDims, shards: int, replicas: int) -> None:
    model = ref.Linear(4, 8)
    hpcompat.fully_shard(model, mesh=mesh(2, 2, 2, names=NAMED), dp_mesh_dims=dims)
    info = model._unit().groups[0].mesh_info
    assert (shard_world_size(info), replicate_world_size(info)) == (shards, replicas)
    assert info.is_spmd_mesh
    assert model.weight.data.shape == (8 // shards, 4)


# Mesh infos


def test_a_1d_mesh_shards() -> None:
    info = FSDPMeshInfo(mesh(8), shard_mesh_dim=0)
    assert (shard_world_size(info), shard_rank(info), replicate_world_size(info)) == (8, 5, 1)
    assert info.shard_process_group.ranks == tuple(range(8))


def test_a_2d_mesh_replicates_and_shards() -> None:
    info = HSDPMeshInfo(mesh(2, 4, names=("r", "s")), shard_mesh_dim=1, replicate_mesh_dim=0)
    assert (shard_world_size(info), shard_rank(info), replicate_world_size(info)) == (4, 1, 2)
    assert info.shard_process_group.ranks == (4, 5, 6, 7)
    assert info.replicate_process_group.ranks == (1, 5)
    assert info.replicate_mesh_rank == 1


def test_a_replicate_mesh_has_one_shard() -> None:
    info = DDPMeshInfo(mesh(8), replicate_mesh_dim=0)
    assert (shard_world_size(info), shard_rank(info), replicate_world_size(info)) == (1, 0, 8)


@pytest.mark.parametrize(
    ("kind", "kwargs"),
    [
        (DataParallelMeshInfo, {}),
        (FSDPMeshInfo, {}),
        (FSDPMeshInfo, {"replicate_mesh_dim": 0}),
        (DDPMeshInfo, {"shard_mesh_dim": 0}),
        (HSDPMeshInfo, {"shard_mesh_dim": 0}),
        (HSDPMeshInfo, {"replicate_mesh_dim": 0}),
    ],
)
def test_a_mesh_info_names_its_axes(kind: type, kwargs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="_mesh_dim"):
        kind(mesh(8), **kwargs)


# reshard_after_forward


@pytest.mark.parametrize(("value", "normalized"), [(True, True), (False, False), (1, False), (2, 2), (4, 4), (8, True)])
def test_an_int_is_the_size_of_a_smaller_group(value: bool | int, normalized: bool | int) -> None:
    result = check_reshard_after_forward(value, 8)
    assert result == normalized
    assert type(result) is type(normalized)


@pytest.mark.parametrize("value", [0, -2, 3, 16])
def test_an_int_must_divide_the_shards(value: int) -> None:
    with pytest.raises(ValueError, match=f"should be a factor of 8, but got {value}"):
        check_reshard_after_forward(value, 8)


@pytest.mark.parametrize("value", ["True", 2.0, (2,), None])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="should be a bool or an int"):
        check_reshard_after_forward(value, 8)
