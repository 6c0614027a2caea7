"""Automatic differentiation in small: values, the tape of operations that made them, the engine that runs it backward.

What a param group needs from a framework's autograd is all here: hooks on a value that run when its gradient is
complete (``Value.hooks``), callbacks at the end of a backward (:func:`queue_callback`), whether one is running
(:func:`in_backward`), and recomputation, which runs forward inside backward (:func:`checkpoint`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from hpcompat_conformance.numpy_reference.world import Array

Gradients = Sequence[Array | None]


class Value:
    """An array on the tape. ``hooks`` run once its gradient is complete, before the node that made it; those of a leaf
    whenever it gets a gradient.
    """

    def __init__(self, data: Array, *, requires_grad: bool = False, node: Node | None = None) -> None:
        self.data = data
        self.requires_grad = requires_grad
        self.node = node
        self.grad: Array | None = None
        self.hooks: list[Callable[[], None]] = []


class Node:
    """One operation. ``backward`` maps the gradients of its outputs to those of its inputs; ``None``: there is none."""

    def __init__(self, inputs: Sequence[Value], backward: Callable[..., Gradients]) -> None:
        self.number = next(_numbers)
        self.inputs = inputs
        self.backward = backward
        self.outputs: list[Value] = []


_numbers = itertools.count()


class _Mode(threading.local):
    """What the running thread is in the middle of."""

    grad_enabled = True
    callbacks: list[Callable[[], None]] | None = None
    recomputation: _Recomputation | None = None


_mode = _Mode()


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(_mode, name)
    setattr(_mode, name, value)
    try:
        yield
    finally:
        setattr(_mode, name, before)


# Forward


def no_grad() -> Any:
    """Inside it nothing is recorded."""
    return _set("grad_enabled", False)


def grad_enabled() -> bool:
    return _mode.grad_enabled


def record(arrays: Sequence[Array], inputs: Sequence[Value], backward: Callable[..., Gradients]) -> list[Value]:
    """``arrays`` as the outputs of one operation on ``inputs``."""
    if not _mode.grad_enabled or not any(value.requires_grad for value in inputs):
        return [Value(array) for array in arrays]
    node = Node(inputs, backward)
    node.outputs = [Value(array, requires_grad=True, node=node) for array in arrays]
    return node.outputs


def save(*arrays: Array) -> Callable[[], tuple[Array, ...]]:
    """Keep ``arrays`` for backward: themselves, or in a checkpointed region only the way to get them again."""
    recomputation = _mode.recomputation
    return (lambda: arrays) if recomputation is None else recomputation.save(arrays)


# Backward


def backward(root: Value, gradient: Array | None = None) -> None:
    """Add the gradient of ``root`` to ``grad`` of every leaf that it was computed from."""
    pending = {root: np.ones_like(root.data) if gradient is None else gradient}
    with _set("callbacks", []), no_grad():
        assert root.node is not None
        assert _mode.callbacks is not None
        ready, seen = [(-root.node.number, root.node)], {root.node}
        while ready:
            _, node = heapq.heappop(ready)  # latest first: whoever used its outputs is done
            for value, grad in zip(node.inputs, _run(node, pending), strict=True):
                if grad is None or not value.requires_grad:
                    continue
                if value.node is None:
                    value.grad = grad if value.grad is None else value.grad + grad
                    for hook in value.hooks:
                        hook()
                    continue
                pending[value] = pending[value] + grad if value in pending else grad
                if value.node not in seen:
                    seen.add(value.node)
                    heapq.heappush(ready, (-value.node.number, value.node))
        for callback in _mode.callbacks:
            callback()


def _run(node: Node, pending: dict[Value, Array]) -> Gradients:
    grads = [pending.pop(output, None) for output in node.outputs]
    for output, grad in zip(node.outputs, grads, strict=True):
        for hook in output.hooks if grad is not None else ():
            hook()
    return node.backward(*grads)


def in_backward() -> bool:
    return _mode.callbacks is not None


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward ends."""
    if _mode.callbacks is None:
        raise RuntimeError("expected a running backward, but got none")
    _mode.callbacks.append(callback)


# Recomputation


class _Enough(Exception):
    """Everything that backward needs has been computed again; the rest of forward is not run."""


class _Recomputation:
    """The saved arrays of a checkpointed region: counted in forward, computed again when backward needs the first."""

    def __init__(self, region: Callable[..., Any], inputs: tuple[Value, ...]) -> None:
        self.region, self.inputs = region, inputs
        self.num_saved = 0
        self.arrays: list[tuple[Array, ...]] | None = None

    def save(self, arrays: tuple[Array, ...]) -> Callable[[], tuple[Array, ...]]:
        if self.arrays is None:
            index = self.num_saved
            self.num_saved += 1
            return lambda: self.recall(index)
        self.arrays.append(arrays)
        if len(self.arrays) == self.num_saved:
            raise _Enough
        return lambda: arrays

    def recall(self, index: int) -> tuple[Array, ...]:
        if self.arrays is None:
            self.arrays = []
            with suppress(_Enough):
                self.run(grad_enabled=True)
        return self.arrays[index]

    def run(self, *, grad_enabled: bool) -> Any:
        with _set("recomputation", self), _set("grad_enabled", grad_enabled):
            return self.region(*self.inputs)


def checkpoint(region: Callable[..., Any], *inputs: Value) -> Any:
    """``region(*inputs)``, whose operations save nothing: backward runs it again as far as it needs to."""
    return _Recomputation(region, inputs).run(grad_enabled=grad_enabled())
