"""A mixture of experts on 2 by 2 ranks, as jobs for a pool of either framework; each rank checks.

Every block has a dense layer, sharded over all ranks, and experts. Rank ``r`` holds the experts of its place on axis
``ep`` and routes its batch to those, so their gradients come from the ranks at the same place, over which they are
sharded: a mesh per parameter, two param groups in a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hpcompat
from hpcompat import recipes

EP_DEGREE = 2
NUM_LOCAL_EXPERTS = 2
WIDTH = 6
NUM_BLOCKS = 3
NUM_STEPS = 3
LR = 0.5

Arrays = dict[str, Any]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "by experts": ("experts:train", {}),
    "by columns": ("experts:train", {"shard_degree": 4}),
    "shapes by experts": ("experts:shapes", {"shard_degree": 2, "expected": (1, WIDTH, WIDTH)}),
    "shapes by columns": ("experts:shapes", {"shard_degree": 4, "expected": (2, WIDTH // 2, WIDTH)}),
    "order": ("experts:order", {}),
}


def values(seed: int, *shape: int) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) / WIDTH**0.5).astype(np.float32)


def initial(place: int) -> Arrays:
    """Every parameter of the model that the ranks at ``place`` of axis ``ep`` hold."""
    made: Arrays = {}
    for block in range(NUM_BLOCKS):
        made[f"blocks.{block}.dense"] = values(block, WIDTH, WIDTH)
        made[f"blocks.{block}.experts"] = values(100 + 10 * block + place, NUM_LOCAL_EXPERTS, WIDTH, WIDTH)
    return made


def batch(rank: int, step: int) -> Any:
    return values(1000 + 10 * step + rank, 5, WIDTH)


def sharded(make: Callable[[Arrays], Any], *, shard_degree: int) -> Any:
    """The model of this rank, a unit per block. Experts' gradients are divided by the number of all ranks."""
    mesh = hpcompat.init_device_mesh(None, (2, EP_DEGREE), mesh_dim_names=("efsdp", "ep"))
    everyone = hpcompat.init_device_mesh(None, (4,), mesh_dim_names=("dp",))
    model = make(initial(mesh.get_local_rank("ep")))
    info = hpcompat.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    dim = recipes.expert_shard_dim(NUM_LOCAL_EXPERTS * EP_DEGREE, ep_degree=EP_DEGREE, shard_degree=shard_degree)

    def place(parameter: Any) -> Any:
        is_expert = len(parameter.shape) == 3
        return hpcompat.ShardPlacementResult(hpcompat.Shard(dim), info) if is_expert else None

    for block in model.blocks:
        hpcompat.fully_shard(block, mesh=everyone, shard_placement_fn=place)
        block.set_gradient_divide_factor(4.0)
    return hpcompat.fully_shard(model, mesh=everyone)


def truth(make: Callable[[Arrays], Any], parameters: dict[int, Arrays], step: int) -> dict[int, Arrays]:
    """By place on axis ``ep``: gradients of the models in one process, over the batches of all ranks."""
    totals: dict[int, Arrays] = {place: {} for place in range(EP_DEGREE)}
    for rank in range(4):
        model = make(parameters[rank % EP_DEGREE])
        hpcompat.backward(loss_of(model, rank, step))
        for name, parameter in hpcompat.named_parameters(model):
            grad = hpcompat.to_numpy(_grad_of(parameter)).astype(np.float64) / 4
            for place, total in totals.items():
                if "dense" in name or place == rank % EP_DEGREE:
                    total[name] = total.get(name, 0) + grad
    return totals


def _grad_of(parameter: Any) -> Any:
    # MindSpore keeps the gradient of a parameter that no unit manages elsewhere.
    return parameter.grad if getattr(parameter, "grad", None) is not None else parameter._grad


def loss_of(model: Any, rank: int, step: int) -> Any:
    return (model(hpcompat.from_numpy(batch(rank, step))) ** 2).mean()


def train(*, make: Callable[[Arrays], Any], shard_degree: int = 2) -> None:
    """Gradients of every step equal those of one process, within what the order of additions changes in float32."""
    rank = hpcompat.get_rank()
    model = sharded(make, shard_degree=shard_degree)
    expected = {place: initial(place) for place in range(EP_DEGREE)}
    named = dict(hpcompat.named_parameters(model))
    optimizer = hpcompat.optim.SGD(list(named.values()), lr=LR)
    for step in range(NUM_STEPS):
        hpcompat.zero_grad(model)
        hpcompat.backward(loss_of(model, rank, step))
        gradients = truth(make, expected, step)
        for name, parameter in named.items():
            found = hpcompat.to_numpy(hpcompat.full_tensor(parameter, parameter.grad))
            wanted = gradients[rank % EP_DEGREE][name]
            worst = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert worst < 1e-5, f"step {step}: {name} is off by {worst:.3g} of its largest element"
        hpcompat.optimizer_step(optimizer)
        for place, grads in gradients.items():
            for name, grad in grads.items():
                expected[place][name] = (expected[place][name] - LR * grad).astype(np.float32)


def shapes(*, make: Callable[[Arrays], Any], shard_degree: int, expected: tuple[int, ...]) -> None:
    """How the experts are sharded: by rows as long as every rank gets an expert, else by columns."""
    model = sharded(make, shard_degree=shard_degree)
    named = dict(hpcompat.named_parameters(model))
    assert hpcompat.to_numpy(named["blocks.0.experts"]).shape == expected
    dense = hpcompat.to_numpy(named["blocks.0.dense"]).size
    assert hpcompat.all_reduce_scalar(dense) == WIDTH * WIDTH, "sharded over all four, one of which holds nothing"


def order(*, make: Callable[[Arrays], Any]) -> None:
    """In backward, the last group of a unit prefetches all groups of the unit before (PLC-07)."""
    model = sharded(make, shard_degree=2)
    hpcompat.backward(loss_of(model, hpcompat.get_rank(), 0))
    with hpcompat.record_events() as events:
        hpcompat.backward(loss_of(model, hpcompat.get_rank(), 0))
    prefetched = [event.unit for event in events if event.name == "prefetch"]
    assert prefetched == ["blocks.1"] * 2 + ["blocks.0"] * 2
