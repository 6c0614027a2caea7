"""Models that native FSDP2 refuses to train, or trains only in some combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.models import WIDTH, Block, ModelCase, seeded, squared_error, vectors


class Late(nn.Module):
    """One unit whose second block only some microbatches use, and whose spare parameter none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor, uses_second: bool) -> Tensor:
        hidden = self.first(inputs)
        return self.head(self.second(hidden) if uses_second else hidden)


def late_batch(rank: int, step: int) -> tuple[Tensor, Tensor, bool]:
    """Of four microbatches only the last uses the second block."""
    return (*vectors(WIDTH, 5)(rank, step), step % 4 == 3)


def late_loss(module: nn.Module, batch: Any) -> Tensor:
    inputs, targets, uses_second = batch
    return F.mse_loss(module(inputs, uses_second).float(), targets)


def wrap_whole(module: nn.Module, fully_shard: Callable[..., Any], **kwargs: Any) -> None:
    fully_shard(module, **kwargs)


class MixedDtypes(nn.Module):
    """fp32 norms between bf16 linear layers, all in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * WIDTH, 5, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(inputs).bfloat16())))


REFUSED: dict[str, ModelCase] = {
    "late": ModelCase("late", seeded(Late), wrap_whole, late_batch, late_loss),
    "mixed-dtypes": ModelCase("mixed-dtypes", seeded(MixedDtypes), wrap_whole, vectors(WIDTH, 5), squared_error),
}
