"""Device meshes: an array of ranks seen from one of them, with the surface of torch's ``DeviceMesh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np

from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from hpcompat_mindspore.communicator import Communicator
from hpcompat_mindspore.job import group_of, world

Ranks = np.ndarray[Any, np.dtype[np.int64]]


class DeviceMesh:
    """Ranks with one dim per axis. Every rank of ``mesh`` must make it; the groups of all axes are made at once.

    Args:
        device_type: ``"CPU"`` or ``"Ascend"``, any case.
        mesh: the ranks, an array or nested lists.
        mesh_dim_names: one name per axis.

    Raises:
        ValueError: a rank appears twice or does not exist, or the names do not fit.
    """

    def __init__(self, device_type: str, mesh: Any, *, mesh_dim_names: Sequence[str] | None = None) -> None:
        self.device_type = device_type
        self.mesh: Ranks = np.asarray(mesh, dtype=np.int64)
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self._flattened: dict[str, DeviceMesh] = {}
        self._check()
        self._place = self._find(world().ranks[world().rank()])
        self._groups: list[Communicator | None] = [self._group(axis) for axis in range(self.ndim)]

    def _check(self) -> None:
        ranks = self.mesh.reshape(-1).tolist()
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"expected every rank once in a mesh, but got {self.mesh.tolist()}")
        size = world().size()
        if min(ranks) < 0 or max(ranks) >= size:
            raise ValueError(f"expected ranks from 0 to {size - 1}, but got {self.mesh.tolist()}")
        names = self.mesh_dim_names
        if names is not None and (len(names) != self.ndim or len(set(names)) != len(names)):
            raise ValueError(f"expected {self.ndim} different axis names, but got {names!r}")

    def _find(self, rank: int) -> tuple[int, ...] | None:
        found = np.argwhere(self.mesh == rank).tolist()
        return tuple(found[0]) if found else None

    def _group(self, axis: int) -> Communicator | None:
        if self._place is None:
            return None
        index: list[Any] = list(self._place)
        index[axis] = slice(None)
        return group_of(self.mesh[tuple(index)].tolist())

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{names})"

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mesh.shape

    def size(self, mesh_dim: int | None = None) -> int:
        return int(self.mesh.size if mesh_dim is None else self.mesh.shape[mesh_dim])

    def get_rank(self) -> int:
        """This process's rank in the world."""
        return world().ranks[world().rank()]

    def get_group(self, mesh_dim: int | str | None = None) -> Communicator:
        """The ranks that differ from this one only along ``mesh_dim``, which a 1-D mesh may leave out."""
        group = self._groups[self._axis(mesh_dim)]
        if group is None:
            raise RuntimeError(f"expected a mesh that holds this rank, {self.get_rank()}, but got {self}")
        return group

    def get_all_groups(self) -> list[Communicator]:
        return [self.get_group(axis) for axis in range(self.ndim)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along ``mesh_dim``."""
        return self.get_group(mesh_dim).rank()

    def get_coordinate(self) -> list[int] | None:
        """This rank's position along every axis; ``None`` if the mesh does not hold it."""
        return None if self._place is None else list(self._place)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The axes ``names`` of this mesh, in that order, at this rank's place on all others.

        Raises:
            KeyError: an axis is not there, or the mesh has no names.
        """
        picked = (names,) if isinstance(names, str) else tuple(names)
        known = self.mesh_dim_names or ()
        if picked == known:
            return self
        if len(picked) == 1 and picked[0] in self._flattened:
            return self._flattened[picked[0]]
        if not picked or any(name not in known for name in picked):
            raise KeyError(f"expected axes out of {(*known, *self._flattened)}, but got {names!r}")
        if self._place is None:
            raise RuntimeError(f"expected a mesh that holds this rank, {self.get_rank()}, but got {self}")
        axes = [known.index(name) for name in picked]
        index = tuple(slice(None) if axis in axes else here for axis, here in enumerate(self._place))
        kept = sorted(axes)
        ranks = self.mesh[index].transpose([kept.index(axis) for axis in axes])
        return DeviceMesh(self.device_type, ranks, mesh_dim_names=picked)

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """All axes as one, called ``mesh_dim_name`` (by default the joined names), found again by ``mesh[name]``."""
        name = mesh_dim_name or "_".join(self.mesh_dim_names or ("flat",))
        if name not in self._flattened:
            self._flattened[name] = DeviceMesh(self.device_type, self.mesh.reshape(-1), mesh_dim_names=(name,))
        return self._flattened[name]

    def _axis(self, mesh_dim: int | str | None) -> int:
        if mesh_dim is None:
            if self.ndim > 1:
                raise RuntimeError(f"expected an axis of a {self.ndim}-D mesh, but got None; name one of {self}")
            return 0
        if isinstance(mesh_dim, str):
            names = self.mesh_dim_names or ()
            if mesh_dim not in names:
                raise KeyError(f"expected an axis out of {names}, but got {mesh_dim!r}")
            return names.index(mesh_dim)
        return mesh_dim


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """All ranks of the world in row-major order.

    Raises:
        ValueError: ``mesh_shape`` does not hold as many ranks as there are.
    """
    shape = tuple(mesh_shape)
    size = world().size()
    if math.prod(shape) != size:
        raise ValueError(f"expected a mesh shape for {size} ranks, but got {shape}, which holds {math.prod(shape)}")
    return DeviceMesh(device_type, np.arange(size).reshape(shape), mesh_dim_names=mesh_dim_names)


def default_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    """All ranks on one axis."""
    return init_device_mesh(mindspore.get_context("device_target"), (world().size(),), mesh_dim_names=names)


def device_of(mesh: DeviceMesh) -> str:
    """``"CPU"`` or ``"Ascend"``."""
    return "CPU" if mesh.device_type.lower() == "cpu" else "Ascend"


def flatten(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh._flatten()


def submesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """[replicate,] [shard]: each the named axes of ``mesh``, flattened into one if there are several."""
    kinds = {"_".join(names): names for names in (dims.replicate_names, dims.shard_names) if names}
    picked = mesh[tuple(name for names in kinds.values() for name in names)]
    shape = [
        math.prod(mesh.size((mesh.mesh_dim_names or ()).index(name)) for name in names) for names in kinds.values()
    ]
    return DeviceMesh(mesh.device_type, picked.mesh.reshape(shape), mesh_dim_names=tuple(kinds))


def post_forward_mesh(mesh_info: FSDPMeshInfo, size: int) -> DeviceMesh:
    """Groups of ``size`` consecutive ranks of the shard axis; under HSDP both axes are cut alike."""
    mesh = mesh_info.mesh
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, size))


def ranks_of(mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> tuple[int, ...]:
    """The global ranks that a gradient is reduced over, with the replicas or without."""
    if isinstance(mesh_info, HSDPMeshInfo) and with_replicas and mesh_info.mesh.ndim == 2:
        return tuple(mesh_info.mesh.mesh.reshape(-1).tolist())
    if isinstance(mesh_info, FSDPMeshInfo):
        return mesh_info.shard_process_group.ranks  # type: ignore[no-any-return]
    assert isinstance(mesh_info, DDPMeshInfo)
    return mesh_info.replicate_process_group.ranks  # type: ignore[no-any-return]
