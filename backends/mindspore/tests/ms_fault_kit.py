"""What the fault matrix needs of MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import hpcompat
from fault_matrix.kit import Callback, at_hpcompat_event
from hpcompat_mindspore import autograd, optim
from hpcompat_mindspore.collectives import ProcessGroupAllGather, ProcessGroupReduceScatter

NUM_IN, NUM_HIDDEN, NUM_OUT = 6, 7, 5


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Layer(nn.Cell):
    """Two linear maps around a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(NUM_IN, NUM_HIDDEN), nn.Dense(NUM_HIDDEN, NUM_IN)
        self.inside: Callable[[Tensor], Tensor] = _unchanged
        self.is_short = False

    def construct(self, inputs: Tensor) -> Tensor:
        if self.is_short:
            return inputs + self.down.bias
        return inputs + self.down(self.inside(ops.relu(self.up(inputs))))


class Net(nn.Cell):
    """Three layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(3)])
        self.head = nn.Dense(NUM_IN, NUM_OUT)
        self.inside: Callable[[Tensor], Tensor] = _unchanged

    def construct(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(self.inside(inputs))


class Gather(ProcessGroupAllGather):
    def __init__(self, *, before: Callback, after: Callback) -> None:
        self.before, self.after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        work = super().__call__(*args, **kwargs)
        self.after()
        return work


class Scatter(ProcessGroupReduceScatter):
    def __init__(self, *, before: Callback, after: Callback) -> None:
        self.before, self.after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before()
        work = super().__call__(*args, **kwargs)
        self.after()
        return work


class MindSpore:
    """hpcompat on MindSpore."""

    name = "mindspore"

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return hpcompat.fully_shard(module, **options)

    def replicate(self, module: Any, **options: Any) -> Any:
        return hpcompat.replicate(module, **options)

    def mixed_policy(self) -> Any:
        return hpcompat.MixedPrecisionPolicy(mindspore.float16, mindspore.float32)

    def net(self) -> Net:
        model = Net()
        numbers = np.random.default_rng(0)
        for parameter in model.get_parameters():
            values = numbers.normal(size=parameter.shape) * 0.3
            parameter.set_data(Tensor(values.astype(np.float32)))
        return model

    def node(self, tensor: Tensor, callback: Callback) -> Tensor:
        return autograd.watch((tensor,), callback)[0] if autograd.requires_grad(tensor) else tensor

    def on_gradient(self, module: nn.Cell, attribute: str, callback: Callback) -> Callable[[Tensor], Tensor]:
        getattr(module, attribute).register_hook(lambda grad: callback())
        return _unchanged

    def gather(self, *, before: Callback, after: Callback) -> Gather:
        return Gather(before=before, after=after)

    def scatter(self, *, before: Callback, after: Callback) -> Scatter:
        return Scatter(before=before, after=after)

    def at_event(self, name: str, module: Any, callback: Callback) -> AbstractContextManager[None]:
        return at_hpcompat_event(name, module, callback)

    def value_and_grad(self, function: Callable[..., Any], weights: list[Any]) -> Callable[..., Any]:
        return hpcompat.value_and_grad(function, weights)

    def optimizer(self, model: nn.Cell, kind: str) -> Any:
        parameters = list(hpcompat.parameters(model))
        return optim.SGD(parameters, lr=0.1, momentum=0.9) if kind == "sgd" else optim.AdamW(parameters, lr=0.1)

    def step(self, optimizer: Any, *, closure: Callback | None = None) -> None:
        hpcompat.optimizer_step(optimizer, closure)

    def states(self, optimizer: Any) -> list[np.ndarray[Any, Any]]:
        states = [optimizer.state[parameter] for parameter in optimizer.parameters]
        return [_array(value) for state in states for _, value in sorted(state.items())]


class MindSporesOwn(MindSpore):
    """The same with ``mindspore.value_and_grad``, and nothing recorded outside of it, as without :mod:`hpcompat`."""

    name = "mindspore.value_and_grad"

    def value_and_grad(self, function: Callable[..., Any], weights: list[Any]) -> Callable[..., Any]:
        autograd.stop_recording()
        return mindspore.value_and_grad(function, None, weights)  # type: ignore[no-any-return]


def _array(value: Any) -> np.ndarray[Any, Any]:
    return value.asnumpy().copy() if isinstance(value, Tensor) else np.asarray(value)
