"""What the fault matrix needs of MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

import hpcompat
from fault_matrix.kit import NUM_IN, NUM_LAYERS, NUM_OUT, Callback, LayerParts, NeutralKit, Traps, unchanged
from hpcompat_mindspore import autograd, optim
from hpcompat_mindspore.collectives import ProcessGroupAllGather, ProcessGroupReduceScatter


class Layer(LayerParts, nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.make_parts(nn.Dense)

    def construct(self, inputs: Tensor) -> Tensor:
        return self.run(inputs, relu=ops.relu)


class Net(nn.Cell):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(NUM_LAYERS)])
        self.head = nn.Dense(NUM_IN, NUM_OUT)
        self.inside: Callable[[Tensor], Tensor] = unchanged

    def construct(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(self.inside(inputs))


class Gather(Traps, ProcessGroupAllGather):
    """The default all-gather, with traps."""


class Scatter(Traps, ProcessGroupReduceScatter):
    """The default reduce-scatter, with traps."""


class MindSpore(NeutralKit):
    """hpcompat on MindSpore."""

    name = "mindspore"
    gather, scatter = Gather, Scatter

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
        return unchanged

    def optimizer(self, model: nn.Cell, kind: str) -> Any:
        parameters = list(hpcompat.parameters(model))
        return optim.SGD(parameters, lr=0.1, momentum=0.9) if kind == "sgd" else optim.AdamW(parameters, lr=0.1)

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
