"""Gradients of a param group between autograd and shards: keep, accumulate, bucket, lay out, hand to the reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hpcompat.core import gradients
from hpcompat_torch import private
from hpcompat_torch.reduction import ReductionInFlight
from hpcompat_torch.streams import on_stream

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import ReduceRequest
    from hpcompat.core.gradients import GradientBucket
    from hpcompat_torch.param import ShardedParam


class GroupGradients(gradients.GroupGradients["ShardedParam"]):
    """What autograd leaves on the unsharded parameters, and what is kept of it."""

    wide_dtypes = (torch.float32, torch.bfloat16)

    def has_new_gradients(self) -> bool:
        return any(
            param.unsharded_param is not None and param.unsharded_param.grad is not None for param in self.params
        )

    def watch_gradients(self, note: Callable[[], None]) -> None:
        for param in self.params:
            unsharded = param.unsharded_param
            if unsharded is not None and unsharded.requires_grad and param.watched_param is not unsharded:
                param.watched_param = unsharded
                unsharded.register_post_accumulate_grad_hook(lambda _: note())

    def accumulate_gradients(self) -> None:
        for param in self.params:
            kept, unsharded = param.accumulated_grad, param.unsharded_param
            if kept is not None and unsharded is not None and unsharded.grad is not None:
                kept += unsharded.grad
                unsharded.grad = None

    def stash_gradients(self) -> None:
        """In the reduce dtype where that is another one; autograd adds up the others itself."""
        for param in self.params:
            unsharded, dtype = param.unsharded_param, param.reduce_dtype
            if dtype is None or unsharded is None or unsharded.grad is None or unsharded.grad.dtype == dtype:
                continue
            param.accumulated_grad = unsharded.grad.to(dtype)
            unsharded.grad = None


def start_reduce(
    bucket: GradientBucket[ShardedParam], request: ReduceRequest, *, device: torch.device, async_op: bool
) -> ReductionInFlight:
    """Lay the gradients out as ``[world size, per-rank elements]`` and issue the collectives.

    Each rank's row holds its padded chunk of every gradient, in order; copying in casts to the reduce dtype.
    """
    world_size, comm, params = request.shard_world_size, request.comm, bucket.params

    def allocate(numel: int) -> torch.Tensor:
        if comm is None:
            return torch.empty(numel, dtype=bucket.reduce_dtype, device=device)
        return comm.allocate((numel,), dtype=bucket.reduce_dtype, device=device)  # type: ignore[no-any-return]

    per_rank = sum(param.padded_numel for param in params)
    flat = allocate(per_rank * world_size)
    rows = [grad for grad in _as_rows(bucket, world_size) if grad.numel() > 0]
    if rows:
        private.chunk_cat(rows, dim=0, num_chunks=world_size, out=flat.view(world_size, -1))
    bucket.grads = []  # the copies are made: let autograd's memory go
    with on_stream(request.reduce_stream, device):
        output = allocate(per_rank) if world_size > 1 else flat
    reduction = ReductionInFlight(
        params=params, request=request, orig_dtype=bucket.orig_dtype, input=flat, output=output
    )
    reduction.issue(async_op=async_op)
    return reduction


def _as_rows(bucket: GradientBucket[ShardedParam], world_size: int) -> list[torch.Tensor]:
    """The gradients in one dtype, each with the blocks that go to the ranks one after another along dim 0."""
    grads = bucket.grads
    for grad, param in zip(grads, bucket.params, strict=True):
        if grad.layout is not torch.strided:
            raise NotImplementedError(
                f"expected dense gradients to reduce, but got a sparse gradient for {param.name!r}; make its module "
                "with sparse=False"
            )
    if len({grad.dtype for grad in grads}) > 1:
        grads = [grad.to(bucket.reduce_dtype) for grad in grads]
    if world_size == 1 or all(param.dim == 0 for param in bucket.params):
        return grads
    return [
        grad if param.dim == 0 else torch.cat(grad.chunk(world_size, dim=param.dim), dim=0)
        for grad, param in zip(grads, bucket.params, strict=True)
    ]
