"""Containers that go through units: the layer gets the caller's own object, and what it puts in is there afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from behaviour.models import WIDTH, assert_same_bits, batch, fill, gradients, shard, true_gradients
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy


@dataclasses.dataclass
class Side:
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    last: Tensor | None = None


class Filling(nn.Linear):
    """Adds to what it is given, and reads what the layers before it have put there."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen: Any = None
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, side: Any) -> Tensor:
        self.seen = side
        y = super().forward(x)
        if isinstance(side, Side):
            self.dtypes += [loss.dtype for loss in side.losses]
            side.losses.append(y.sum())
            side.last = y if side.last is None else side.last * y
        elif isinstance(side, dict):
            self.dtypes += [loss.dtype for loss in side.values()]
            side[len(side)] = y.sum() + sum(side.values())
        else:
            self.dtypes += [loss.dtype for loss in side]
            side.append(y.sum() + sum(side))
        return y


class Stack(nn.Module):
    def __init__(self, *, by: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Filling() for _ in range(3))
        self.by = by
        fill(self)

    def forward(self, x: Tensor, side: Any) -> Tensor:
        for layer in self.layers:
            if self.by == "checkpoint":
                x = checkpoint(lambda x, layer=layer: layer(x, side), x, use_reentrant=False)
            else:
                x = layer(x, side) if self.by == "position" else layer(x, side=side)
        return x


KINDS = {"list": list, "dict": dict, "dataclass": Side}


def total(side: Any) -> Tensor:
    if isinstance(side, Side):
        return sum(side.losses) + side.last.sum()
    return sum(side.values() if isinstance(side, dict) else side)


def loss_of(model: nn.Module, x: Tensor, kind: str) -> Tensor:
    side = KINDS[kind]()
    output = model(x, side)
    return output.sum() + total(side)


def sharded(by: str, **options: Any) -> Any:
    model = Stack(by=by)
    for layer in model.layers:
        shard(layer, **options)
    return shard(model, **options)


@behaviour(
    1, 2, reports=["huggingface/transformers#45663"],
    each=[{"kind": kind, "by": by} for kind in KINDS for by in ("position", "keyword")],
)  # fmt: skip
def layers_fill_the_callers_container(kind: str, by: str) -> None:
    model = sharded(by)
    side = KINDS[kind]()
    output = model(batch(), side)
    assert all(layer.seen is side for layer in model.layers)
    assert len(side.losses if kind == "dataclass" else side) == 3
    (output.sum() + total(side)).backward()
    assert_same_bits(gradients(model), true_gradients(Stack(by=by), loss=lambda m, x: loss_of(m, x, kind)))


@behaviour(1, 2)
def checkpointed_layers_fill_it_too() -> None:
    model = sharded("checkpoint")
    side: list[Tensor] = []
    output = model(batch(), side)
    assert len(side) == 3
    assert all(layer.seen is side for layer in model.layers)
    output.sum().backward()
    plain = Stack(by="checkpoint")
    assert_same_bits(gradients(model), true_gradients(plain, loss=lambda m, x: m(x, []).sum()))


@behaviour(1, 2, each=[{"kind": kind} for kind in KINDS])
def tensors_inside_are_cast_for_the_layer_alone(kind: str) -> None:
    model = sharded("position", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    given = torch.ones((), dtype=torch.float32)
    side = {"list": lambda: [given], "dict": lambda: {0: given}, "dataclass": lambda: Side([given])}[kind]()
    model(batch(), side)
    assert {dtype for layer in model.layers for dtype in layer.dtypes} == {torch.bfloat16}
    held = side.losses if kind == "dataclass" else side
    assert held[0] is given, "expected the caller's own tensor back"
    assert len(held) == 4


@behaviour(1)
def what_a_failed_forward_borrowed_is_given_back() -> None:
    class Failing(nn.Linear):
        fails = True

        def forward(self, x: Tensor, side: list[Tensor]) -> Tensor:
            side.insert(0, x)
            if self.fails:
                raise ArithmeticError
            return super().forward(x)

    module = Failing(WIDTH, WIDTH)
    shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    given = torch.ones(())
    side = [given]
    with pytest.raises(ArithmeticError):
        module(batch(), side)
    module.reset_iter_state()
    assert side[1] is given
    type(module).fails = False
    module(batch(), side)
    assert side[2] is given
