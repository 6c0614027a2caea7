"""The recipes as MindSpore cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hpcompat_conformance.on_mindspore.names import dtype_name
from hpcompat_conformance.recipes import Branches, Buffered, Chain, Hidden, Packed, Probe, Recipe, Tied
from hpcompat_conformance.values import parameter_values
from hpcompat_mindspore.gradients import make_gradient_own
from hpcompat_mindspore.tensors import HOST


class Linear(nn.Cell):
    """``x @ weight.T + bias``; bfloat16 through float32, as the CPU has no such products."""

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((num_out, num_in), np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.zeros(num_out, np.float32)), name="bias") if has_bias else None

    def construct(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            raise TypeError(f"expected an input of dtype {self.weight.dtype}, but got {x.dtype}")
        wide = mindspore.float32 if x.dtype == mindspore.bfloat16 else x.dtype
        y = ops.matmul(x.astype(wide), self.weight.astype(wide).T)
        if self.bias is not None:
            y = y + self.bias.astype(wide)
        return y.astype(x.dtype)


class ChainModel(nn.Cell):
    """See `recipes.Chain`."""

    def __init__(self, recipe: Chain) -> None:
        super().__init__()
        sizes = recipe.sizes
        self.layers = nn.CellList([Linear(a, b) for a, b in pairwise(sizes)])
        self.scale = Parameter(Tensor(np.zeros(sizes[-1], np.float32)), name="scale") if recipe.own else None
        self.order = tuple(recipe.order if recipe.order is not None else range(len(self.layers)))

    def construct(self, x: Tensor) -> Tensor:
        for position, index in enumerate(self.order):
            x = self.layers[index](x)
            if position < len(self.order) - 1:
                x = _relu(x)
        return x if self.scale is None else _multiply(x, self.scale)

    def generate(self, x: Tensor) -> Tensor:
        return self.construct(x)


class BranchesModel(nn.Cell):
    """See `recipes.Branches`."""

    def __init__(self, recipe: Branches) -> None:
        super().__init__()
        self.layers = nn.CellList([Linear(recipe.width, recipe.width) for _ in range(3)])

    def construct(self, x: Tensor, use: Sequence[int] = (1, 2)) -> Tensor:
        x = _relu(self.layers[0](x))
        outputs = [self.layers[index](x) for index in use]
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total


class Embedding(nn.Cell):
    """Rows of ``weight`` by token."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((vocab, width), np.float32)), name="weight")

    def construct(self, tokens: Tensor) -> Tensor:
        return ops.gather(self.weight, tokens, 0)


class TiedModel(nn.Cell):
    """See `recipes.Tied`."""

    def __init__(self, recipe: Tied) -> None:
        super().__init__()
        self.embed = Embedding(recipe.vocab, recipe.width)
        self.layers = nn.CellList([Linear(recipe.width, recipe.width)])
        self.head = Linear(recipe.width, recipe.vocab, has_bias=False)
        self.head.weight = self.embed.weight

    def construct(self, tokens: Tensor) -> Tensor:
        return self.head(_relu(self.layers[0](self.embed(tokens))))


class ProbeModel(nn.Cell):
    """See `recipes.Probe`."""

    def __init__(self, recipe: Probe) -> None:
        super().__init__()
        self.layers = nn.CellList([Linear(recipe.width, recipe.width)])
        self.seen: dict[str, str] = {}

    def construct(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        weight = self.layers[0].weight
        self.seen = {"input": dtype_name(x.dtype), "weight": dtype_name(weight.dtype)}
        if side is not None:
            self.seen["side"] = dtype_name(side.dtype)
        return self.layers[0](x.astype(weight.dtype))


class PackedModel(nn.Cell):
    """See `recipes.Packed`."""

    def __init__(self, recipe: Packed) -> None:
        super().__init__()
        self.layers = nn.CellList([Linear(recipe.width, recipe.width) for _ in range(2)])
        self.form = recipe.form

    def construct(self, x: Tensor) -> Any:
        first = _relu(self.layers[0](x))
        last = self.layers[1](first)
        return Hidden(last, first * 2) if self.form == "object" else {"last": last, "more": (3, [first * 2])}


class BufferedModel(nn.Cell):
    """See `recipes.Buffered`."""

    def __init__(self, recipe: Buffered) -> None:
        super().__init__()
        self.layers = nn.CellList([Linear(recipe.width, recipe.width)])
        self.register_buffer("offset", Tensor(np.array(recipe.offset, np.float32)))
        self.register_buffer("count", Tensor(np.array([3], np.int32)))

    def construct(self, x: Tensor) -> Tensor:
        return self.layers[0](x).astype(mindspore.float32) + self.offset


def _relu(x: Tensor) -> Tensor:
    return ops.relu(x.astype(mindspore.float32)).astype(x.dtype) if x.dtype == mindspore.bfloat16 else ops.relu(x)


def _multiply(x: Tensor, row: Tensor) -> Tensor:
    if x.dtype != mindspore.bfloat16:
        return x * row
    return (x.astype(mindspore.float32) * row.astype(mindspore.float32)).astype(x.dtype)


_MODELS: dict[type, Callable[[Any], nn.Cell]] = {
    Chain: ChainModel,
    Branches: BranchesModel,
    Tied: TiedModel,
    Probe: ProbeModel,
    Packed: PackedModel,
    Buffered: BufferedModel,
}


def make(recipe: Recipe) -> nn.Cell:
    """The cell in float32, on the device that MindSpore makes tensors on."""
    return _MODELS[type(recipe)](recipe)


def build(recipe: Recipe, *, seed: int) -> nn.Cell:
    """The cell, in float32. Backwards may add up in its gradients, which the engine alone does not do rightly."""
    model = make(recipe)
    for name, parameter in model.parameters_and_names():
        parameter.set_data(Tensor(parameter_values(name, parameter.shape, seed=seed)))
        make_gradient_own(parameter, HOST)
    return model
