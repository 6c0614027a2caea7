"""Process groups that outlive a job.

[Note: why groups are reused, not destroyed] Making a gloo group costs some 20 ms, more than a small case. Destroying
one breaks later jobs: DTensor caches the specs of its operators' outputs by mesh *value*, and a cached spec holds the
mesh object, hence the group names, of the job that met it first. So a group that a job asked for goes back on the
shelf when the job ends, and the next request for the same ranks takes it from there. Within one job, two requests
give two groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

Key = tuple[Any, ...]


class GroupShelf:
    """Stands in for ``new_group``."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._groups: dict[Key, list[Any]] = defaultdict(list)
        self._num_taken: dict[Key, int] = defaultdict(int)

    def __call__(self, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A group over ``ranks`` that this job has not got before; made if there is none."""
        if args or kwargs.get("pg_options") is not None:
            return self._make(ranks, *args, **kwargs)
        ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        key: Key = (tuple(ranks), str(kwargs.get("backend")), bool(kwargs.get("use_local_synchronization")))
        index = self._num_taken[key]
        self._num_taken[key] += 1
        shelf = self._groups[key]
        if index == len(shelf):
            shelf.append(self._make(ranks, **kwargs))
        elif not _is_alive(shelf[index]):
            shelf[index] = self._make(ranks, **kwargs)
        return shelf[index]

    def put_back(self) -> None:
        """All groups are free again: the job is over."""
        self._num_taken.clear()

    def positions(self) -> dict[str, int]:
        """The number of collectives issued on each group that this rank is in; on those that count."""
        return {
            f"ranks {','.join(map(str, key[0]))} #{index}": count
            for key, shelf in self._groups.items()
            for index, group in enumerate(shelf)
            if _is_alive(group) and (count := _count(group)) is not None
        }


def install() -> GroupShelf:
    """Put a shelf in the place of ``new_group`` wherever torch looks it up."""
    original = distributed_c10d.new_group
    shelf = GroupShelf(original)
    for module in (dist, distributed_c10d, device_mesh):
        if getattr(module, "new_group", None) is original:
            module.new_group = shelf  # type: ignore[attr-defined]
    return shelf


def _is_alive(group: Any) -> bool:
    return group is dist.GroupMember.NON_GROUP_MEMBER or group in distributed_c10d._world.pg_map


def _count(group: Any) -> int | None:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a transport that is not one of torch's own
        return None
