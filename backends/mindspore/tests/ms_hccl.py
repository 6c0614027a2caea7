"""What the ranks run to check the code for Ascend, over a stand-in for hccl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore

from hccl_stand_in import StandIn
from hpcompat import MixedPrecisionPolicy, Shard
from hpcompat_mindspore import hccl, job
from hpcompat_mindspore.mesh import init_device_mesh
from hpcompat_mindspore.param import param_of
from ms_models import Net, initialize, named
from ms_truth import assert_close, follow, full_gradients, num_ranks, train, true_gradients, wrap


@contextmanager
def ascend() -> Iterator[StandIn]:
    """Meshes and groups as on Ascend."""
    stand_in = StandIn()
    kept = job._world, job._members, hccl.distributed
    hccl.distributed = stand_in
    job._world, job._members = hccl.join(), {}
    try:
        yield stand_in
    finally:
        job._world, job._members, hccl.distributed = kept


def training(*, shape: tuple[int, ...], hidden: int = 10, **options: Any) -> None:
    with ascend() as stand_in:
        mesh = init_device_mesh("Ascend", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = wrap(initialize(Net(hidden=hidden)), mesh=mesh, **options)
        follow(model, initialize(Net(hidden=hidden)))
        assert {name for name, _ in stand_in.calls} == {"all_gather", "reduce_scatter"} | (
            {"all_reduce"} if len(shape) > 1 else set()
        )


def shard_dim_1() -> None:
    with ascend():
        mesh = init_device_mesh("Ascend", (num_ranks(),))

        def place(parameter: Any) -> Shard | None:
            return Shard(1) if parameter.ndim > 1 else None

        follow(wrap(initialize(Net()), mesh=mesh, shard_placement_fn=place), initialize(Net()))


def accumulation_and_slices() -> None:
    with ascend():
        mesh = init_device_mesh("Ascend", (2, num_ranks() // 2), mesh_dim_names=("replicate", "shard"))
        model = wrap(initialize(Net()), mesh=mesh)
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            train(model, step=step)
        assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1, 2)))
        model.zero_grad()
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            train(model, step=step)
        assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1)))


def mixed_precision() -> None:
    with ascend():
        mesh = init_device_mesh("Ascend", (num_ranks(),))
        policy = MixedPrecisionPolicy(param_dtype=mindspore.float16, reduce_dtype=mindspore.float32)
        model = wrap(initialize(Net()), mesh=mesh, mp_policy=policy)
        train(model)
        assert_close(full_gradients(model), true_gradients(initialize(Net())), tolerance=2e-2)
        assert all(parameter.dtype == mindspore.float32 for parameter in named(model).values())
        assert all(parameter.shape == param_of(parameter).shard_shape for parameter in named(model).values())
