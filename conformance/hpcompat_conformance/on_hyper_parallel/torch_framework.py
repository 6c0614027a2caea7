"""hyper-parallel on torch: torch's models, tensors and collectives; meshes, placements and DTensors of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import hyper_parallel
import torch
from hyper_parallel.core.dtensor import distribute_tensor
from hyper_parallel.core.placement_types import Shard
from torch import nn

from hpcompat_conformance.framework import Array, Optimizer
from hpcompat_conformance.on_torch.framework import TorchFramework


class HyperParallelTorchFramework(TorchFramework):
    """Distributed parameters are hyper-parallel's DTensors, which are not torch's."""

    # Its meshes take no groups that others made.
    capabilities = TorchFramework.capabilities - {"a transport that adds up"}

    def array(self, tensor: torch.Tensor) -> Array:
        if isinstance(tensor, hyper_parallel.DTensor):
            raise TypeError("expected a plain tensor, but got a DTensor: use local() or full()")
        return super().array(tensor)

    def mesh(self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None) -> Any:
        return hyper_parallel.init_device_mesh("cpu", tuple(shape), mesh_dim_names=axis_names and tuple(axis_names))

    def shard(self, dim: int) -> Any:
        return Shard(dim)

    def load_state_dict(self, module: nn.Module, values: Mapping[str, Array]) -> None:
        module.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in values.items()})

    def is_sharded(self, parameter: Any) -> bool:
        if not isinstance(parameter, hyper_parallel.DTensor):
            return False
        return any(placement.is_shard() for placement in parameter.placements)

    def local(self, parameter: Any) -> Array:
        if not isinstance(parameter, hyper_parallel.DTensor):
            raise TypeError("expected a distributed parameter, but got a plain tensor: it is not sharded")
        return self.array(parameter.to_local())

    def full(self, parameter: Any) -> Array:
        if not isinstance(parameter, hyper_parallel.DTensor):
            return self.array(parameter)
        return self.array(parameter.detach().full_tensor())

    def set_gradient(self, parameter: Any, full: Array) -> None:
        parameter.grad = _like(parameter, torch.from_numpy(full.copy()).to(parameter.dtype))

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        super().backward(loss, gradient)
        hyper_parallel.hsdp_sync_stream()

    def optimizer(self, module: nn.Module, *, kind: str, lr: float, **options: Any) -> Optimizer:
        """Steps as its own tests do: on local tensors, without dispatch of its DTensors."""
        optimizer: Any = super().optimizer(module, kind=kind, lr=lr, **options)
        optimizer.step = on_local_tensors(optimizer.step)
        return optimizer  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: Any) -> Mapping[str, Any]:
        state = super().optimizer_state(optimizer, parameter)
        if not isinstance(parameter, hyper_parallel.DTensor):
            return state
        # Made on local tensors, so they do not know where they lie in the whole.
        mesh, placements = parameter.device_mesh, parameter.placements
        return {
            name: hyper_parallel.DTensor.from_local(value, mesh, placements) if value.ndim else value
            for name, value in state.items()
        }

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Array]]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter, state in zip(parameters, values, strict=True):
            for name, value in state.items():
                whole = torch.from_numpy(value.copy())
                part = _like(parameter, whole.to(parameter.dtype)) if value.ndim else whole.float()
                optimizer.state[parameter][name] = getattr(part, "_local_tensor", part)


def on_local_tensors(function: Any) -> Any:
    """The function with dispatch of hyper-parallel's DTensors off."""

    @functools.wraps(function)
    def without_dispatch(*args: Any, **kwargs: Any) -> Any:
        with hyper_parallel.SkipDTensorDispatch():
            return function(*args, **kwargs)

    return without_dispatch


def _like(parameter: Any, whole: torch.Tensor) -> Any:
    """A global value in the form of a parameter."""
    if not isinstance(parameter, hyper_parallel.DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
