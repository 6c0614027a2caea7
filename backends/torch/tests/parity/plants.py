"""Rank side: bugs planted in hpcompat on purpose, to prove that the comparisons see them.

Each plant patches one function by name: if that is renamed, the plant raises instead of silently doing nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from parity.bits import bits

Plant = Callable[[], AbstractContextManager[Any]]


def after(owner: Any, name: str, effect: Callable[..., None]) -> AbstractContextManager[Any]:
    """Run `effect(*args)` after every call of `owner.name`."""
    original = getattr(owner, name)

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        effect(*args)
        return result

    return mock.patch.object(owner, name, spoiled)


def no_post_divide() -> AbstractContextManager[Any]:
    """The division that follows a sum is left out."""
    from hpcompat.core import division

    original = division.divide_plan
    return mock.patch.object(division, "divide_plan", lambda request: dataclasses.replace(original(request), post=None))


def lost_last_rank() -> AbstractContextManager[Any]:
    """The last rank's part of every gather arrives as zeros."""
    from hpcompat_torch.collectives import GatherInFlight

    def lose(gather: Any) -> None:
        if gather.output is not None:
            gather.output.view(gather.world_size, -1)[-1].zero_()

    return after(GatherInFlight, "wait", lose)


def kept_accumulation() -> AbstractContextManager[Any]:
    """The gradients accumulated in one step are still there in the next."""
    from hpcompat_torch.group import GroupTensors

    original = GroupTensors.take_gradients

    def take(tensors: Any, **kwargs: Any) -> Any:
        kept = [None if param.accumulated_grad is None else param.accumulated_grad.clone() for param in tensors.params]
        buckets = original(tensors, **kwargs)
        for param, grad in zip(tensors.params, kept, strict=True):
            param.accumulated_grad = grad
        return buckets

    return mock.patch.object(GroupTensors, "take_gradients", take)


def dropped_microbatch() -> AbstractContextManager[Any]:
    """Every third time that a group keeps gradients without reducing them, it drops them all."""
    from hpcompat_torch.group import GroupTensors

    calls: dict[int, int] = {}

    def drop(tensors: Any) -> None:
        calls[id(tensors)] = calls.get(id(tensors), 0) + 1
        if calls[id(tensors)] % 3 == 0:
            tensors.drop_gradients()

    return after(GroupTensors, "stash_gradients", drop)


def wrong_all_reduce_group() -> AbstractContextManager[Any]:
    """HSDP's all-reduce runs over the shard group."""
    from hpcompat.mesh import HSDPMeshInfo

    def confuse(info: Any) -> None:
        info.replicate_process_group = info.shard_process_group

    return after(HSDPMeshInfo, "__post_init__", confuse)


def no_all_reduce() -> AbstractContextManager[Any]:
    """HSDP's all-reduce is left out: each replica keeps its own sum."""
    from hpcompat_torch.reduction import ReductionInFlight

    return mock.patch.object(ReductionInFlight, "_all_reduce")


def one_ulp() -> AbstractContextManager[Any]:
    """The lowest bit of one element is flipped in the ninth gradient that reaches a parameter on this rank."""
    from hpcompat_torch.param import ShardedParam

    original = ShardedParam.deliver
    calls = 0

    def deliver(param: Any, grad: torch.Tensor, **kwargs: Any) -> None:
        nonlocal calls
        if grad.numel() > 0:
            calls += 1
            if calls == 9:
                grad = grad.clone()
                bits(grad)[-1] ^= 1
        original(param, grad, **kwargs)

    return mock.patch.object(ShardedParam, "deliver", deliver)


def wrong_prefetch() -> AbstractContextManager[Any]:
    """Backward always prefetches the unit whose forward ran first."""
    from hpcompat.contract.states import TrainingState
    from hpcompat.core import prefetch

    def first_of_all(group: Any) -> None:
        prefetch.prefetch(group.comm_ctx.post_forward_order[0], TrainingState.PRE_BACKWARD)

    return mock.patch.object(prefetch, "prefetch_previous", first_of_all)


def no_gather_for_backward() -> AbstractContextManager[Any]:
    """Parameters are kept after forward although they should be freed: the numbers are right, the traffic is not."""
    from hpcompat.contract.states import TrainingState
    from hpcompat.core.param_group import ParamGroup

    original = ParamGroup.reshard

    def reshard(group: Any) -> None:
        if group.training_state is not TrainingState.FORWARD:
            original(group)

    return mock.patch.object(ParamGroup, "reshard", reshard)


def uncast_reduction() -> AbstractContextManager[Any]:
    """The reduction runs in the gradient's dtype instead of the policy's."""
    from hpcompat_torch.group import GroupTensors

    def forget(tensors: Any) -> None:
        for param in tensors.params:
            param.reduce_dtype = None

    return after(GroupTensors, "_fix_dtypes", forget)


PLANTS: dict[str, Plant] = {
    "no-post-divide": no_post_divide,
    "lost-last-rank": lost_last_rank,
    "kept-accumulation": kept_accumulation,
    "dropped-microbatch": dropped_microbatch,
    "wrong-all-reduce-group": wrong_all_reduce_group,
    "no-all-reduce": no_all_reduce,
    "one-ulp": one_ulp,
    "uncast-reduction": uncast_reduction,
    "wrong-prefetch": wrong_prefetch,
    "no-gather-for-backward": no_gather_for_backward,
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Activate the bug of that name, or none."""
    with nullcontext() if name is None else PLANTS[name]():
        yield
