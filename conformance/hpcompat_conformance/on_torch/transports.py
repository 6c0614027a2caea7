"""A transport that adds up where it is asked for an average, without a word, as the gloo of torch 2.8 does in a
reduce-scatter (pytorch/pytorch#162338): gloo under another name, and stand-ins for the functions that reduce over it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

NAME = "gloo_that_adds_up"
REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base", "all_reduce")


@contextmanager
def mesh_that_adds_up(shape: Sequence[int], *, axis_names: Sequence[str] | None) -> Iterator[DeviceMesh]:
    """A mesh over groups of the transport, which adds up inside the block."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, dist.ProcessGroupGloo, devices=["cpu"])
    replaced = []
    try:
        for name in REDUCTIONS:
            original = getattr(distributed_c10d, name, None)
            stand_in = None if original is None else _adding(original)
            for module in (dist, distributed_c10d):
                if original is not None and getattr(module, name, None) is original:
                    replaced.append((module, name, original))
                    setattr(module, name, stand_in)
        yield _mesh(np.arange(dist.get_world_size()).reshape(shape), axis_names=axis_names)
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        group = bound.arguments.get("group")
        if group is not None and dist.get_backend(group) == NAME:
            bound.arguments["op"] = dist.ReduceOp.SUM
        return original(*bound.args, **bound.kwargs)

    return stand_in


def _mesh(ranks: np.ndarray[Any, Any], *, axis_names: Sequence[str] | None) -> DeviceMesh:
    """One group for each line of ranks along each axis, which all ranks make in one order."""
    mine = []
    for axis in range(ranks.ndim):
        for line in np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist():
            group = dist.new_group(line, backend=NAME)
            if dist.get_rank() in line:
                mine.append(group)
    return DeviceMesh.from_group(
        mine, "cpu", mesh=torch.from_numpy(ranks), mesh_dim_names=tuple(axis_names) if axis_names else None
    )
