"""Native FSDP2 under the names that the training loop calls in hpcompat, and the snapshot that compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from comparison import Snapshot

__all__ = [
    "MixedPrecisionPolicy",
    "backward",
    "clip_grad_norm_",
    "fully_shard",
    "optim",
    "optimizer_step",
    "parameters",
    "snapshot",
    "zero_grad",
]


def parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters()


def _adamw(params: Iterator[nn.Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, foreach=True, **options)


optim = SimpleNamespace(AdamW=_adamw)


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)


def backward(loss: Tensor) -> None:
    loss.backward()


def clip_grad_norm_(params: Iterator[nn.Parameter], max_norm: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=True)


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    """The state of a training by either library, read by torch's own means."""
    named = dict(model.named_parameters())
    return {
        "parameters": {name: _bits(parameter) for name, parameter in named.items()},
        "gradients": {name: _bits(p.grad) for name, p in named.items() if p.grad is not None},
        "AdamW states": {
            f"{name}.{key}": _bits(value) for name, p in named.items() for key, value in optimizer.state[p].items()
        },
    }


def _bits(tensor: Tensor) -> NDArray[Any]:
    """A copy of the local shard, as integers when numpy does not know the dtype."""
    local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
    local = local.cpu().clone()
    return (local.view(torch.int16) if local.dtype == torch.bfloat16 else local).numpy()
