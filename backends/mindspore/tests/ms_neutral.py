"""The model and the generator that the neutral calls are tried with on mindspore."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import nn

import hpcompat


def model() -> Any:
    made = nn.SequentialCell(nn.Dense(4, 5), nn.Dense(5, 3))
    numbers = np.random.default_rng(0)
    for parameter in made.get_parameters():
        parameter.set_data(hpcompat.from_numpy(numbers.normal(size=parameter.shape).astype(np.float32)))
    hpcompat.fully_shard(made[0])
    return hpcompat.fully_shard(made)


def draw() -> Any:
    return mindspore.ops.rand(4).asnumpy()
