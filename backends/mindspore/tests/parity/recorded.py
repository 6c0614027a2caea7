"""Records a training in bfloat16 of element-wise operations only, whose bits both frameworks agree on.

Run by ``hpcompat launch``; the argument is the directory of the recording.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import hpcompat

NUM_STEPS = 5
SHAPE = (7, 6)

hpcompat.init_process_group()
if hpcompat.get_backend_name() == "torch":
    from torch import bfloat16, nn

    Module, Parameter = nn.Module, nn.Parameter
else:
    from mindspore import Parameter, bfloat16, nn

    Module = nn.Cell

numbers = np.random.default_rng(0)


def random_tensor() -> Any:
    return hpcompat.from_numpy(numbers.normal(size=SHAPE).astype(np.float32), dtype=bfloat16)


class Scale(Module):
    """Without broadcasting: its gradient would be a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(random_tensor())

    def forward(self, x: Any) -> Any:
        return x * self.weight

    construct = forward


def main(directory: str) -> None:
    model = hpcompat.fully_shard(Scale())
    optimizer = hpcompat.optim.AdamW(hpcompat.parameters(model), lr=1e-2)
    with hpcompat.record(model, optimizer, directory) as recording:
        for _ in range(NUM_STEPS):
            hpcompat.backward(model(random_tensor()), random_tensor())
            recording.phase("after_backward")
            hpcompat.optimizer_step(optimizer)
            hpcompat.zero_grad(optimizer)
    hpcompat.barrier()
    hpcompat.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
