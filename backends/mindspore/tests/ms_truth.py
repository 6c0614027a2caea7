"""The truth to compare with: the same model unsharded, in this process alone, over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

import hpcompat
from hpcompat_mindspore import autograd
from hpcompat_mindspore.job import world
from hpcompat_mindspore.mesh import init_device_mesh
from hpcompat_mindspore.param import full_tensor
from ms_models import batch, loss_of, named

Arrays = dict[str, np.ndarray[Any, Any]]
TOLERANCE = 1e-6


def rank() -> int:
    return world().rank()


def num_ranks() -> int:
    return world().size()


def true_gradients(
    model: nn.Cell,
    *,
    steps: Iterable[int] = (0,),
    divisor: float | None = None,
    loss: Callable[..., Tensor] = loss_of,
    batches: Callable[..., Sequence[Tensor]] = batch,
) -> Arrays:
    """The sum over ranks and steps of the gradients, by ``divisor`` or by the number of ranks."""
    trained = {name: parameter for name, parameter in named(model).items() if parameter.requires_grad}
    run = mindspore.value_and_grad(lambda *data: loss(model, data), None, list(trained.values()))
    total: Arrays = {}
    for step in steps:
        for member in range(num_ranks()):
            _, grads = run(*batches(member, step=step))
            for name, grad in zip(trained, grads, strict=True):
                total[name] = total.get(name, np.float64(0)) + grad.asnumpy().astype(np.float64)
    return {name: (grad / (divisor or num_ranks())).astype(np.float32) for name, grad in total.items()}


def train(model: Any, *, step: int = 0, loss: Callable[..., Tensor] = loss_of, batches: Any = batch) -> float:
    """Forward and backward of this rank's batch; the loss."""
    value = loss(model, batches(rank(), step=step))
    autograd.backward(value)
    return float(value.asnumpy())


def full_gradients(model: nn.Cell) -> Arrays:
    """Whole gradients of the parameters that have one. Collective."""
    found = {
        name: parameter for name, parameter in named(model).items() if getattr(parameter, "grad", None) is not None
    }
    return {name: full_tensor(parameter, parameter.grad).asnumpy() for name, parameter in found.items()}


def full_values(model: nn.Cell) -> Arrays:
    return {name: full_tensor(parameter).asnumpy() for name, parameter in named(model).items()}


def zero_grad(model: nn.Cell) -> None:
    for parameter in named(model).values():
        parameter.grad = None


def assert_close(actual: Mapping[str, Any], expected: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> None:
    """The same names, and values within ``tolerance`` of the largest of each array."""
    assert actual.keys() == expected.keys(), f"{sorted(actual)} != {sorted(expected)}"
    for name, value in expected.items():
        assert actual[name].shape == value.shape, (name, actual[name].shape, value.shape)
        scale = max(float(np.abs(value).max(initial=0)), 1e-12)
        worst = float(np.abs(actual[name].astype(np.float64) - value.astype(np.float64)).max(initial=0)) / scale
        assert worst <= tolerance, f"{name}: off by {worst:.3g} of its largest element"


def sgd(parameters: Iterable[Parameter], gradients: Iterable[Any], *, lr: float = 0.1) -> None:
    """Plain gradient descent, one float32 operation after another."""
    with autograd.no_grad():
        for parameter, grad in zip(parameters, gradients, strict=True):
            if grad is not None:
                parameter.copy_(parameter - lr * (grad if isinstance(grad, Tensor) else Tensor(grad)))


def wrap(model: Any, *, root: dict[str, Any] | None = None, **options: Any) -> Any:
    """A unit for every block, one for the root."""
    for layer in model.layers:
        hpcompat.fully_shard(layer, **options)
    return hpcompat.fully_shard(model, **{**options, **(root or {})})


def follow(model: Any, truth: Any, *, num_steps: int = 3, **options: Any) -> None:
    """Train both by hand; losses and gradients must agree at every step."""
    for step in range(num_steps):
        expected = true_gradients(truth, steps=(step,), **options)
        expected_loss = float(loss_of(truth, batch(rank(), step=step)).asnumpy())
        actual_loss = train(model, step=step)
        assert abs(actual_loss - expected_loss) <= 1e-6 * abs(expected_loss), (actual_loss, expected_loss)
        assert_close(full_gradients(model), expected)
        sgd(named(model).values(), [parameter.grad for parameter in named(model).values()])
        sgd(named(truth).values(), [expected.get(name) for name in named(truth)])
        zero_grad(model)
    assert_close(full_values(model), full_values(truth))


def mesh_of(shape: tuple[int, ...]) -> Any:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("CPU", shape, mesh_dim_names=names)
