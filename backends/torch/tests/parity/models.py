"""The models of the parity matrix: how each is built, which of its modules become units, and what it is fed.

Every model is deterministic in its seed and sees other data on every rank and in every step, so that a reduction over a
wrong group, or over too few ranks, changes numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.decoder import Decoder, DecoderConfig

WIDTH = 12
BATCH = 3

FullyShard = Callable[..., Any]
Wrap = Callable[..., None]


@dataclass(frozen=True)
class ModelCase:
    """One model of the matrix.

    `build(seed)` gives the plain module, `wrap(module, fully_shard, **kwargs)` shards it in place,
    `batch(rank, step)` gives inputs and targets, `loss(module, batch)` a scalar in fp32.
    """

    name: str
    build: Callable[[int], nn.Module]
    wrap: Wrap
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def generator(rank: int, step: int) -> torch.Generator:
    """The source of the data of one rank in one step."""
    return torch.Generator().manual_seed(10_007 * (step + 1) + 101 * (rank + 1))


def vectors(width: int, outputs: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Batches of shape (BATCH, width) with targets of shape (BATCH, outputs)."""

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        source = generator(rank, step)
        return torch.randn(BATCH, width, generator=source), torch.randn(BATCH, outputs, generator=source)

    return batch


def tokens(config: DecoderConfig) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Batches of token ids (2, length) with the next tokens as targets."""

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(config.vocab, (2, config.length + 1), generator=generator(rank, step))
        return ids[:, :-1], ids[:, 1:]

    return batch


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error in fp32."""
    inputs, targets = batch
    return F.mse_loss(module(inputs).float(), targets)


def cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of the next token in fp32."""
    inputs, targets = batch
    return F.cross_entropy(module(inputs).float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """Two linear layers with a residual; the second has no bias.

    Blocks of one model differ in `hidden`, so that the size of a collective tells whose it is.
    """

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(F.gelu(self.up(inputs)))


class Nest(nn.Module):
    """A block that owns a parameter of its own and contains two blocks: units within a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.first = Block(20)
        self.second = Block(28)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs * self.scale)) * self.scale


class NestedModel(nn.Module):
    """A nest, a block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.nest = Nest()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(self.nest(inputs)))


class BufferedModel(nn.Module):
    """Uses a persistent running mean and an integer counter, both updated, and a table that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.running.lerp_(inputs.detach().float().mean(0), 0.1)
            self.calls += 1
        centred = inputs - self.running.to(inputs.dtype)
        return self.head(self.block(centred * self.table.to(inputs.dtype)))


def seeded(factory: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """A builder that fixes the seed before it makes the module."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return factory()

    return build


def make_mlp() -> nn.Module:
    return nn.Sequential(Block(20), Block(28), nn.Linear(WIDTH, 5))


def make_uneven() -> nn.Module:
    """Layers of 7, 5, 3 and 1 output rows: uneven on 2 ranks, with empty shards on 4."""
    widths = (6, 7, 5, 3, 1)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def make_frozen() -> nn.Module:
    """One block wholly frozen, half of another frozen, the rest trainable."""
    module = nn.Sequential(Block(20), Block(24), Block(28), nn.Linear(WIDTH, 5))
    module[1].requires_grad_(False)
    module[2].up.requires_grad_(False)
    return module


def wrap_children(module: nn.Module, fully_shard: FullyShard, **kwargs: Any) -> None:
    """The first two children are units of their own, the rest belongs to the root unit."""
    for child in list(module.children())[:2]:
        fully_shard(child, **kwargs)
    fully_shard(module, **kwargs)


def wrap_blocks(module: nn.Module, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Every block is a unit, the rest belongs to the root unit."""
    for child in module.modules():
        if isinstance(child, Block):
            fully_shard(child, **kwargs)
    fully_shard(module, **kwargs)


def wrap_layers(module: Decoder, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Every decoder layer is a unit; embedding, norm and head (tied or not) belong to the root unit."""
    for layer in module.layers:
        fully_shard(layer, **kwargs)
    fully_shard(module, **kwargs)


def wrap_list(module: nn.Sequential, fully_shard: FullyShard, **kwargs: Any) -> None:
    """The first two children are one unit together, the third is another, the head belongs to the root unit."""
    fully_shard([module[0], module[1]], **kwargs)
    fully_shard(module[2], **kwargs)
    fully_shard(module, **kwargs)


def wrap_nested(module: NestedModel, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Units inside a unit inside the root unit."""
    for unit in (module.nest.first, module.nest.second, module.nest, module.block, module):
        fully_shard(unit, **kwargs)


def wrap_without_root(module: NestedModel, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Units inside a unit, and no unit at the top: three separate roots."""
    for unit in (module.nest.first, module.nest.second, module.nest, module.block, module.head):
        fully_shard(unit, **kwargs)


DECODER = DecoderConfig()
TIED = DecoderConfig(tied=True, layers=1)

MODELS: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("mlp", seeded(make_mlp), wrap_blocks, vectors(WIDTH, 5), squared_error),
        ModelCase("decoder", seeded(lambda: Decoder(DECODER)), wrap_layers, tokens(DECODER), cross_entropy),
        ModelCase("tied", seeded(lambda: Decoder(TIED)), wrap_layers, tokens(TIED), cross_entropy),
        ModelCase("uneven", seeded(make_uneven), wrap_children, vectors(6, 1), squared_error),
        ModelCase(
            "list",
            seeded(lambda: nn.Sequential(Block(20), nn.LayerNorm(WIDTH), Block(28), nn.Linear(WIDTH, 5))),
            wrap_list,
            vectors(WIDTH, 5),
            squared_error,
        ),
        ModelCase("nested", seeded(NestedModel), wrap_nested, vectors(WIDTH, 5), squared_error),
        ModelCase("rootless", seeded(NestedModel), wrap_without_root, vectors(WIDTH, 5), squared_error),
        ModelCase("frozen", seeded(make_frozen), wrap_blocks, vectors(WIDTH, 5), squared_error),
        ModelCase("buffers", seeded(BufferedModel), wrap_blocks, vectors(WIDTH, 5), squared_error),
    )
}
