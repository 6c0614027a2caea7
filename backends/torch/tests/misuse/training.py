"""Mistakes in forward, backward, the optimizer step and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from misuse.models import batch, linear, wrapped
from misuse.row import Misuse


class Box:
    """Hides a tensor in an attribute."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class ReturnsBox(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return {"logits": Box(super().forward(inputs))}


class ReturnsSet(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        return {super().forward(inputs)}


class ReturnsItself(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        outputs: list[Any] = [super().forward(inputs)]
        outputs.append(outputs)
        return outputs


@dataclass(init=False, frozen=True)
class Parcel:
    """A dataclass that cannot be changed, and that its own fields cannot rebuild."""

    tensor: Tensor

    def __init__(self, num_rows: int) -> None:
        object.__setattr__(self, "tensor", torch.ones(num_rows, 4, requires_grad=True))


class TakesParcel(nn.Linear):
    def forward(self, parcel: Parcel) -> Any:
        return super().forward(parcel.tensor)


def _plain_gradient(api: Any) -> None:
    module = wrapped(api)
    module.weight.grad = torch.zeros(4, 4)
    module(batch()).sum().backward()


def _optimizer_before_wrapping(api: Any) -> None:
    module = linear()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    api.fully_shard(module)(batch()).sum().backward()
    optimizer.step()


def _load_wrong_shape(api: Any) -> None:
    wrapped(api).load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(4)})


HIDES = r"expected the output of unit '' \(FSDP{module}\) .*, but got a {owner} that hides tensors"


def _load_one_rank(api: Any) -> None:
    wrapped(api).load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})


ROWS = [
    Misuse(
        "load-state-dict-of-one-rank",
        _load_one_rank,
        (ValueError, RuntimeError),
        r"size mismatch for weight: expected a value of the global shape \(4, 4\), but got \(2, 4\)",
        r"call hpcompat\.load_local_state_dict",
        "SDT-12",
        world_size=2,
        native=RuntimeError,
    ),
    *(
        Misuse(
            name,
            lambda api, module=module: api.fully_shard(module(4, 4))(batch()),
            (TypeError,),
            HIDES.format(module=module.__name__, owner=owner),
            rf"in dicts, lists, tuples or dataclasses.*Return the tensors, or make {owner} a dataclass",
            "FWD-02",
            world_size=world_size,
        )
        for name, module, owner, world_size in [
            ("output-hides-tensors", ReturnsBox, "Box", 2),
            ("output-hides-tensors-in-a-set", ReturnsSet, "set", 1),
        ]
    ),
    Misuse(
        "output-holds-itself",
        lambda api: api.fully_shard(ReturnsItself(4, 4))(batch()),
        (ValueError,),
        r"but got list over 100 levels deep",
        r"expected a finitely nested input or output",
    ),
    Misuse(
        "input-dataclass-that-cannot-be-rebuilt",
        lambda api: api.fully_shard(TakesParcel(4, 4))(Parcel(2)),
        (TypeError,),
        r"Failed to reconstruct dataclass Parcel via dataclasses.replace.*but got .*unexpected keyword",
        r"Expected dataclasses that go in or out of a wrapped module to allow that",
        native=TypeError,
    ),
    Misuse(
        "gradient-set-to-a-plain-tensor",
        _plain_gradient,
        (TypeError,),
        r"expected the gradient of sharded parameter 'weight' to be a DTensor or None, but got Tensor",
        r"a DTensor or None",
        world_size=2,
    ),
    Misuse(
        "optimizer-over-stale-parameters",
        _optimizer_before_wrapping,
        (ValueError,),
        r"expected SGD to hold sharded parameters, but got 2 that fully_shard has replaced \(weight, bias\)",
        r"Create the optimizer after wrapping",
        "OPT-08",
        world_size=2,
    ),
    Misuse(
        "load-state-dict-wrong-shape",
        _load_wrong_shape,
        (ValueError,),
        r"size mismatch for weight: expected a value of the global shape \(4, 4\), but got \(3, 4\)",
        r"the global shape \(4, 4\)",
        "SDT-07",
        world_size=2,
    ),
]
