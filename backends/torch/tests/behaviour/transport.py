"""What collectives compute, against what the backend takes them to compute, on the torch that is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from behaviour.registry import behaviour
from hpcompat import ReduceOp
from hpcompat_torch import collectives, transport

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def reduced(collective: str, mine: Tensor, *, op: Any, async_op: bool) -> float:
    output = mine
    if collective == "all_reduce":
        work = dist.all_reduce(mine, op=op, async_op=async_op)
    else:
        output = torch.empty_like(mine[:1])
        work = collectives.reduce_scatter(output, mine, group=dist.group.WORLD, op=op, async_op=async_op)
    if work is not None:
        work.wait()
    return output[0].item()


@behaviour(2, 4, each=[{"collective": "all_reduce"}, {"collective": "reduce_scatter"}])
def what_is_known_of_a_collective_is_so(collective: str) -> None:
    """And what is not claimed would be wrong: else native's bits would be missed for nothing."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    known = transport.supported_reductions(dist.group.WORLD, collective=collective, device=CPU)
    assert known in (transport.SUMS, transport.AVERAGES)
    total = world_size * (world_size + 1) / 2
    for dtype in DTYPES:
        for async_op in (False, True):

            def result(op: Any, dtype: torch.dtype = dtype, async_op: bool = async_op) -> float | None:
                try:
                    return reduced(
                        collective, torch.full((world_size,), rank + 1, dtype=dtype), op=op, async_op=async_op
                    )
                except RuntimeError:  # torch 2.7 refuses, before it sends anything
                    return None

            assert result(dist.ReduceOp.SUM) == total
            averages = result(dist.ReduceOp.AVG) == total / world_size
            assert averages == (ReduceOp.AVG in known), f"{collective} of {dtype} with torch {torch.__version__}"


@behaviour(2)
def a_measurement_is_no_collective_of_the_job() -> None:
    """One rank alone measures, and nothing is counted."""
    if dist.get_rank() == 0:
        with CommDebugMode() as count, torch.device("meta"):
            found = transport.measured_on_gloo.__wrapped__()
        assert count.get_total_counts() == 0
        assert found == {name: transport.known("gloo", collective=name, device_type="cpu") for name in found}
