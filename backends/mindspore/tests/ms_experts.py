"""The mixture of experts of :mod:`experts` in MindSpore."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor, nn, ops


class Block(nn.Cell):
    def __init__(self, dense: Any, experts: Any) -> None:
        super().__init__()
        self.dense = Parameter(Tensor(dense), name="dense")
        self.experts = Parameter(Tensor(experts), name="experts")

    def construct(self, x: Tensor) -> Tensor:
        x = ops.relu(ops.matmul(x, self.dense))
        return x + ops.matmul(x, self.experts).sum(0)


class Model(nn.Cell):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.CellList(
            [
                Block(values[f"blocks.{index}.dense"], values[f"blocks.{index}.experts"])
                for index in range(len(values) // 2)
            ]
        )

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
