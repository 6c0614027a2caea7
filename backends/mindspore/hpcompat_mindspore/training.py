"""Gradients, seeds and numpy, in torch's terms where MindSpore has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from hpcompat_mindspore import autograd, loading, param

Array = np.ndarray[Any, Any]


def backward(tensor: Tensor, gradient: Tensor | None, *, retain_graph: bool) -> None:
    autograd.backward(tensor, gradient, retain_graph=retain_graph)


def value_and_grad(
    fn: Callable[..., Any], weights: tuple[Parameter, ...], *, has_aux: bool
) -> Callable[..., tuple[Any, tuple[Tensor | None, ...]]]:
    return autograd.value_and_grad(fn, weights, has_aux=has_aux)


def enable_backward_compat() -> None:
    autograd.enable_backward_compat()


def no_grad() -> AbstractContextManager[Any]:
    return autograd.no_grad()


def manual_seed(seed: int) -> None:
    mindspore.set_seed(seed)


def to_numpy(tensor: Tensor) -> Array:
    values: Array = tensor.asnumpy()
    return values.astype(np.float32) if tensor.dtype == mindspore.bfloat16 else values.copy()


def from_numpy(array: Array, *, dtype: Any) -> Tensor:
    tensor = Tensor(np.array(array))
    return tensor if dtype is None else tensor.astype(dtype)


def full_tensor(parameter: Parameter, value: Tensor | None) -> Tensor:
    return param.full_tensor(parameter, value)


def load_local_state_dict(module: nn.Cell, state_dict: Mapping[str, Any], *, strict: bool) -> Any:
    return loading.load_local_state_dict(module, state_dict, strict=strict)
