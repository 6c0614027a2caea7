"""Rank side: parameters that hyper-parallel's public `fully_shard` has sharded, and native FSDP2's."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from hpcompat.optim import optimizer_step
from optimizers.cases import local, random_gradient
from parity.bits import bits
from parity.worlds import implementation, named_mesh

WIDTH = 64


def model(dtype: torch.dtype) -> nn.Module:
    """Rows that divide evenly, which hyper-parallel asks for."""
    torch.manual_seed(42)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)).to(dtype)


def hyper_parallel_model(dtype: torch.dtype) -> nn.Module:
    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")
    from hyper_parallel import init_device_mesh
    from hyper_parallel.core.fully_shard.api import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model(dtype), mesh=mesh, reshard_after_forward=False)


def steps_equal_natives(*, dtype: torch.dtype, options: dict[str, Any]) -> int:
    """Ten AdamW steps with the same gradients; how many elements were compared on this rank."""
    theirs = implementation("native").fully_shard(model(dtype), mesh=named_mesh((dist.get_world_size(),), ("fsdp",)))
    ours = hyper_parallel_model(dtype)
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    mine, native = (optim.AdamW([pair[side] for pair in pairs], **options) for side in (0, 1))
    for step in range(10):
        for number, (parameter, other) in enumerate(pairs):
            assert "hyper_parallel" in type(parameter).__module__
            grad = random_gradient(other, seed=100 * step + number)
            parameter.grad = type(parameter).from_local(grad.clone(), parameter.device_mesh, parameter.placements)
            other.grad = sharded_like(grad, other)
        optimizer_step(mine)
        native.step()
    count = 0
    for parameter, other in pairs:
        found = {"parameter": parameter, **mine.state[parameter]}
        wanted = {"parameter": other, **native.state[other]}
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            held = getattr(found[key], "_local_tensor", found[key]).detach()
            assert torch.equal(bits(held), bits(local(value))), key
            count += held.numel()
    return count


def sharded_like(grad: torch.Tensor, parameter: Any) -> Any:
    return DTensor.from_local(grad, parameter.device_mesh, parameter.placements, run_check=False)
