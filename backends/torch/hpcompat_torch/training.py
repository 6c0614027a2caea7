"""Gradients, seeds and numpy, in torch's own terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from hpcompat_torch import distributed, loading


def backward(tensor: torch.Tensor, gradient: torch.Tensor | None, *, retain_graph: bool) -> None:
    torch.autograd.backward(tensor, gradient, retain_graph=retain_graph)


def value_and_grad(
    fn: Callable[..., Any], weights: tuple[torch.Tensor, ...], *, has_aux: bool
) -> Callable[..., tuple[Any, tuple[torch.Tensor | None, ...]]]:
    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
        for weight in weights:
            weight.grad = None
        with torch.enable_grad():
            value = fn(*args, **kwargs)
        outputs = value if isinstance(value, tuple) else (value,)
        differentiated = outputs[:1] if has_aux else outputs
        torch.autograd.backward(differentiated, [torch.ones_like(output) for output in differentiated])
        return value, tuple(weight.grad for weight in weights)

    return run


def enable_backward_compat() -> None:
    """Torch's tensors have ``backward`` and ``grad``."""


def no_grad() -> AbstractContextManager[Any]:
    return torch.no_grad()


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    detached = tensor.detach()
    # A copy first: a storage that numpy has seen can no longer be resized, so its unit could not free it.
    local = (detached.to_local() if isinstance(detached, DTensor) else detached).clone().cpu()
    array: NDArray[Any] = (local.float() if local.dtype is torch.bfloat16 else local).numpy()
    return array


def from_numpy(array: NDArray[Any], *, dtype: torch.dtype | None) -> torch.Tensor:
    return torch.tensor(np.asarray(array), dtype=dtype, device=distributed.device())


def full_tensor(parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    tensor = parameter.detach() if value is None else value
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_local_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    return loading.load_local_state_dict(module, state_dict, strict=strict)
