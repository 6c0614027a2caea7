"""Which reductions a process group computes, by its transport, the collective and the version of torch.

[Note: averages that add up]
A transport may take a reduction that it does not have and compute another one, without an error: in a reduce-scatter
the gloo of torch 2.7 and 2.8 adds up, whatever the operation. So a collective is trusted with what it was seen to
compute. That is a table, one line for each transport and collective, and a test measures it on whichever torch is
installed. Later versions of torch than the table's are measured where they run, once per process, between two groups of
this process alone: no rank waits for another, and no collective of the job is added to those of native FSDP2.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcompat.comm import ReduceOp

logger = logging.getLogger("hpcompat")

SUMS = frozenset({ReduceOp.SUM})
AVERAGES = SUMS | {ReduceOp.AVG}

# Measured on 2.7.1 to 2.14.1. In torch 2.7 an all-reduce refuses to average.
_GLOO_AVERAGES_SINCE = {"all_reduce": "2.8", "reduce_scatter": "2.9"}
FIRST_UNKNOWN = "2.15.dev0"
_TIMEOUT = timedelta(seconds=20)


def supported_reductions(group: Any, *, collective: str, device: torch.device) -> frozenset[ReduceOp]:
    """What ``collective`` computes over ``group`` on ``device``."""
    return known(transport_of(group, device), collective=collective, device_type=device.type)


def transport_of(group: Any, device: torch.device) -> str:
    """The name under which the transport for ``device`` is registered; a group may have another for each device."""
    transports = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return transports.get(device.type) or dist.get_backend(group)


def known(name: str, *, collective: str, device_type: str) -> frozenset[ReduceOp]:
    """What is known to work; sums where nothing else is. [Note: averages that add up]"""
    if name == "nccl":  # all, since before torch 2.7
        return frozenset(ReduceOp) if hasattr(dist, "_make_nccl_premul_sum") else AVERAGES
    if (name, device_type) != ("gloo", "cpu"):
        return SUMS
    if torch.__version__ >= FIRST_UNKNOWN:
        return measured_on_gloo()[collective]
    return AVERAGES if torch.__version__ >= _GLOO_AVERAGES_SINCE[collective] else SUMS


@functools.cache
def measured_on_gloo() -> dict[str, frozenset[ReduceOp]]:
    """What gloo computes here, found by two ranks in this process with groups of their own; sums where it cannot be
    found.
    """
    store = dist.HashStore()
    try:
        with ThreadPoolExecutor(2) as ranks:
            found = list(ranks.map(functools.partial(_average_as_one_of_two, store), range(2)))
    except RuntimeError as error:
        logger.warning("gradients over gloo are added up, then divided: no group to measure its averages (%s)", error)
        return dict.fromkeys(_COLLECTIVES, SUMS)
    return {name: AVERAGES if all(one[name] == 1.5 for one in found) else SUMS for name in _COLLECTIVES}


def _average_as_one_of_two(store: Any, rank: int) -> dict[str, float | None]:
    """What each collective says is the average of 1 and 2."""
    group = dist.ProcessGroupGloo(store, rank, 2, timeout=_TIMEOUT)
    found: dict[str, float | None] = {}
    for name, run in _COLLECTIVES.items():
        try:
            found[name] = run(group, torch.full((2,), rank + 1.0, dtype=torch.float32, device="cpu"))
        except RuntimeError:  # it says that it cannot
            found[name] = None
    return found


def _all_reduced(group: Any, tensor: torch.Tensor) -> float:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    group.allreduce([tensor], options).wait()
    return tensor[0].item()


def _reduce_scattered(group: Any, tensor: torch.Tensor) -> float:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    output = torch.empty_like(tensor[:1])
    group._reduce_scatter_base(output, tensor, options).wait()
    return output.item()


_COLLECTIVES: dict[str, Callable[[Any, torch.Tensor], float]] = {
    "all_reduce": _all_reduced,
    "reduce_scatter": _reduce_scattered,
}


def described(name: str, *, device_type: str) -> dict[str, list[str]]:
    """What a report says of a transport, by collective."""
    return {
        collective: sorted(op.value for op in known(name, collective=collective, device_type=device_type))
        for collective in _COLLECTIVES
    }
