"""What the tests of the scheduler train: small networks of the reference, with numbers that floats add exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

import hpcompat
from hpcompat_conformance import numpy_reference as ref

Result = TypeVar("Result")
Gradients = dict[str, np.ndarray[Any, Any]]


class Net(ref.Module):
    """Linear layers ``a``, ``b``, ``c`` and ``head``: the first three get a unit each, the last stays with the root."""

    def __init__(self, size: int = 4, *, dtype: Any = np.float32) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (ref.Linear(size, size, dtype=dtype) for _ in range(4))

    def forward(self, x: ref.Value) -> ref.Value:
        return self.head(self.c(self.b(self.a(x))))


class Stack(ref.Module):
    """Layers ``a``, ``b``, ``c``; the root has no parameters of its own."""

    def __init__(self, size: int = 4, *, dtype: Any = np.float32) -> None:
        super().__init__()
        self.a, self.b, self.c = (ref.Linear(size, size, dtype=dtype) for _ in range(3))

    def forward(self, x: ref.Value) -> ref.Value:
        return self.c(self.b(self.a(x)))


def initialize(model: ref.Module, *, seed: int = 0) -> Any:
    """``model`` with small integers as parameters, the same for every rank."""
    numbers = np.random.default_rng(seed)
    for parameter in dict.fromkeys(parameter for _, parameter in model.named_parameters()):
        parameter.data[...] = numbers.integers(-2, 3, parameter.data.shape)
    return model


def wrap(model: ref.Module, *names: str, root: bool = True, **kwargs: Any) -> Any:
    """A unit for each child of ``model`` in ``names`` (default: a, b, c), then one for the root."""
    for name in names or ("a", "b", "c"):
        hpcompat.fully_shard(getattr(model, name), **kwargs)
    return hpcompat.fully_shard(model, **kwargs) if root else model


def batch(
    rank: int = 0, *, step: int = 0, size: int = 4, dtype: Any = np.float32, requires_grad: bool = True
) -> ref.Value:
    """Another small batch of integers for every rank and step."""
    numbers = np.random.default_rng([rank, step, 17])
    return ref.Value(numbers.integers(-2, 3, (3, size)).astype(dtype), requires_grad=requires_grad)


def train(model: ref.Module, *batches: ref.Value) -> None:
    """Forward and backward of each batch."""
    for inputs in batches:
        ref.backward(ref.total(model(inputs)))


def gradients(model: ref.Module) -> Gradients:
    """By name; ``None`` where there is none."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def zero_grad(model: ref.Module) -> None:
    for _, parameter in model.named_parameters():
        parameter.grad = parameter.main_grad = None


def single_process(make: Callable[[], ref.Module], batches: Iterable[ref.Value], *, divisor: float) -> Gradients:
    """The truth: the sum over ``batches`` of what the model gives without sharding, divided once."""
    model = initialize(make())
    train(model, *batches)
    return {name: grad / divisor for name, grad in gradients(model).items() if grad is not None}


def join(shards: list[Gradients], *, dim: int = 0) -> Gradients:
    """Whole gradients from every rank's shards; without those that no rank has."""
    pieces = {name: [shard[name] for shard in shards] for name in shards[0]}
    return {name: np.concatenate(of, axis=dim) for name, of in pieces.items() if not all(piece is None for piece in of)}


def assert_equal(actual: Gradients, expected: Gradients) -> None:
    """To the last bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def units(model: ref.Module) -> Iterator[Any]:
    """The units of ``model``, in pre-order."""
    found = (module._unit() for _, module in model.named_modules() if isinstance(module, hpcompat.HSDPModule))
    return iter(dict.fromkeys(found))
