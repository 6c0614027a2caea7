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
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import mindspore
from mindspore import Parameter, Tensor

from hpcompat.contract.states import TrainingState
from hpcompat.core import gradients
from hpcompat.core.identity import mark, mark_of
from hpcompat_mindspore import autograd
from hpcompat_mindspore.mpi import progress
from hpcompat_mindspore.param import ShardedParam, param_of
from hpcompat_mindspore.reduction import ReductionInFlight

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import ReduceRequest
    from hpcompat.core.gradients import GradientBucket
    from hpcompat_mindspore.tensors import Memory

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


# Between backwards and the reduction


class GroupGradients(gradients.GroupGradients["ShardedParam"]):
    """What the hooks have captured, and what is kept of it."""

    wide_dtypes = (mindspore.float32, mindspore.bfloat16)

    def has_new_gradients(self) -> bool:
        return any(param.new_grad is not None for param in self.params)

    def watch_gradients(self, note: Callable[[], None]) -> None:
        """The hook that captures gradients is always there, and notes each one."""

    def accumulate_gradients(self) -> None:
        for param in self.params:
            if param.accumulated_grad is not None and param.new_grad is not None:
                new = param.memory.read(param.new_grad).reshape(-1)
                param.accumulated_grad = param.memory.add(param.accumulated_grad, new)
                param.new_grad = None

    def stash_gradients(self) -> None:
        for param in self.params:
            if param.new_grad is not None:
                row = param.memory.read(param.new_grad).reshape(1, -1)
                # Packing copies: the engine's memory may be shared with other gradients.
                param.accumulated_grad = param.memory.pack([row], param.reduce_dtype or param.new_grad.dtype)
                param.kept_dtype = param.reduce_dtype or param.new_grad.dtype
                param.new_grad = None

    def take_gradients(self, *, fill_unused: bool) -> list[GradientBucket[ShardedParam]]:
        progress()  # reading a gradient waits until it is computed
        return super().take_gradients(fill_unused=fill_unused)


def start_reduce(
    bucket: GradientBucket[ShardedParam], request: ReduceRequest, *, memory: Memory, device: str
) -> ReductionInFlight:
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
        params=bucket.params,
        request=request,
        reduce_dtype=bucket.reduce_dtype,
        orig_dtype=bucket.orig_dtype,
        flat=flat,
        memory=memory,
        device=device,
    )
    reduction.issue()
    return reduction
