"""Data-parallel meshes as rank arithmetic: which axis shards, which replicates, and the groups that follow.

A mesh is any object with the surface of torch's ``DeviceMesh`` (:class:`DeviceMesh` below); MindSpore's backend brings
its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcompat.errors import UserError

logger = logging.getLogger("hpcompat")

MODEL_PARALLEL_AXES = frozenset({"cp", "tp", "ep", "pp", "sp"})


class DeviceMesh(Protocol):
    """The part of torch's ``DeviceMesh`` that the scheduler uses."""

    @property
    def ndim(self) -> int: ...
    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    def size(self, mesh_dim: int | None = None) -> int: ...
    def get_group(self, mesh_dim: int | str | None = None) -> Any: ...
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int: ...


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of an n-D mesh are data parallel (FSDP2 ``DataParallelMeshDims``).

    Args:
        shard: axis name, or names that are flattened into one, over which parameters are sharded.
        replicate: axis name or names over which they are replicated. One of the two is required.

    Raises:
        ValueError: neither is given.
        TypeError: something else than names.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "At least one of shard or replicate must be set in DataParallelMeshDims, but got neither; name the "
                "axes of the mesh that are data parallel"
            )
        for role, names in (("shard", self.shard), ("replicate", self.replicate)):
            members = names if isinstance(names, tuple) else (names,)
            if names is not None and not all(isinstance(name, str) for name in members):
                raise TypeError(f"expected {role} to be the name of a mesh axis or a tuple of names, but got {names!r}")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass
class DataParallelMeshInfo:
    """A data-parallel mesh and the roles of its axes."""

    mesh: Any
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise UserError("expected shard_mesh_dim or replicate_mesh_dim, but got neither; name the axis of the mesh")

    @property
    def is_spmd_mesh(self) -> bool:
        return self.dp_mesh_dims is not None


@dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """Shard over axis ``shard_mesh_dim`` of ``mesh``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise UserError("expected shard_mesh_dim to be an axis of the mesh, but got None")
        self.shard_mesh_size: int = self.mesh.size(self.shard_mesh_dim)
        self.shard_process_group: Any = self.mesh.get_group(self.shard_mesh_dim)
        self.shard_mesh_rank: int = self.mesh.get_local_rank(self.shard_mesh_dim)
        # Set by set_separate_reduce_scatter_group; None shares the gathers' group.
        self.reduce_scatter_process_group: Any = None


@dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """Replicate over axis ``replicate_mesh_dim`` of ``mesh``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise UserError("expected replicate_mesh_dim to be an axis of the mesh, but got None")
        self.replicate_mesh_size: int = self.mesh.size(self.replicate_mesh_dim)
        self.replicate_process_group: Any = self.mesh.get_group(self.replicate_mesh_dim)
        self.replicate_mesh_rank: int = self.mesh.get_local_rank(self.replicate_mesh_dim)


@dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Replicate over one axis and shard over another."""


def shard_world_size(mesh_info: DataParallelMeshInfo) -> int:
    return mesh_info.shard_mesh_size if isinstance(mesh_info, FSDPMeshInfo) else 1


def shard_rank(mesh_info: DataParallelMeshInfo) -> int:
    return mesh_info.shard_mesh_rank if isinstance(mesh_info, FSDPMeshInfo) else 0


def replicate_world_size(mesh_info: DataParallelMeshInfo) -> int:
    return mesh_info.replicate_mesh_size if isinstance(mesh_info, DDPMeshInfo) else 1


def validate_mesh(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None) -> None:
    """Refuse a mesh that ``fully_shard`` cannot read without guessing.

    Raises:
        ValueError: not 1-D or 2-D; an axis of ``dp_mesh_dims`` is missing; the names of a 2-D mesh contradict
            ``(replicate, shard)``: such a mesh would silently train as HSDP (ENT-10).
        UserError: a 2-D mesh without names.
    """
    if dp_mesh_dims is not None:
        _validate_dims(mesh, dp_mesh_dims)
        return
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; pass dp_mesh_dims to pick the data-parallel "
            "axes of a larger mesh"
        )
    if mesh.ndim == 1:
        return
    names = mesh.mesh_dim_names
    if names is None:
        raise UserError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: axis 0 replicates and axis 1 shards, for "
            f'example mesh_dim_names=("dp_replicate", "dp_shard"), but got {mesh}'
        )
    _refuse_ambiguous(names)


def _validate_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    if not dims.shard_names and not dims.replicate_names:
        raise ValueError(
            f"At least one of shard or replicate must be set in dp_mesh_dims, but got {dims}; name the axes of "
            "the mesh that are data parallel"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh must have mesh_dim_names when dp_mesh_dims is provided, but got an unnamed mesh, {mesh}; pass "
            "mesh_dim_names to init_device_mesh"
        )
    named = dims.shard_names + dims.replicate_names
    for name in named:
        if name not in mesh.mesh_dim_names:
            raise ValueError(
                f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {mesh.mesh_dim_names}: expected dp_mesh_dims "
                f"to name axes of the mesh, but got {dims}"
            )
    if len(set(named)) != len(named):
        raise ValueError(f"expected every mesh axis once in dp_mesh_dims, but got {dims}")


def _refuse_ambiguous(names: tuple[str, ...]) -> None:
    culprit = next((name for name in names if name.lower() in MODEL_PARALLEL_AXES), None)
    if culprit is None and "shard" in names[0].lower():
        culprit = names[0]
    if culprit is None:
        return
    joined = "_".join(names)
    raise ValueError(
        f"expected a 2D mesh whose axis 0 replicates and whose axis 1 shards, but got axes {names!r}: {culprit!r} "
        f"says otherwise, and the parameters would be replicated over {names[0]!r} and sharded only over "
        f"{names[1]!r}. To shard over both, pass the flattened mesh, mesh[{names!r}]._flatten({joined!r}); to pick "
        "axes of a full mesh, pass dp_mesh_dims"
    )


def check_reshard_after_forward(value: object, mesh_size: int) -> bool | int:
    """Normalize ``reshard_after_forward``: a bool, or the size ``k`` of the smaller group with ``1 < k < mesh_size``.

    Raises:
        ValueError: neither a bool nor an int, or an int that does not divide ``mesh_size``.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, "
            f"but got {value!r}"
        )
    if value < 1 or value > mesh_size or mesh_size % value != 0:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {mesh_size}, but got {value}; "
            "pass True, False or a divisor of the shard axis"
        )
    if value == 1:
        logger.warning("reshard_after_forward=1 keeps parameters unsharded after forward; True reshards over all ranks")
        return False
    return True if value == mesh_size else value
