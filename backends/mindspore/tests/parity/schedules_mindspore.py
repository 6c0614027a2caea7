"""The MindSpore side of :mod:`schedules`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn, ops

from hpcompat_mindspore import autograd, collectives
from hpcompat_mindspore.job import world
from hpcompat_mindspore.mesh import init_device_mesh
from hpcompat_mindspore.param import full_tensor

mindspore.set_device("CPU")
autograd.start_recording()
RANK, NUM_RANKS = world().rank(), world().size()
Linear, ModuleList = nn.Dense, nn.CellList
relu, no_grad, tensor, backward = ops.relu, autograd.no_grad, Tensor, autograd.backward


class Module(nn.Cell):
    def construct(self, *args: Any) -> Any:
        return self.run(*args)


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return init_device_mesh("CPU", shape, mesh_dim_names=names)


def named(module: nn.Cell) -> dict[str, Parameter]:
    return dict(module.parameters_and_names())


def fill(parameter: Parameter, values: Any) -> None:
    parameter.set_data(Tensor(values))


def number(value: Tensor) -> float:
    return float(value.asnumpy())


def full_gradient(parameter: Parameter) -> Any:
    return full_tensor(parameter, parameter.grad).asnumpy()


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """The collectives of the backend, by kind and bytes of the larger buffer."""
    calls: list[tuple[str, int]] = []

    def record(kind: str, function: Any) -> Any:
        def recording(*buffers: Any, **options: Any) -> Any:
            calls.append((kind, max(buffer.nbytes for buffer in buffers)))
            return function(*buffers, **options)

        return recording

    kept = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    for name, function in kept.items():
        setattr(collectives, name, record(name, function))
    yield calls
    for name, function in kept.items():
        setattr(collectives, name, function)
