"""`hpcompat_conformance.framework.Framework` for MindSpore on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

import hpcompat
from hpcompat_conformance.framework import Array, Collective, Optimizer
from hpcompat_conformance.on_mindspore import collectives, models
from hpcompat_conformance.on_mindspore.names import dtype_name, dtype_named
from hpcompat_conformance.recipes import Recipe
from hpcompat_mindspore import autograd, optim
from hpcompat_mindspore.collectives import ProcessGroupAllGather, ProcessGroupReduceScatter
from hpcompat_mindspore.mesh import DeviceMesh, init_device_mesh
from hpcompat_mindspore.optimizer import gradient_of
from hpcompat_mindspore.param import Shown, full_tensor, param_of


@dataclass(frozen=True)
class Part:
    """A gradient or an optimizer state, and the parameter it belongs to: a shard's tensor does not know where it lies
    in the whole."""

    parameter: Parameter
    tensor: Tensor


class MindSporeFramework:
    """Sharded parameters are plain ones that show the shard."""

    name = "mindspore"
    capabilities = frozenset({"bfloat16", "float16", "meta device", "a transport that adds up"})

    def versions(self) -> Mapping[str, str]:
        return {"mindspore": mindspore.__version__, "numpy": np.__version__}

    def dtype(self, name: str) -> Any:
        return dtype_named(name)

    def dtype_of(self, tensor: Tensor | Part) -> str:
        return dtype_name(tensor.tensor.dtype if isinstance(tensor, Part) else tensor.dtype)

    def tensor(self, array: Array, *, dtype: str | None = None, requires_grad: bool = False) -> Tensor:
        tensor = Tensor(array.copy())
        if dtype is not None:
            tensor = tensor.astype(dtype_named(dtype))
        if requires_grad:
            tensor.requires_grad_()
        return tensor

    def array(self, tensor: Tensor) -> Array:
        values = tensor.asnumpy()
        return values.astype(np.float32) if tensor.dtype == mindspore.bfloat16 else values.copy()

    def mesh(self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None) -> DeviceMesh:
        return init_device_mesh("CPU", shape, mesh_dim_names=axis_names)

    @contextmanager
    def mesh_that_adds_up(
        self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None
    ) -> Iterator[DeviceMesh]:
        with collectives.adding_up():
            yield self.mesh(shape, axis_names=axis_names)

    def shard(self, dim: int) -> hpcompat.Shard:
        return hpcompat.Shard(dim)

    def model(self, recipe: Recipe, *, seed: int) -> nn.Cell:
        return models.build(recipe, seed=seed)

    def meta_model(self, recipe: Recipe) -> nn.Cell:
        with mindspore.DeviceCtx("meta"):
            return models.make(recipe)

    def materialize(self, module: nn.Cell) -> None:
        module.to_empty(device="CPU")

    def child(self, module: nn.Cell, path: str) -> nn.Cell:
        return module.get_sub_cell(path) if path else module

    def set_requires_grad(self, module: nn.Cell, value: bool) -> None:
        for parameter in module.get_parameters():
            parameter.requires_grad = value

    def cast(self, module: nn.Cell, dtype: str) -> None:
        for parameter in module.get_parameters():
            parameter.set_dtype(dtype_named(dtype))

    def set_value(self, parameter: Parameter, full: Array) -> None:
        parameter.set_data(Tensor(full.copy()).astype(parameter.dtype))

    def buffers(self, module: nn.Cell) -> Mapping[str, Tensor]:
        return dict(module.named_buffers())

    def parameters(self, module: nn.Cell) -> Mapping[str, Parameter]:
        return dict(module.parameters_and_names())

    def state_dict(self, module: nn.Cell) -> Mapping[str, Any]:
        parameters = self.parameters(module)
        # Inside of a forward the parameters show the whole, and the shards are there as tensors.
        return {
            name: value if isinstance(value, Parameter) or name not in parameters else Part(parameters[name], value)
            for name, value in module.state_dict().items()
        }

    def load_state_dict(self, module: nn.Cell, values: Mapping[str, Array]) -> None:
        module.load_state_dict({name: Tensor(value.copy()) for name, value in values.items()})

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        param = param_of(parameter)
        return tuple(parameter.shape) if param is None else param.layout.shape

    def is_sharded(self, parameter: Parameter | Part) -> bool:
        is_part = isinstance(parameter, Part)
        param = param_of(parameter.parameter if is_part else parameter)
        if param is None or param.mesh_info.shard_mesh_dim is None:
            return False
        return tuple(parameter.tensor.shape) == param.shard_shape if is_part else param.shown is not Shown.WHOLE

    def local(self, parameter: Parameter | Part) -> Array:
        if isinstance(parameter, Part):
            return self.array(parameter.tensor)
        param = param_of(parameter)
        if param is None or param.shown is Shown.WHOLE:
            raise TypeError("expected a sharded or replicated parameter, but got one that was gathered, or a plain one")
        return self.array(parameter)

    def full(self, parameter: Parameter | Part) -> Array:
        if isinstance(parameter, Part):
            return self.array(full_tensor(parameter.parameter, parameter.tensor))
        return self.array(full_tensor(parameter))

    def gradient(self, parameter: Parameter) -> Part | None:
        found = gradient_of(parameter)
        return None if found is None else Part(parameter, found)

    def set_gradient(self, parameter: Parameter, full: Array) -> None:
        param = param_of(parameter)
        value = full if param is None else np.ascontiguousarray(param.cut(full))
        autograd.set_gradient(parameter, Tensor(value.copy()).astype(parameter.dtype))

    def number(self, scalar: Tensor) -> float:
        return float(scalar.asnumpy())

    def loss(self, output: Tensor) -> Tensor:
        wide = output.astype(mindspore.float32)
        return (wide * wide).sum() * 0.5

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        autograd.backward(loss, gradient)

    def no_grad(self) -> AbstractContextManager[Any]:
        return autograd.no_grad()

    def zero_grad(self, module: nn.Cell) -> None:
        optim.zero_grad(module)

    def optimizer(
        self, module: nn.Cell, *, kind: str, lr: float, multi_tensor: bool = False, **options: Any
    ) -> Optimizer:
        # These always do as the kernels for many tensors do.
        kinds = {"sgd": optim.SGD, "adamw": optim.AdamW}
        optimizer: Optimizer = kinds[kind](module.get_parameters(), lr=lr, **options)
        return optimizer

    def optimizer_state(self, optimizer: Any, parameter: Parameter) -> Mapping[str, Any]:
        state = optim.optimizer_state(optimizer, parameter)
        return {name: Part(parameter, value) if value.shape else value for name, value in state.items()}

    def load_optimizer_state(self, optimizer: Any, values: Sequence[Mapping[str, Array]]) -> None:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(values))})

    def collectives(self) -> AbstractContextManager[list[Collective]]:
        return collectives.record()

    def on_forward(
        self, module: nn.Cell, *, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        if before is not None:
            module.register_forward_pre_hook(lambda cell, args: before())
        if after is not None:
            module.register_forward_hook(lambda cell, args, output: after(output))

    def on_gradient(self, tensor: Tensor, function: Callable[[Any], None]) -> None:
        tensor.register_hook(function)

    def empty(self, size: Sequence[int], *, dtype: Any, device: str) -> Tensor:
        return ProcessGroupAllGather().allocate(size, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, input: Tensor, *, group: Any, async_op: bool) -> Any:
        return ProcessGroupAllGather()(output, input, group, async_op)

    def reduce_scatter(self, output: Tensor, input: Tensor, *, group: Any, op: Any, async_op: bool) -> Any:
        return ProcessGroupReduceScatter()(output, input, group, op, async_op)

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        return tuple(group.ranks)

    def shares_memory(self, left: Tensor, right: Tensor) -> bool:
        return np.shares_memory(left.asnumpy(), right.asnumpy())

    def scale(self, tensor: Tensor, factor: float) -> None:
        tensor.copy_(tensor * factor)
