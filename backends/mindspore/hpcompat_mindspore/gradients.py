"""Gradients of a param group between autograd and shards: capture, keep, accumulate, bucket, hand to the reduction.

[Note: capture]
The engine's own accumulation is not used: a gradient that is a view is accumulated wrongly by it, and a whole gradient
in ``parameter._grad`` would stay until backward ends. A hook on the parameter takes the gradient, which is complete by
then, and gives the engine something small in its place. For the user's own ``mindspore.value_and_grad``, which returns
what the hook gave, that is a tensor of the shard's shape; it gets its values when backward ends and everything has been
reduced.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor

from hpcompat.contract.states import TrainingState
from hpcompat.core.identity import mark, mark_of
from hpcompat_mindspore import autograd
from hpcompat_mindspore.mpi import progress
from hpcompat_mindspore.param import ShardedParam, param_of
from hpcompat_mindspore.reduction import ReductionInFlight

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import ReduceRequest
    from hpcompat_mindspore.tensors import Buffer, Memory

_NOTHING = Tensor(0.0, mindspore.float32)


# Capture


def install_capture(param: ShardedParam) -> None:
    """Hook the parameter, once, as soon as it requires grad: before that MindSpore refuses hooks."""
    if not param.is_captured and param.parameter.requires_grad:
        param.is_captured = True
        # Weak, because the engine keeps the hook where the garbage collector does not look.
        param.parameter.register_hook(functools.partial(_on_gradient, weakref.ref(param)))


def _on_gradient(reference: weakref.ref[ShardedParam], grad: Tensor) -> Tensor | None:
    param = reference()
    return None if param is None else _capture(param, grad)


def _capture(param: ShardedParam, grad: Tensor) -> Tensor:
    """Take ``grad``; return what the engine may keep. [Note: capture]"""
    param.parameter._grad = None  # of a backward that raised
    returned = _NOTHING
    if autograd.is_functional():
        param.parameter.grad = None
        if not autograd.returns_sharded_gradients():
            returned = param.returned_grad = param.memory.tensor(
                param.memory.zeros((prod(param.shard_shape),), param.orig_dtype), param.shard_shape
            )
    if _was_used_as_shard(param, grad):
        param.deliver(param.memory.read(grad).reshape(-1))
    else:
        param.new_grad = grad
        if param.owner is not None:
            param.owner.note_gradient()
    autograd.queue_final_callback(lambda: _settle(param), is_last=True)
    return returned


def _was_used_as_shard(param: ShardedParam, grad: Tensor) -> bool:
    """Whether the gradient comes from a use outside the unit, such as a penalty on the sharded parameters."""
    if tuple(grad.shape) != param.layout.shape:
        return True
    in_unit = param.owner is None or param.owner.training_state in (
        TrainingState.PRE_BACKWARD,
        TrainingState.POST_BACKWARD,
    )
    return not in_unit and param.shard_shape == param.layout.shape


def _settle(param: ShardedParam) -> None:
    """At the end of backward: empty the engine's gradient, and fill what ``mindspore.value_and_grad`` returns.

    Raises:
        RuntimeError: the gradient came too late to be reduced, or nothing was reduced, so that there is no right value
            to return.
    """
    param.parameter._grad = None
    if param.new_grad is not None:
        param.drop_gradients()
        raise RuntimeError(
            f"expected the gradient of {param.name!r} before its unit reduced its gradients, but got it afterwards: "
            "the parameter is also used outside of the unit (run another backward for that, such as a penalty's), or "
            "an earlier backward raised (call reset_iter_state() on the root after that)"
        )
    returned, param.returned_grad = param.returned_grad, None
    if returned is None:
        return
    reduced = getattr(param.parameter, "main_grad", None) if param.keeps_main_grad else param.parameter.grad
    if reduced is None:
        raise RuntimeError(
            f"expected a reduced gradient of {param.name!r} for mindspore.value_and_grad to return, but got none, "
            "because gradient sync is off; call hpcompat.value_and_grad, which returns None there"
        )
    returned.assign_value(reduced)


_OWN = "_hpcompat_own_gradient"


def make_gradient_own(parameter: Parameter, memory: Memory) -> None:
    """For a parameter that no unit manages, which the engine accumulates: give it a gradient that is neither a view nor
    another tensor's as well. It adds up wrongly to the first kind and cannot add to the second.
    """
    if parameter.requires_grad and param_of(parameter) is None and not mark_of(parameter, _OWN):
        mark(parameter, _OWN, True)
        parameter.register_hook(memory.copy_of)


# Buckets


class GradientBucket:
    """Gradients with one reduce dtype and one original dtype."""

    __slots__ = ("grads", "orig_dtype", "params", "reduce_dtype")

    def __init__(self, reduce_dtype: Any, orig_dtype: Any) -> None:
        self.reduce_dtype = reduce_dtype
        self.orig_dtype = orig_dtype
        self.params: list[ShardedParam] = []
        self.grads: list[Buffer] = []

    @property
    def overflow_risk(self) -> bool:
        return self.reduce_dtype not in (mindspore.float32, mindspore.bfloat16)


# By reduce dtype and original dtype.
Buckets = dict[tuple[Any, Any], GradientBucket]


def has_new(params: Sequence[ShardedParam]) -> bool:
    return any(param.new_grad is not None for param in params)


def accumulate(params: Sequence[ShardedParam]) -> None:
    """Add new gradients to kept ones."""
    for param in params:
        if param.accumulated_grad is not None and param.new_grad is not None:
            new = param.memory.read(param.new_grad).reshape(-1)
            param.accumulated_grad = param.memory.add(param.accumulated_grad, new)
            param.new_grad = None


def stash(params: Sequence[ShardedParam]) -> None:
    """Keep new gradients, in the reduce dtype, for later backwards to add to."""
    for param in params:
        if param.new_grad is not None:
            row = param.memory.read(param.new_grad).reshape(1, -1)
            # Packing copies: the engine's memory may be shared with other gradients.
            param.accumulated_grad = param.memory.pack([row], param.reduce_dtype or param.new_grad.dtype)
            param.kept_dtype = param.reduce_dtype or param.new_grad.dtype
            param.new_grad = None


def take(params: Sequence[ShardedParam], *, fill_unused: bool) -> list[GradientBucket]:
    """Every gradient that is due, in buckets; the parameters no longer hold them."""
    progress()  # reading a gradient waits until it is computed
    buckets: Buckets = {}
    for param in params:
        found = _take_one(param, fill_unused=fill_unused)
        if found is not None:
            _put(buckets, param, *found)
    return list(buckets.values())


def _put(buckets: Buckets, param: ShardedParam, grad: Buffer, dtype: Any) -> None:
    key = (param.reduce_dtype or dtype, param.orig_dtype)
    bucket = buckets.get(key)
    if bucket is None:
        bucket = buckets[key] = GradientBucket(*key)
    bucket.params.append(param)
    bucket.grads.append(grad)


def _take_one(param: ShardedParam, *, fill_unused: bool) -> tuple[Buffer, Any] | None:
    """A gradient and its dtype."""
    grad = param.accumulated_grad
    if grad is not None:
        param.accumulated_grad = None
        return grad, param.kept_dtype
    if param.new_grad is not None:
        new, param.new_grad = param.new_grad, None
        return param.memory.read(new), new.dtype
    if param.partial_grad is not None or (fill_unused and param.parameter.requires_grad):
        # A partial sum still waits for its all-reduce, or the other ranks may have used the parameter.
        return param.memory.zeros(param.layout.shape, param.param_dtype), param.param_dtype
    return None


def missing(params: Sequence[ShardedParam], buckets: Sequence[GradientBucket]) -> tuple[str, ...]:
    """Names of the trainable parameters that are in none of ``buckets``."""
    trainable = [param for param in params if param.parameter.requires_grad]
    if sum(len(bucket.params) for bucket in buckets) >= len(trainable):
        return ()
    there = {param for bucket in buckets for param in bucket.params}
    return tuple(param.name for param in trainable if param not in there)


def zeros(params: Sequence[ShardedParam], *, missing: Collection[str]) -> list[GradientBucket]:
    """What :func:`take` gives where all trainable parameters but the ``missing`` ones have gradients of zeros."""
    buckets: Buckets = {}
    for param in params:
        if param.parameter.requires_grad and param.name not in missing:
            dtype = param.param_dtype
            _put(buckets, param, param.memory.zeros(param.layout.shape, dtype), dtype)
    return list(buckets.values())


def start_reduce(bucket: GradientBucket, request: ReduceRequest, *, memory: Memory, device: str) -> ReductionInFlight:
    """Lay the gradients out as ``[world size, per-rank elements]`` and issue the collectives.

    Each rank's row holds its padded chunk of every gradient, in order; packing casts to the reduce dtype.
    """
    columns = [param.as_rows(grad) for param, grad in zip(bucket.params, bucket.grads, strict=True)]
    out = None
    if request.comm is not None:
        numel = sum(column.size for column in columns)
        out = memory.read(request.comm.allocate((numel,), dtype=bucket.reduce_dtype, device=device))
    flat = memory.pack(columns, bucket.reduce_dtype, out=out)
    bucket.grads = []  # the copies are made: let autograd's memory go
    reduction = ReductionInFlight(
        bucket.params,
        request=request,
        reduce_dtype=bucket.reduce_dtype,
        orig_dtype=bucket.orig_dtype,
        flat=flat,
        memory=memory,
        device=device,
    )
    reduction.issue()
    return reduction
