"""Operations on values, each with its backward written out, and the walk through nested inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcompat_conformance.numpy_reference.tape import Value, record, save
from hpcompat_conformance.numpy_reference.world import Array


def matmul(x: Value, weight: Value) -> Value:
    """``x @ weight.T``."""
    saved = save(x.data, weight.data)

    def backward(grad: Array) -> list[Array]:
        x_data, weight_data = saved()
        return [grad @ weight_data, grad.T @ x_data]

    return record([x.data @ weight.data.T], [x, weight], backward)[0]


def add_row(x: Value, row: Value) -> Value:
    """``row`` added to every row of ``x``."""
    return record([x.data + row.data], [x, row], lambda grad: [grad, grad.sum(0)])[0]


def add(first: Value, second: Value) -> Value:
    return record([first.data + second.data], [first, second], lambda grad: [grad, grad])[0]


def relu(x: Value) -> Value:
    saved = save(x.data)
    return record([np.maximum(x.data, 0)], [x], lambda grad: [grad * (saved()[0] > 0)])[0]


def total(x: Value) -> Value:
    """The sum of all elements."""
    return record([x.data.sum()], [x], lambda grad: [np.full_like(x.data, grad)])[0]


def cast(x: Value, dtype: Any) -> Value:
    """``x`` in ``dtype`` if it is floating and is not already."""
    before = x.data.dtype
    if before == dtype or not np.issubdtype(before, np.floating):
        return x
    return record([x.data.astype(dtype)], [x], lambda grad: [grad.astype(before)])[0]


def watch(values: Sequence[Value], on_backward: Callable[[], None]) -> list[Value]:
    """``values`` as the outputs of one node, which calls ``on_backward`` once all their gradients are complete."""

    def backward(*grads: Array | None) -> Sequence[Array | None]:
        on_backward()
        return grads

    return record([value.data for value in values], values, backward)
