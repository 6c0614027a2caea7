"""The torch side of :mod:`schedules`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo")
RANK, NUM_RANKS = dist.get_rank(), dist.get_world_size()
Linear, ModuleList = nn.Linear, nn.ModuleList
relu, no_grad, tensor = torch.relu, torch.no_grad, torch.tensor


class Module(nn.Module):
    def forward(self, *args: Any) -> Any:
        return self.run(*args)


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def named(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters())


def fill(parameter: nn.Parameter, values: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values))


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def number(value: torch.Tensor) -> float:
    return value.item()


def full_gradient(parameter: Any) -> Any:
    return parameter.grad.full_tensor().numpy()


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """The collectives of the backend, by kind and bytes of the larger buffer."""
    calls: list[tuple[str, int]] = []

    def record(kind: str, function: Any) -> Any:
        @functools.wraps(function)
        def recording(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            calls.append((kind, max(value.nbytes for value in tensors)))
            return function(*args, **kwargs)

        return recording

    names = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter", "all_reduce": "all_reduce"}
    names |= {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    kept = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, function in kept.items():
        setattr(dist, name, record(names[name], function))
    yield calls
    for name, function in kept.items():
        setattr(dist, name, function)
