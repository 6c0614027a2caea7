"""`hpcompat_conformance.framework.Framework` for torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hpcompat_conformance.framework import Array, Collective, Optimizer
from hpcompat_conformance.on_torch import collectives, models, transports
from hpcompat_conformance.on_torch.names import dtype_name, dtype_named
from hpcompat_conformance.recipes import Recipe


class TorchFramework:
    """Distributed parameters are DTensors."""

    name = "torch"
    capabilities = frozenset({"bfloat16", "float16", "meta device", "a transport that adds up"})

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "numpy": np.__version__}

    def dtype(self, name: str) -> torch.dtype:
        return dtype_named(name)

    def dtype_of(self, tensor: torch.Tensor) -> str:
        return dtype_name(tensor.dtype)

    def tensor(self, array: Array, *, dtype: str | None = None, requires_grad: bool = False) -> torch.Tensor:
        tensor = torch.from_numpy(array.copy())
        if dtype is not None:
            tensor = tensor.to(dtype_named(dtype))
        return tensor.requires_grad_(requires_grad)

    def array(self, tensor: torch.Tensor) -> Array:
        if isinstance(tensor, DTensor):
            raise TypeError("expected a plain tensor, but got a DTensor: use local() or full()")
        # A copy first: a storage that numpy has seen can no longer be resized, so its unit could not free it.
        tensor = tensor.detach().clone()
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def mesh(self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None) -> DeviceMesh:
        return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(axis_names) if axis_names else None)

    def mesh_that_adds_up(
        self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None
    ) -> AbstractContextManager[DeviceMesh]:
        return transports.mesh_that_adds_up(shape, axis_names=axis_names)

    def shard(self, dim: int) -> Shard:
        return Shard(dim)

    def model(self, recipe: Recipe, *, seed: int) -> nn.Module:
        return models.build(recipe, seed=seed)

    def meta_model(self, recipe: Recipe) -> nn.Module:
        with torch.device("meta"):
            return models.make(recipe)

    def materialize(self, module: nn.Module) -> None:
        module.to_empty(device="cpu")

    def child(self, module: nn.Module, path: str) -> nn.Module:
        return module.get_submodule(path)

    def set_requires_grad(self, module: nn.Module, value: bool) -> None:
        module.requires_grad_(value)

    def cast(self, module: nn.Module, dtype: str) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype_named(dtype))

    def set_value(self, parameter: nn.Parameter, full: Array) -> None:
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(full.copy()))

    def buffers(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        return dict(module.named_buffers())

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        return dict(module.named_parameters())

    def state_dict(self, module: nn.Module) -> Mapping[str, Any]:
        return module.state_dict()

    def load_state_dict(self, module: nn.Module, values: Mapping[str, Array]) -> None:
        state = {}
        for name, value in module.state_dict().items():
            full = torch.from_numpy(values[name])
            state[name] = distribute_tensor(full, value.device_mesh, value.placements)
        module.load_state_dict(state)

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape)

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)

    def local(self, parameter: torch.Tensor) -> Array:
        if not isinstance(parameter, DTensor):
            raise TypeError("expected a distributed parameter, but got a plain tensor: it is not sharded")
        return self.array(parameter.to_local())

    def full(self, parameter: torch.Tensor) -> Array:
        detached = parameter.detach()
        return self.array(detached.full_tensor() if isinstance(detached, DTensor) else detached)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def set_gradient(self, parameter: nn.Parameter, full: Array) -> None:
        parameter.grad = _like(parameter, full, dtype=parameter.dtype)

    def number(self, scalar: torch.Tensor) -> float:
        return float(scalar.full_tensor() if isinstance(scalar, DTensor) else scalar)

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        return output.float().square().sum() * 0.5

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        torch.autograd.backward(loss, gradient)

    def no_grad(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def zero_grad(self, module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)

    def optimizer(
        self, module: nn.Module, *, kind: str, lr: float, multi_tensor: bool = False, **options: Any
    ) -> Optimizer:
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        foreach = True if multi_tensor else None
        optimizer: Optimizer = kinds[kind](module.parameters(), lr=lr, foreach=foreach, **options)
        return optimizer

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
        return optimizer.state.get(parameter, {})

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Array]]) -> None:
        content = optimizer.state_dict()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, (parameter, state) in enumerate(zip(parameters, values, strict=True)):
            content["state"][index] = {
                name: _like(parameter, value) if value.ndim else torch.tensor(float(value))
                for name, value in state.items()
            }
        optimizer.load_state_dict(content)

    def collectives(self) -> AbstractContextManager[list[Collective]]:
        return collectives.record()

    def on_forward(
        self, module: nn.Module, *, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        if before is not None:
            module.register_forward_pre_hook(lambda module, args: before())
        if after is not None:
            module.register_forward_hook(lambda module, args, output: after(output))

    def on_gradient(self, tensor: torch.Tensor, function: Callable[[Any], None]) -> None:
        tensor.register_hook(function)

    def empty(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *, group: Any, async_op: bool) -> Any:
        return collectives.all_gather(output, input, group=group, async_op=async_op)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, *, group: Any, op: Any, async_op: bool) -> Any:
        return collectives.reduce_scatter(output, input, group=group, op=op, async_op=async_op)

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group))

    def shares_memory(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        tensor.mul_(factor)


def _like(parameter: torch.Tensor, full: Array, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A global value in the form of a parameter."""
    whole = torch.from_numpy(full.copy()).to(dtype)
    if not isinstance(parameter, DTensor):
        return whole
    # Without a source rank each rank cuts its part out of its own copy.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
