"""Outputs of a module, and methods other than forward."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from behaviour.models import WIDTH, assert_same_bits, batch, fill, gradients, loss_of, shard, true_gradients
from behaviour.registry import behaviour
from hpcompat import register_fsdp_forward_method


class Box:
    """Hides whatever it holds."""

    def __init__(self, value: object) -> None:
        self.value = value


@dataclass
class Parcel:
    """Shows its tensors."""

    logits: Tensor
    extra: dict[str, list[Tensor]]


class Returns(nn.Linear):
    """A linear layer that returns its result in the form that ``form`` gives it."""

    form = staticmethod(lambda result: result)

    def forward(self, inputs: Tensor) -> Any:
        return self.form(super().forward(inputs))


class Pick(nn.Module):
    """The first of several outputs."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0]


def returning(form: Any) -> Any:
    """A model of two layers whose second returns ``form(result)``; both wrapped, so that backward must gather."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Returns(WIDTH, WIDTH))
    model[1].form = form
    fill(model)
    for layer in model:
        shard(layer, reshard_after_forward=True)
    return shard(model)


def plain() -> nn.Module:
    """The same weights, unsharded."""
    return fill(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


HIDING = {
    "object": Box,
    "object-in-dict": lambda result: {"loss": Box(result)},
    "tensor-in-list-in-object": lambda result: Box([result]),
    "object-in-object": lambda result: Box(Box(result)),
    "set": lambda result: {result},
    "deque": lambda result: deque([result]),
}
SHOWING = {
    "dataclass": lambda result: Parcel(result, {"more": [result * 2]}),
    "nested": lambda result: {"a": [(result,)]},
    "object-without-tensors": lambda result: (result, Box("metadata")),
    "object-with-detached-tensor": lambda result: (result, Box(result.detach())),
}
TENSOR_OF = {
    "dataclass": lambda output: output.logits,
    "nested": lambda output: output["a"][0][0],
    "object-without-tensors": lambda output: output[0],
    "object-with-detached-tensor": lambda output: output[0],
}


@behaviour(reports=["InternLM/xtuner#1677"], each=[{"form": form} for form in HIDING])
def hidden_tensors_are_refused(form: str) -> None:
    """By name, before backward can go wrong; and the model can be used again at once."""
    model = returning(HIDING[form])
    owner = form if form in ("set", "deque") else "Box"
    with pytest.raises(TypeError, match=rf"FSDPReturns.*but got a {owner} that hides tensors"):
        model(batch())
    model.reset_iter_state()
    model[1].form = lambda result: result
    loss_of(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(plain()))


@behaviour(reports=["pytorch/pytorch#173709"], each=[{"is_root": False}, {"is_root": True}])
def hidden_tensors_beside_the_output_warn(is_root: bool) -> None:
    """A cache of what was computed does no harm as long as the gradients come through the output."""
    model = returning(lambda result: (result, Box([result * 2])))
    model = model if is_root else shard(nn.Sequential(model, Pick()))
    with pytest.warns(UserWarning, match=r"\(FSDP\w+\) has a Box that hides tensors beside those that it shows"):
        output = model(batch())
    output = output[0] if is_root else output
    (output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    found = {name.removeprefix("" if is_root else "0."): value for name, value in gradients(model).items()}
    assert_same_bits(found, true_gradients(plain()))


@behaviour(reports=["InternLM/xtuner#1677"])
def hidden_tensors_are_fine_without_gradients() -> None:
    model = returning(Box)
    with torch.no_grad():
        assert isinstance(model(batch()).value, Tensor)


@behaviour(reports=["InternLM/xtuner#1677"], each=[{"form": form} for form in SHOWING])
def shown_tensors_get_gradients(form: str) -> None:
    model = returning(SHOWING[form])
    output = TENSOR_OF[form](model(batch()))
    (output * torch.arange(1, output.numel() + 1).view_as(output)).sum().backward()
    assert_same_bits(gradients(model), true_gradients(plain()))


@behaviour(reports=["pytorch/pytorch#181832"], each=[{"is_view": True}, {"is_view": False}])
def only_view_outputs_warn(is_view: bool) -> None:
    model = returning((lambda result: result.view(-1, WIDTH)) if is_view else (lambda result: result + 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model, batch()).backward()
    texts = [str(warning.message) for warning in caught if "is a view" in str(warning.message)]
    assert bool(texts) == is_view, texts
    # The root passes the view on, so it warns as well.
    assert ["FSDPReturns" in text for text in texts] == [True, False][: len(texts)], texts
    assert all("output.clone()" in text for text in texts), texts
    assert_same_bits(gradients(model), true_gradients(plain()))


class Generates(nn.Module):
    """A model whose second entry point is ``generate``."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(inputs))

    def generate(self, inputs: Tensor, *, num_steps: int) -> Tensor:
        """Feeds the output back, once through a parameter of the root's own."""
        inputs = nn.functional.linear(self.block(inputs), self.head.weight).clamp(-2, 2)
        for _ in range(num_steps):
            inputs = self(inputs).clamp(-2, 2)
        return inputs


def generate_loss(model: Generates, inputs: Tensor) -> Tensor:
    return model.generate(inputs, num_steps=2).sum()


@behaviour(reports=["pytorch/pytorch#125394"], each=[{"first": "generate"}, {"first": "forward"}])
def registered_methods_gather(first: str) -> None:
    """Before and after training, with and without gradients."""
    truth = fill(Generates())
    model = fill(Generates())
    shard(model.block)
    shard(model, reshard_after_forward=True)
    register_fsdp_forward_method(model, "generate")
    if first == "forward":
        loss_of(model, batch()).backward()
        assert_same_bits(gradients(model), true_gradients(truth))
        model.zero_grad()
    with torch.no_grad():
        assert torch.equal(model.generate(batch(), num_steps=3), truth.generate(batch(), num_steps=3))
    assert model.generate.__name__ == "generate"
    generate_loss(model, batch()).backward()
    assert_same_bits(gradients(model), true_gradients(truth, loss=generate_loss))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
