"""Recording collectives by standing in for the public functions of ``torch.distributed``, and calling them."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hpcompat_conformance.framework import Collective
from hpcompat_conformance.on_torch.names import dtype_name

# Function -> (kind, the parameter that holds the larger tensor). torch renamed the first two in 2.13 and keeps the old
# names, which call the new ones: whichever is called first is recorded, what it calls in turn is not.
RECORDED = {
    "all_gather_single": ("all_gather", "output_tensor"),
    "all_gather_into_tensor": ("all_gather", "output_tensor"),
    "_all_gather_base": ("all_gather", "output_tensor"),
    "all_gather": ("all_gather", "tensor_list"),
    "reduce_scatter_single": ("reduce_scatter", "input"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_reduce_scatter_base": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input_list"),
    "all_reduce": ("all_reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
    "all_to_all_single": ("all_to_all", "input"),
}


class _Depth(threading.local):
    """How many recorded functions the thread is inside of."""

    calls = 0


@contextmanager
def record() -> Iterator[list[Collective]]:
    """The collectives that this process issues inside the block, in order."""
    log: list[Collective] = []
    replaced: list[tuple[Any, str, Any]] = []
    depth = _Depth()
    try:
        for name, (kind, sized_by) in RECORDED.items():
            original = getattr(distributed_c10d, name, None)
            if original is None:
                continue
            stand_in = _recording(original, kind=kind, sized_by=sized_by, log=log, depth=depth)
            for module in (dist, distributed_c10d):
                if getattr(module, name, None) is original:
                    replaced.append((module, name, original))
                    setattr(module, name, stand_in)
        yield log
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _recording(
    original: Callable[..., Any], *, kind: str, sized_by: str, log: list[Collective], depth: _Depth
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if depth.calls == 0:
            arguments = signature.bind(*args, **kwargs).arguments
            log.append(_describe(kind, sized=arguments[sized_by], group=arguments.get("group")))
        depth.calls += 1
        try:
            return original(*args, **kwargs)
        finally:
            depth.calls -= 1

    return stand_in


def _describe(kind: str, *, sized: Any, group: Any) -> Collective:
    tensors: list[torch.Tensor] = [sized] if isinstance(sized, torch.Tensor) else list(sized)
    num_elements = sum(tensor.numel() for tensor in tensors)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    return Collective(kind, ranks, num_elements, dtype_name(tensors[0].dtype))


def all_gather(output: torch.Tensor, input: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """The function of this torch's name, looked up now so that it is recorded."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, input, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *, group: Any, op: Any, async_op: bool) -> Any:
    """Likewise."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, input, group=group, op=op, async_op=async_op)
