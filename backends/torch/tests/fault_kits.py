"""What the fault matrix needs of torch: for hpcompat, and for native FSDP2 beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import hpcompat
from fault_matrix.kit import NUM_IN, NUM_LAYERS, NUM_OUT, Callback, LayerParts, NeutralKit, Traps, unchanged


def _call(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs)


class Layer(LayerParts, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make_parts(nn.Linear)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs, relu=torch.relu)


class Net(nn.Module):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.head = nn.Linear(NUM_IN, NUM_OUT)
        self.run_layer: Callable[..., Tensor] = _call
        self.inside: Callable[[Tensor], Tensor] = unchanged

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = self.run_layer(layer, inputs)
        return self.head(self.inside(inputs))


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, callback: Callback) -> Tensor:
        ctx.callback = callback
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grad, None


class Buffers:
    """Ordinary memory for collectives."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class AllGather(Buffers):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(Buffers):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Gather(Traps, AllGather):
    """An all-gather with traps."""


class Scatter(Traps, ReduceScatter):
    """A reduce-scatter with traps."""


class Torch(NeutralKit):
    """hpcompat on torch."""

    name = "torch"
    gather, scatter = Gather, Scatter

    def mixed_policy(self) -> Any:
        return hpcompat.MixedPrecisionPolicy(torch.float16, torch.float32)

    def net(self) -> Net:
        model = Net()
        numbers = np.random.default_rng(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.tensor(numbers.normal(size=parameter.shape) * 0.3))
        return model

    def node(self, tensor: Tensor, callback: Callback) -> Tensor:
        return _Node.apply(tensor, callback)

    def on_gradient(self, module: nn.Module, attribute: str, callback: Callback) -> Callable[[Tensor], Tensor]:
        """The unsharded parameter, which gets the gradient, can only be met in forward. It stays the same object."""
        watched: list[Tensor] = []

        def inside(tensor: Tensor) -> Tensor:
            parameter = getattr(module, attribute)
            if not watched and parameter.requires_grad:
                watched.append(parameter)
                parameter.register_hook(callback)
            return tensor

        return inside

    def optimizer(self, model: nn.Module, kind: str) -> Any:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def states(self, optimizer: Any) -> list[np.ndarray[Any, Any]]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [value for parameter in parameters for _, value in sorted(optimizer.state[parameter].items())]
        return [_array(value) for value in states]


class Checkpointed(Torch):
    """With layers that run forward again in backward, hooks and all."""

    name = "torch, checkpointed"

    def net(self) -> Net:
        model = super().net()
        model.run_layer = partial(checkpoint, use_reentrant=False)
        return model


class Offloaded(Torch):
    """With shards on the CPU, which is where everything else is as well here."""

    name = "torch, offloaded"

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return super().fully_shard(module, offload_policy=hpcompat.CPUOffloadPolicy(pin_memory=False), **options)


class Native(Torch):
    """``torch.distributed.fsdp``. It emits no events, and a rank cannot catch up with the others."""

    name = "native torch"

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return fsdp.fully_shard(module, **options)

    def replicate(self, module: Any, **options: Any) -> Any:
        return replicate(module, **options)

    def mixed_policy(self) -> Any:
        return fsdp.MixedPrecisionPolicy(torch.float16, torch.float32)

    def step(self, optimizer: Any, *, closure: Callback | None = None) -> None:
        optimizer.step(closure)

    @contextmanager
    def at_event(self, name: str | None, module: Any, callback: Callback) -> Iterator[None]:
        if name == "post_backward":
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            original = group.post_backward

            def post_backward(*args: Any) -> None:
                callback()
                original(*args)

            group.post_backward = post_backward
            yield
            return
        original = _fsdp_param_group.foreach_reduce

        def foreach_reduce(params: Any, *args: Any, **kwargs: Any) -> Any:
            (group,) = module._get_fsdp_state()._fsdp_param_groups
            if params[0] in group.fsdp_params:
                callback()
            return original(params, *args, **kwargs)

        with mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce):
            yield


def _array(value: Any) -> np.ndarray[Any, Any]:
    local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
    return local.detach().clone().numpy()
