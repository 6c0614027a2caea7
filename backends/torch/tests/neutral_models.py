"""The model and the generator that the neutral calls are tried with on torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import hpcompat


def model() -> Any:
    made = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    numbers = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(hpcompat.from_numpy(numbers.normal(size=parameter.shape).astype(np.float32)))
    hpcompat.fully_shard(made[0])
    return hpcompat.fully_shard(made)


def draw() -> Any:
    return torch.rand(4).numpy()
