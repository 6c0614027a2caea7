"""Gradients of a param group between autograd and shards: keep, accumulate, bucket, lay out, hand to the reduction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from hpcompat_torch import private
from hpcompat_torch.reduction import ReductionInFlight
from hpcompat_torch.streams import on_stream

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import ReduceRequest
    from hpcompat_torch.param import ShardedParam


class GradientBucket:
    """Gradients with one reduce dtype and one original dtype."""

    __slots__ = ("grads", "orig_dtype", "params", "reduce_dtype")

    def __init__(self, reduce_dtype: torch.dtype, orig_dtype: torch.dtype) -> None:
        self.reduce_dtype = reduce_dtype
        self.orig_dtype = orig_dtype
        self.params: list[ShardedParam] = []
        self.grads: list[torch.Tensor] = []

    @property
    def overflow_risk(self) -> bool:
        return self.reduce_dtype not in (torch.float32, torch.bfloat16)


# By reduce dtype and original dtype.
Buckets = dict[tuple[torch.dtype, torch.dtype], GradientBucket]


def has_new(params: Sequence[ShardedParam]) -> bool:
    return any(param.unsharded_param is not None and param.unsharded_param.grad is not None for param in params)


def watch(params: Sequence[ShardedParam], note: Callable[[], None]) -> None:
    """Call ``note`` whenever autograd has given an unsharded parameter a gradient."""
    for param in params:
        unsharded = param.unsharded_param
        if unsharded is not None and unsharded.requires_grad and param.watched_param is not unsharded:
            param.watched_param = unsharded
            unsharded.register_post_accumulate_grad_hook(lambda _: note())


def accumulate(params: Sequence[ShardedParam]) -> None:
    """Add new gradients to kept ones."""
    for param in params:
        kept, unsharded = param.accumulated_grad, param.unsharded_param
        if kept is not None and unsharded is not None and unsharded.grad is not None:
            kept += unsharded.grad
            unsharded.grad = None


def stash(params: Sequence[ShardedParam]) -> None:
    """Keep new gradients in the reduce dtype where that is another one; autograd adds up the others itself."""
    for param in params:
        unsharded, dtype = param.unsharded_param, param.reduce_dtype
        if dtype is None or unsharded is None or unsharded.grad is None or unsharded.grad.dtype == dtype:
            continue
        param.accumulated_grad = unsharded.grad.to(dtype)
        unsharded.grad = None


def take(params: Sequence[ShardedParam], *, fill_unused: bool) -> list[GradientBucket]:
    """Every gradient that is due, in buckets; the parameters no longer hold them."""
    buckets: Buckets = {}
    for param in params:
        grad = _take_one(param, fill_unused=fill_unused)
        if grad is not None:
            _put(buckets, param, grad)
    return list(buckets.values())


def _put(buckets: Buckets, param: ShardedParam, grad: torch.Tensor) -> None:
    key = (param.reduce_dtype or grad.dtype, param.orig_dtype)
    bucket = buckets.get(key)
    if bucket is None:
        bucket = buckets[key] = GradientBucket(*key)
    bucket.params.append(param)
    bucket.grads.append(grad)


def _take_one(param: ShardedParam, *, fill_unused: bool) -> torch.Tensor | None:
    grad = param.accumulated_grad
    unsharded = param.unsharded_param
    if grad is not None:
        param.accumulated_grad = None
    elif unsharded is not None and unsharded.grad is not None:
        grad = unsharded.grad
        unsharded.grad = None
    elif param.partial_grad is not None or (fill_unused and param.sharded_param.requires_grad):
        # A partial sum still waits for its all-reduce, or the other ranks may have used the parameter.
        return param.zero_grad()
    else:
        return None
    return grad if param.spec.unsharded is None and not grad.requires_grad else param.local_grad(grad)


def missing(params: Sequence[ShardedParam], buckets: Sequence[GradientBucket]) -> tuple[str, ...]:
    """Names of the trainable parameters that are in none of ``buckets``."""
    trainable = [param for param in params if param.sharded_param.requires_grad]
    if sum(len(bucket.params) for bucket in buckets) >= len(trainable):
        return ()
    there = {param for bucket in buckets for param in bucket.params}
    return tuple(param.name for param in trainable if param not in there)


def zeros(params: Sequence[ShardedParam], *, missing: Collection[str]) -> list[GradientBucket]:
    """What :func:`take` gives where all trainable parameters but the ``missing`` ones have gradients of zeros."""
    buckets: Buckets = {}
    for param in params:
        if param.sharded_param.requires_grad and param.name not in missing:
            _put(buckets, param, param.zero_grad())
    return list(buckets.values())


def start_reduce(
    bucket: GradientBucket, request: ReduceRequest, *, device: torch.device, async_op: bool
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
    reduction = ReductionInFlight(params, request=request, orig_dtype=bucket.orig_dtype, input=flat, output=output)
    reduction.issue(async_op=async_op)
    return reduction


def _as_rows(bucket: GradientBucket, world_size: int) -> list[torch.Tensor]:
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
