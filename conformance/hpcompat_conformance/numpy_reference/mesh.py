"""Device meshes: an array of rank numbers, seen from one of them, with the surface of torch's ``DeviceMesh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from hpcompat_conformance.numpy_reference.world import Array, Group, Rank, current_rank


@dataclass(frozen=True, eq=False, repr=False)
class DeviceMesh:
    """``ranks`` is an array with one dim per axis; ``rank`` is the member that looks at it."""

    ranks: Array
    mesh_dim_names: tuple[str, ...] | None
    rank: Rank

    def __repr__(self) -> str:
        return f"DeviceMesh({self.ranks.shape}, mesh_dim_names={self.mesh_dim_names})"

    @property
    def ndim(self) -> int:
        return self.ranks.ndim

    def size(self, mesh_dim: int | None = None) -> int:
        return self.ranks.size if mesh_dim is None else self.ranks.shape[mesh_dim]

    def get_group(self, mesh_dim: int | str | None = None) -> Group:
        """The ranks that differ from this one only along ``mesh_dim``."""
        place = list(self._place())
        place[self._axis(mesh_dim)] = slice(None)  # type: ignore[call-overload]
        return Group(tuple(self.ranks[tuple(place)].tolist()), self.rank)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._place()[self._axis(mesh_dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The axes ``names``, at this rank's place on all others."""
        picked = (names,) if isinstance(names, str) else tuple(names)
        axes = [self._axis(name) for name in picked]
        place = tuple(slice(None) if axis in axes else here for axis, here in enumerate(self._place()))
        kept = sorted(axes)
        return DeviceMesh(self.ranks[place].transpose([kept.index(axis) for axis in axes]), picked, self.rank)

    def _flatten(self, name: str) -> DeviceMesh:
        return DeviceMesh(self.ranks.reshape(-1), (name,), self.rank)

    def _axis(self, mesh_dim: int | str | None) -> int:
        if isinstance(mesh_dim, str):
            return (self.mesh_dim_names or ()).index(mesh_dim)
        return mesh_dim or 0

    def _place(self) -> tuple[int, ...]:
        (place,) = np.argwhere(self.ranks == self.rank.number).tolist()
        return tuple(place)


def init_device_mesh(shape: Sequence[int], *, mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """All ranks of the current world as a mesh of ``shape``."""
    rank = current_rank()
    return DeviceMesh(np.arange(rank.world.size).reshape(shape), mesh_dim_names, rank)


def submesh(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    """[replicate,] [shard]: the axes that ``dims`` names, each kind flattened into one."""
    named = {"_".join(names): names for names in (dims.replicate_names, dims.shard_names) if names}
    picked = mesh[tuple(name for names in named.values() for name in names)]
    shape = [picked[names].size() for names in named.values()]
    return DeviceMesh(picked.ranks.reshape(shape), tuple(named), mesh.rank)


def ranks_of(mesh_info: DataParallelMeshInfo, *, with_replicas: bool) -> tuple[int, ...]:
    """The ranks that a gradient is reduced over, with the replicas or without."""
    if isinstance(mesh_info, HSDPMeshInfo) and with_replicas:
        return tuple(mesh_info.mesh.ranks.reshape(-1).tolist())
    axis = mesh_info.shard_mesh_dim if isinstance(mesh_info, FSDPMeshInfo) else mesh_info.replicate_mesh_dim
    ranks: tuple[int, ...] = mesh_info.mesh.get_group(axis).ranks
    return ranks
