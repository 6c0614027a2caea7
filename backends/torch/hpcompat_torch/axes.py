"""The ranks that hold the other parts of a distributed tensor, and those that hold the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpcompat_torch import mesh as meshes
from hpcompat_torch.local import is_distributed


class Axis(NamedTuple):
    """The ranks along one axis of a mesh, and the device on which they exchange numbers.

    That is the mesh's: under CPU offload the group may know no other (OFF-02).
    """

    group: Any
    device: torch.device


class Placed(NamedTuple):
    """Axes of more than one rank: those on which a tensor is sharded, and all of its mesh."""

    sharded: tuple[Axis, ...]
    every: tuple[Axis, ...]


NOWHERE = Placed((), ())


class Atlas:
    """Looks meshes up once per placement, not once per tensor."""

    def __init__(self) -> None:
        self._known: dict[Any, Placed] = {}

    def placed(self, tensor: Any) -> Placed:
        """Of a distributed tensor; a plain one is nowhere.

        Raises:
            ValueError: a partial sum.
        """
        if not is_distributed(tensor):
            return NOWHERE
        key = (tensor.device_mesh, tuple(tensor.placements))
        placed = self._known.get(key)
        if placed is None:
            placed = self._known[key] = _placed(*key)
        return placed


def all_axes(tensors: Iterable[torch.Tensor]) -> list[Axis]:
    """Of the meshes of ``tensors``, each once, in the order in which they appear."""
    atlas = Atlas()
    return list(dict.fromkeys(axis for tensor in tensors for axis in atlas.placed(tensor).every))


def _placed(mesh: Any, placements: tuple[Any, ...]) -> Placed:
    sharded, every = [], []
    for number, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(
                f"expected parameters that are sharded or replicated, but got {placement} on axis {number} of {mesh}; "
                "redistribute them"
            )
        group = mesh.get_group(number)
        if dist.get_world_size(group) == 1:
            continue
        axis = Axis(group, meshes.device_of(mesh))
        every.append(axis)
        if not placement.is_replicate():
            sharded.append(axis)
    return Placed(tuple(sharded), tuple(every))
