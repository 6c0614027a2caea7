"""Models, batches and the truth: an unsharded run over the batches of all ranks.

[Note: exact] Parameters and batches are small integers, so that every gradient is exact whatever the order of its sums,
and the average over 1, 2 or 4 ranks too. Where training goes on for several steps, runs on the same ranks are compared.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hpcompat import fully_shard

WIDTH = 4
Loss = Callable[[Any, Tensor], Tensor]


def integers(shape: Iterable[int], *, seed: int, low: int = -2, high: int = 2) -> Tensor:
    """Small integers in float32. [Note: exact]"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, tuple(shape), generator=generator).float()


@torch.no_grad()
def fill(module: nn.Module) -> nn.Module:
    """Set every parameter to integers that depend on its name."""
    for name, parameter in module.named_parameters():
        parameter.copy_(integers(parameter.shape, seed=zlib.crc32(name.encode()), low=-1, high=1))
    return module


def mlp() -> nn.Sequential:
    """Layers of 7, 5, 3 and 1 rows: uneven on two ranks, and the last one empty on the second."""
    rows = [WIDTH, 7, 5, 3, 1]
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(rows):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    fill(model)
    return model


@functools.cache
def all_ranks() -> DeviceMesh:
    """On the CPU, also where there is an accelerator."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(module: Any, **options: Any) -> Any:
    """`fully_shard` over all ranks unless a mesh is given."""
    return fully_shard(module, **{"mesh": all_ranks(), **options})


def wrap(model: nn.Module, **options: Any) -> Any:
    """Every linear child a unit, then the root."""
    for child in model.children():
        if isinstance(child, nn.Linear):
            shard(child, **options)
    return shard(model, **options)


def batch(*, rank: int | None = None, step: int = 0, rows: int = 3) -> Tensor:
    """The batch of ``rank`` (of this one by default) in ``step``."""
    rank = dist.get_rank() if rank is None else rank
    return integers((rows, WIDTH), seed=1000 * step + rank)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Linear in the output, with a weight per element. [Note: exact]"""
    output = model(inputs)
    return (output * torch.arange(1, output.numel() + 1, dtype=output.dtype).view_as(output)).sum()


def true_gradients(model: nn.Module, *, step: int = 0, loss: Loss | None = None) -> dict[str, Tensor]:
    """The gradients of the unsharded ``model``, averaged over the batches of all ranks."""
    world_size = dist.get_world_size()
    model.zero_grad()
    for rank in range(world_size):
        (loss or loss_of)(model, batch(rank=rank, step=step)).backward()
    gradients = {name: p.grad / world_size for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def whole(value: Tensor) -> Tensor:
    """The global tensor, detached."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The global gradient of every parameter that has one."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the global value of every parameter."""
    return {name: whole(p).clone() for name, p in model.state_dict().items()}


def assert_same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits; says which differ and by how much."""
    assert got.keys() == wanted.keys(), f"expected {sorted(wanted)}, but got {sorted(got)}"
    assert got, "expected something to compare, but got nothing"
    wrong = {
        name: f"expected {wanted[name]} in {wanted[name].dtype}, but got {got[name]} in {got[name].dtype}"
        for name in wanted
        if got[name].dtype != wanted[name].dtype or not torch.equal(got[name], wanted[name])
    }
    assert not wrong, wrong


def train(model: nn.Module, *, steps: Iterable[int], optimizer: torch.optim.Optimizer | None = None) -> None:
    """Steps of AdamW with the batches of these numbers."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step=step)).backward()
        optimizer.step()


@contextmanager
def sizes_of(collective: str) -> Iterator[list[tuple[int, torch.dtype]]]:
    """Record elements and dtype of the input of every ``"all_gather"`` or ``"reduce_scatter"`` while open."""
    names = (f"{collective}_single", f"{collective}_into_tensor", f"{collective}_tensor")
    name = next(name for name in names if hasattr(dist, name))
    original, seen = getattr(dist, name), []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        source = kwargs["input"] if "input" in kwargs else args[1]
        seen.append((source.numel(), source.dtype))
        return original(*args, **kwargs)

    setattr(dist, name, recorded)
    try:
        yield seen
    finally:
        setattr(dist, name, original)
