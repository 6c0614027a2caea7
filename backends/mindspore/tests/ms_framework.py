"""`hpcompat_conformance.framework.Framework` for MindSpore on the CPU, and hpcompat on it as an implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hpcompat
from hpcompat_conformance.framework import Array, Collective, Optimizer
from hpcompat_conformance.impl import Implementation, api_capabilities
from hpcompat_conformance.recipes import Recipe
from hpcompat_mindspore import autograd, collectives
from hpcompat_mindspore.mesh import DeviceMesh, init_device_mesh
from hpcompat_mindspore.param import Shown, full_tensor, param_of
from ms_recipes import build, dtype_name


@dataclass(frozen=True)
class Gradient:
    """A gradient and the parameter it belongs to: a shard's tensor does not know where it lies in the whole."""

    parameter: Parameter
    tensor: Tensor


class MindSporeFramework:
    """Sharded parameters are plain ones that show the shard."""

    name = "mindspore"
    capabilities = frozenset({"bfloat16", "float16"})

    def versions(self) -> Mapping[str, str]:
        return {"mindspore": mindspore.__version__, "numpy": np.__version__}

    def dtype(self, name: str) -> Any:
        return getattr(mindspore, name)

    def dtype_of(self, tensor: Tensor | Gradient) -> str:
        return dtype_name(tensor.tensor.dtype if isinstance(tensor, Gradient) else tensor.dtype)

    def tensor(self, array: Array, *, dtype: str | None = None, requires_grad: bool = False) -> Tensor:
        tensor = Tensor(array.copy())
        if dtype is not None:
            tensor = tensor.astype(self.dtype(dtype))
        return tensor.requires_grad_() if requires_grad else tensor

    def array(self, tensor: Tensor) -> Array:
        values = tensor.asnumpy()
        return values.astype(np.float32) if tensor.dtype == mindspore.bfloat16 else values.copy()

    def mesh(self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None) -> DeviceMesh:
        return init_device_mesh("CPU", shape, mesh_dim_names=axis_names)

    def shard(self, dim: int) -> hpcompat.Shard:
        return hpcompat.Shard(dim)

    def model(self, recipe: Recipe, *, seed: int) -> nn.Cell:
        return build(recipe, seed=seed)

    def child(self, module: nn.Cell, path: str) -> nn.Cell:
        return module.get_sub_cell(path) if path else module

    def set_requires_grad(self, module: nn.Cell, value: bool) -> None:
        for parameter in module.get_parameters():
            parameter.requires_grad = value

    def parameters(self, module: nn.Cell) -> Mapping[str, Parameter]:
        return dict(module.parameters_and_names())

    def state_dict(self, module: nn.Cell) -> Mapping[str, Any]:
        return module.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, module: nn.Cell, values: Mapping[str, Array]) -> None:
        module.load_state_dict({name: Tensor(value.copy()) for name, value in values.items()})

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        param = param_of(parameter)
        return tuple(parameter.shape) if param is None else param.layout.shape

    def is_sharded(self, parameter: Parameter | Gradient) -> bool:
        is_gradient = isinstance(parameter, Gradient)
        param = param_of(parameter.parameter if is_gradient else parameter)
        if param is None or param.mesh_info.shard_mesh_dim is None:
            return False
        return tuple(parameter.tensor.shape) == param.shard_shape if is_gradient else param.shown is not Shown.WHOLE

    def local(self, parameter: Parameter | Gradient) -> Array:
        if isinstance(parameter, Gradient):
            return self.array(parameter.tensor)
        if not self.is_sharded(parameter):
            raise TypeError("expected a sharded parameter, but got one that shows all of its data")
        return self.array(parameter)

    def full(self, parameter: Parameter | Gradient) -> Array:
        if isinstance(parameter, Gradient):
            return self.array(full_tensor(parameter.parameter, parameter.tensor))
        return self.array(full_tensor(parameter))

    def gradient(self, parameter: Parameter) -> Gradient | None:
        found = parameter._grad if param_of(parameter) is None else parameter.grad
        return None if found is None else Gradient(parameter, found)

    def loss(self, output: Tensor) -> Tensor:
        wide = output.astype(mindspore.float32)
        return (wide * wide).sum() * 0.5

    def backward(self, loss: Tensor) -> None:
        autograd.backward(loss)

    def no_grad(self) -> AbstractContextManager[Any]:
        return autograd.no_grad()

    def zero_grad(self, module: nn.Cell) -> None:
        for _, parameter in module.parameters_and_names():
            _clear(parameter)
        if isinstance(module, hpcompat.HSDPModule):
            module.zero_grad()

    def optimizer(self, module: nn.Cell, *, kind: str, lr: float) -> Optimizer:
        parameters = [parameter for _, parameter in module.parameters_and_names()]
        return Sgd(parameters, lr) if kind == "sgd" else AdamW(parameters, lr)

    @contextmanager
    def collectives(self) -> Iterator[list[Collective]]:
        log: list[Collective] = []

        def record(kind: str, function: Any) -> Any:
            def recording(*buffers: Any, group: Any, **options: Any) -> Any:
                num_elements = max(buffer.size for buffer in buffers)
                log.append(Collective(kind, group.ranks, num_elements, str(buffers[0].dtype)))
                return function(*buffers, group=group, **options)

            return recording

        kept = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}
        for name, function in kept.items():
            setattr(collectives, name, record(name, function))
        try:
            yield log
        finally:
            for name, function in kept.items():
                setattr(collectives, name, function)


def _clear(parameter: Parameter) -> None:
    parameter._grad = None
    if param_of(parameter) is not None:
        parameter.grad = None


class Sgd:
    """Plain gradient descent in float32 operations."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        self._parameters, self._lr = parameters, lr

    def step(self) -> None:
        with autograd.no_grad():
            for index, parameter in enumerate(self._parameters):
                grad = parameter._grad if param_of(parameter) is None else parameter.grad
                if grad is not None:
                    self._update(index, parameter, grad)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            _clear(parameter)

    def _update(self, index: int, parameter: Parameter, grad: Tensor) -> None:
        parameter.copy_(parameter - self._lr * grad)


class AdamW(Sgd):
    """torch's defaults: betas 0.9 and 0.999, eps 1e-8, weight decay 0.01."""

    def __init__(self, parameters: Sequence[Parameter], lr: float) -> None:
        super().__init__(parameters, lr)
        self._states: dict[int, tuple[int, Tensor, Tensor]] = {}

    def _update(self, index: int, parameter: Parameter, grad: Tensor) -> None:
        number, first, second = self._states.get(index, (0, grad * 0.0, grad * 0.0))
        number, first, second = number + 1, first * 0.9 + grad * 0.1, second * 0.999 + grad * grad * 0.001
        self._states[index] = number, first, second
        decayed = parameter * (1 - self._lr * 0.01)
        scaled = second / (1 - 0.999**number)
        parameter.copy_(decayed - self._lr / (1 - 0.9**number) * first / (ops.sqrt(scaled) + 1e-8))


def load() -> Implementation:
    """Runs in a worker."""
    framework = MindSporeFramework()
    versions = {"hpcompat": version("hpcompat"), **framework.versions()}
    return Implementation(hpcompat, framework, api_capabilities(hpcompat) | framework.capabilities, versions)
