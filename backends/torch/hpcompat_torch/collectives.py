"""Gathers and reductions of flat buffers, issued and completed when the scheduler says so.

Collectives are looked up on ``torch.distributed`` at call time, so that tools which wrap those functions see ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcompat.comm import AllGather, ReduceOp, ReduceScatter
from hpcompat.core import agreement, failure, in_flight
from hpcompat.errors import CapabilityError
from hpcompat_torch.streams import current_stream

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import GatherRequest, HookedGroup


def reduce_op(op: ReduceOp, premul: float | None = None) -> Any:
    if op is ReduceOp.PREMUL_SUM:
        return dist._make_nccl_premul_sum(premul)
    return dist.ReduceOp.AVG if op is ReduceOp.AVG else dist.ReduceOp.SUM


# torch 2.13 renamed the two; the old names warn there.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(output: torch.Tensor, input: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    return getattr(dist, _ALL_GATHER)(output, input, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *, group: Any, op: Any, async_op: bool) -> Any:
    return getattr(dist, _REDUCE_SCATTER)(output=output, input=input, group=group, op=op, async_op=async_op)


def explain(error: RuntimeError, *, collective: str, owner: HookedGroup | None) -> None:
    """Raise an error that says more, unless ``error`` is of a kind that no transport raises (a custom collective's).

    Raises:
        CollectiveError: naming the collective and the unit.
    """
    if type(error) is RuntimeError or isinstance(error, dist.DistError):
        raise failure.failed(error, collective=collective, owner=owner) from error


class GatherInFlight(in_flight.GatherInFlight):
    __slots__ = ()

    def wait(self) -> None:
        if self.event is not None and self.output is not None:
            current_stream(self.output.device).wait_event(self.event)
        if self.work is not None:
            try:
                agreement.wait(self.work)
            except RuntimeError as error:
                explain(error, collective="all-gather", owner=self.owner)
                raise
            self.work = None


def begin_gather(output: torch.Tensor, input: torch.Tensor, *, request: GatherRequest) -> Any:
    """The default all-gather or the custom one; its work object, if it has one."""
    group, async_op = request.group, request.async_op
    try:
        if request.comm is None:
            return all_gather(output, input, group=group, async_op=async_op)
        return request.comm(output_tensor=output, input_tensor=input, group=group, async_op=async_op)
    except RuntimeError as error:
        explain(error, collective="all-gather", owner=request.owner)
        raise


class ProcessGroupComm:
    """Default collectives on buffers from the process group's own allocator, if it has one for the device."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend = self._group._get_backend(device)
        if getattr(backend, "supports_tensor_alloc", lambda _: False)(device):
            return backend.allocate_tensor(size[0], dtype=dtype, device=device)  # type: ignore[no-any-return]
        return torch.empty(size[0], dtype=dtype, device=device)


class ProcessGroupAllGather(ProcessGroupComm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class ProcessGroupReduceScatter(ProcessGroupComm):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def comm_for(kind: str, group: Any) -> tuple[AllGather, ReduceScatter]:
    if kind == "symm_mem":
        raise CapabilityError(
            backend="torch",
            capability="symmetric memory",
            hint="process groups take no buffers from symmetric memory in this version, but got one on "
            f"{dist.get_backend(group)!r}; drop the call",
        )
    return ProcessGroupAllGather(group), ProcessGroupReduceScatter(group)
