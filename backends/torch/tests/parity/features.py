"""Models of single features: forward patterns, containers, activation checkpointing, meta-device init.

Same form as `parity.models.MODELS`; each is compared with native FSDP2 in a few combinations, not in the whole product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.checkpoint import checkpoint

from parity.models import (
    WIDTH,
    Block,
    FullyShard,
    ModelCase,
    make_mlp,
    seeded,
    squared_error,
    vectors,
    wrap_blocks,
)


class Twice(nn.Module):
    """One block called twice in a forward, another once between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block(20)
        self.other = Block(28)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.shared(self.other(self.shared(inputs))))


class Unused(nn.Module):
    """A parameter that no forward uses, and a block that only every second forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(20)
        self.first.spare = nn.Parameter(torch.ones(WIDTH))
        self.second = Block(28)
        self.head = nn.Linear(WIDTH, 5)
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        hidden = self.first(inputs)
        return self.head(self.second(hidden) if self.num_calls % 2 else hidden)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Parcel:
    """A dataclass between units."""

    hidden: Tensor
    extra: dict[str, Tensor]


class Splits(Block):
    """From a dict, by keyword, to a tuple with a named tuple and a list inside."""

    def forward(self, features: dict[str, Tensor], *, scale: Tensor) -> tuple[Pair, list[Tensor]]:
        hidden = super().forward(features["inputs"] * scale.to(features["inputs"].dtype))
        return Pair(hidden, hidden.sin()), [hidden.cos(), torch.arange(3)]


class Packs(Block):
    """From that tuple to a dataclass."""

    def forward(self, pair: Pair, others: list[Tensor]) -> Parcel:
        hidden = super().forward(pair.left + others[0])
        return Parcel(hidden, {"right": pair.right * 2, "index": others[1]})


class Unpacks(Block):
    """From the dataclass to a tensor."""

    def forward(self, parcel: Parcel) -> Tensor:
        hidden = parcel.hidden + parcel.extra["right"]
        return super().forward(hidden.to(self.up.weight.dtype))


class Containers(nn.Module):
    """Three units that hand each other nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.splits = Splits(20)
        self.packs = Packs(24)
        self.unpacks = Unpacks(28)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        pair, others = self.splits({"inputs": inputs}, scale=torch.full((WIDTH,), 1.5))
        return self.head(self.unpacks(self.packs(pair, others)))


class DroppingBlock(Block):
    """A block with dropout: recomputation must see the same random numbers. May checkpoint its own inside."""

    def __init__(self, hidden: int, inside: bool | None = None) -> None:
        super().__init__(hidden)
        self.inside = inside

    def forward(self, inputs: Tensor) -> Tensor:
        if self.inside is None:
            return F.dropout(super().forward(inputs), 0.2, self.training)
        return F.dropout(checkpoint(super().forward, inputs, use_reentrant=self.inside), 0.2, self.training)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in backward: the checkpoint around each unit, or inside it."""

    def __init__(self, *, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DroppingBlock(hidden, reentrant if inside else None) for hidden in (20, 28))
        self.head = nn.Linear(WIDTH, 5)
        self.reentrant = reentrant
        self.inside = inside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden) if self.inside else checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def checkpointed(*, reentrant: bool, inside: bool) -> ModelCase:
    where = "inside" if inside else "around"
    name = f"checkpoint-{where}-{'reentrant' if reentrant else 'saved-hooks'}"
    build = seeded(lambda: Checkpointed(reentrant=reentrant, inside=inside))
    return ModelCase(name, build, wrap_blocks, vectors(WIDTH, 5), squared_error)


class Generator(nn.Module):
    """Trained through a method that is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(20)
        self.head = nn.Linear(WIDTH, 5)

    def generate(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(inputs))


def generate_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss by way of `generate`."""
    inputs, targets = batch
    return F.mse_loss(module.generate(inputs).float(), targets)


def two_forwards(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Two forwards of the whole model before the one backward."""
    inputs, targets = batch
    return squared_error(module, (inputs, targets)) + squared_error(module, (inputs.flip(0), targets))


def build_meta(seed: int) -> nn.Module:
    """The MLP without storage; `wrap_meta` and `wrap_assigned` fill it with the values of this seed."""
    with torch.device("meta"):
        module = make_mlp()
    module.seed = seed
    return module


def wrap_meta(module: nn.Module, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Shard on meta, allocate with `to_empty`, load whole tensors from rank 0."""
    values = seeded(make_mlp)(module.seed).state_dict()
    wrap_blocks(module, fully_shard, **kwargs)
    module.to_empty(device="cpu")
    set_model_state_dict(module, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def wrap_assigned(module: nn.Module, fully_shard: FullyShard, **kwargs: Any) -> None:
    """Shard on meta and assign the DTensors of a model that was sharded with storage."""
    other = seeded(make_mlp)(module.seed)
    wrap_blocks(other, fully_shard, **kwargs)
    wrap_blocks(module, fully_shard, **kwargs)
    module.load_state_dict(other.state_dict(), assign=True)


def simple(name: str, factory: Callable[[], nn.Module]) -> ModelCase:
    return ModelCase(name, seeded(factory), wrap_blocks, vectors(WIDTH, 5), squared_error)


FEATURES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        simple("twice", Twice),
        simple("unused", Unused),
        simple("containers", Containers),
        ModelCase("generate", seeded(Generator), wrap_blocks, vectors(WIDTH, 5), generate_error),
        ModelCase("two-forwards", seeded(make_mlp), wrap_blocks, vectors(WIDTH, 5), two_forwards),
        ModelCase("meta", build_meta, wrap_meta, vectors(WIDTH, 5), squared_error),
        ModelCase("meta-assigned", build_meta, wrap_assigned, vectors(WIDTH, 5), squared_error),
        checkpointed(reentrant=False, inside=False),
        checkpointed(reentrant=True, inside=False),
        checkpointed(reentrant=False, inside=True),
        checkpointed(reentrant=True, inside=True),
    )
}

PATTERNS = tuple(name for name in FEATURES if name not in ("unused", "generate"))
"""All but those that need settings of their own."""
