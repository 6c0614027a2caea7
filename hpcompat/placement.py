"""Where a parameter's shard comes from: placements and the result of ``shard_placement_fn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcompat.mesh import FSDPMeshInfo


@dataclass(frozen=True)
class Shard:
    """Cut along ``dim``. Backends also accept their framework's own ``Shard``; anything with ``dim`` and that name."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole parameter."""


@dataclass
class ShardPlacementResult:
    """Placement and mesh of one parameter, returned by ``shard_placement_fn`` (PLC-05).

    ``placement=None`` means ``Shard(0)``. Parameters whose mesh infos name the same process groups share a param group.
    """

    placement: Any
    mesh_info: FSDPMeshInfo


def is_shard(placement: object) -> bool:
    """Whether ``placement`` is a plain ``Shard`` of ours or of a framework."""
    return type(placement).__name__ == "Shard" and isinstance(getattr(placement, "dim", None), int)
