"""The recipes as torch modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hpcompat_conformance.on_torch.names import dtype_name
from hpcompat_conformance.recipes import Branches, Buffered, Chain, Hidden, Packed, Probe, Recipe, Tied
from hpcompat_conformance.values import parameter_values


class ChainModel(nn.Module):
    """See `recipes.Chain`."""

    def __init__(self, recipe: Chain) -> None:
        super().__init__()
        sizes = recipe.sizes
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.scale = nn.Parameter(torch.empty(sizes[-1])) if recipe.own else None
        self.order = tuple(recipe.order if recipe.order is not None else range(len(self.layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position, index in enumerate(self.order):
            x = self.layers[index](x)
            if position < len(self.order) - 1:
                x = torch.relu(x)
        return x if self.scale is None else x * self.scale

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class BranchesModel(nn.Module):
    """See `recipes.Branches`."""

    def __init__(self, recipe: Branches) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(recipe.width, recipe.width) for _ in range(3))

    def forward(self, x: torch.Tensor, use: Sequence[int] = (1, 2)) -> torch.Tensor:
        x = torch.relu(self.layers[0](x))
        return torch.stack([self.layers[index](x) for index in use]).sum(0)


class TiedModel(nn.Module):
    """See `recipes.Tied`."""

    def __init__(self, recipe: Tied) -> None:
        super().__init__()
        self.embed = nn.Embedding(recipe.vocab, recipe.width)
        self.layers = nn.ModuleList([nn.Linear(recipe.width, recipe.width)])
        self.head = nn.Linear(recipe.width, recipe.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.layers[0](self.embed(tokens))))


class ProbeModel(nn.Module):
    """See `recipes.Probe`."""

    def __init__(self, recipe: Probe) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(recipe.width, recipe.width)])
        self.seen: dict[str, str] = {}

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        weight: torch.Tensor = self.layers[0].weight  # type: ignore[assignment]
        self.seen = {"input": dtype_name(x.dtype), "weight": dtype_name(weight.dtype)}
        if side is not None:
            self.seen["side"] = dtype_name(side.dtype)
        return self.layers[0](x.to(weight.dtype))


class PackedModel(nn.Module):
    """See `recipes.Packed`."""

    def __init__(self, recipe: Packed) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(recipe.width, recipe.width) for _ in range(2))
        self.form = recipe.form

    def forward(self, x: torch.Tensor) -> Any:
        first = torch.relu(self.layers[0](x))
        last = self.layers[1](first)
        return Hidden(last, first * 2) if self.form == "object" else {"last": last, "more": (3, [first * 2])}


class BufferedModel(nn.Module):
    """See `recipes.Buffered`."""

    def __init__(self, recipe: Buffered) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(recipe.width, recipe.width)])
        self.register_buffer("offset", torch.tensor(recipe.offset))
        self.register_buffer("count", torch.tensor([3], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.offset


_MODELS: dict[type, Callable[[Any], nn.Module]] = {
    Chain: ChainModel,
    Branches: BranchesModel,
    Tied: TiedModel,
    Probe: ProbeModel,
    Packed: PackedModel,
    Buffered: BufferedModel,
}


def make(recipe: Recipe) -> nn.Module:
    """The module in float32, on torch's default device."""
    return _MODELS[type(recipe)](recipe)


def build(recipe: Recipe, *, seed: int) -> nn.Module:
    """The module, on the CPU in float32."""
    model = make(recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(parameter_values(name, parameter.shape, seed=seed)))
    return model
