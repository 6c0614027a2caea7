"""The mixture of experts of :mod:`experts` in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dense: Any, experts: Any) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.tensor(dense))
        self.experts = nn.Parameter(torch.tensor(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ self.dense)
        return x + sum(x @ weight for weight in self.experts)


class Model(nn.Module):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(values[f"blocks.{index}.dense"], values[f"blocks.{index}.experts"])
            for index in range(len(values) // 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
