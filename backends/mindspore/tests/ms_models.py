"""Models and batches for the tests: the same values on every rank, another batch for every rank and step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

NUM_IN, NUM_OUT = 6, 5


class Block(nn.Cell):
    """Two layers around a relu."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(size, hidden), nn.Dense(hidden, size)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.relu(self.up(x)))


class Net(nn.Cell):
    """Residual blocks and a head."""

    def __init__(self, *, hidden: int = 10, num_blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.CellList([Block(NUM_IN, hidden) for _ in range(num_blocks)])
        self.head = nn.Dense(NUM_IN, NUM_OUT)

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class TiedNet(nn.Cell):
    """The first weight is the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(NUM_OUT, 7)
        self.first = nn.Dense(NUM_IN, NUM_OUT, has_bias=False)
        self.last = nn.Dense(NUM_IN, NUM_OUT, has_bias=False)
        self.last.weight = self.first.weight

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x)) + self.last(x)


class Scale(nn.Cell):
    """Elementwise and without broadcasting, so that it runs in bfloat16 on the CPU: products and sums there do not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((4, size), np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros((4, size), np.float32)), name="bias")

    def construct(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class ElementwiseNet(nn.Cell):
    """A chain of scales."""

    def __init__(self, *, size: int = NUM_OUT, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.CellList([Scale(size) for _ in range(num_layers)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def initialize(model: nn.Cell, *, seed: int = 0) -> Any:
    """Fill the parameters with values that depend on name order and ``seed`` only."""
    numbers = np.random.default_rng(seed)
    for _, parameter in model.parameters_and_names():
        values = numbers.normal(size=parameter.shape) * 0.3
        parameter.set_data(Tensor(values.astype(np.float32)).astype(parameter.dtype))
    return model


def batch(rank: int, *, step: int = 0, num_in: int = NUM_IN) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank and step."""
    numbers = np.random.default_rng([rank, step, 7])
    shapes = (4, num_in), (4, NUM_OUT)
    x, y = (Tensor(numbers.normal(size=shape).astype(np.float32)) for shape in shapes)
    return x, y


def loss_of(model: Any, data: Sequence[Tensor]) -> Tensor:
    """Mean squared error, in float32."""
    return ((model(data[0]).astype(mindspore.float32) - data[1]) ** 2).mean()


def named(model: nn.Cell) -> dict[str, Parameter]:
    return dict(model.parameters_and_names())


def arrays(values: Iterable[Any]) -> list[Any]:
    return [None if value is None else value.asnumpy().copy() for value in values]
