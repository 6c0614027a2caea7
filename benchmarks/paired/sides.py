"""The implementations that take part, behind one seam."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paired.cases import Case

SideName = Literal["ours", "native", "bare"]
SIDES: tuple[SideName, ...] = ("ours", "native", "bare")
"""`bare` is the model without sharding or communication: what a step costs before anyone shards anything."""

TURNS: tuple[tuple[SideName, ...], ...] = (("ours", "native", "bare"), ("native", "ours", "bare"))
"""Orders of alternate rounds: ours follows native as often as native follows ours, and each follows bare as often."""

IMPLEMENTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "hpcompat": ("hpcompat", {}),
    # Its defaults turned off, one at a time: a collective for each parameter; a copy before each gather.
    "hpcompat-per-parameter": ("hpcompat", {"comm_fusion": False}),
    "hpcompat-copying": ("hpcompat", {"comm_fusion_zero_copy": False}),
    "native": ("torch.distributed.fsdp", {}),
}
"""Name -> the module that has its `fully_shard`, and options. More may be added; nothing else here knows them."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer] | None] = {
    "none": None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass(frozen=True)
class Side:
    """One model, ready to be stepped."""

    model: nn.Module
    batch: Tensor
    optimizer: torch.optim.Optimizer | None

    def step(self) -> Tensor:
        """Forward, backward, the optimizer if there is one, zero_grad. Returns the loss, a scalar."""
        loss = self.model(self.batch).square().mean()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def shard(model: nn.Module, *, implementation: str, mesh: DeviceMesh) -> None:
    """Each block a unit, the rest of the model the root unit; in place."""
    module, options = IMPLEMENTATIONS[implementation]
    fully_shard = importlib.import_module(module).fully_shard
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def make_side(
    case: Case, *, name: SideName, ours: str, mesh: DeviceMesh, device: torch.device, rank: int, optimizer: str = "none"
) -> Side:
    """The case's model, sharded by the implementation that stands for this side."""
    model = case.make_model(device)
    if name != "bare":
        shard(model, implementation=ours if name == "ours" else "native", mesh=mesh)
    make_optimizer = OPTIMIZERS[optimizer]
    return Side(
        model=model,
        batch=case.make_input(device, rank=rank),
        optimizer=make_optimizer(model.parameters()) if make_optimizer is not None else None,
    )


def versions() -> dict[str, str]:
    """Package -> version, for the packages that take part."""
    return {package: metadata.version(package) for package in ("torch", "hpcompat")}
