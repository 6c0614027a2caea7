"""What the ranks run to check that each known trap of MindSpore on the CPU is stepped around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hpcompat
from hpcompat import MixedPrecisionPolicy
from hpcompat_mindspore import autograd
from hpcompat_mindspore.param import param_of
from ms_models import Net, batch, initialize, loss_of, named
from ms_truth import assert_close, full_gradients, full_values, rank, train, true_gradients, wrap


class Transposed(nn.Cell):
    """``x @ w.T``: the weight's gradient is a view, which the engine accumulates wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((5, 6), np.float32)), name="weight")
        self.scale = nn.Dense(6, 6, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return ops.matmul(self.scale(x), self.weight.T)


def accumulation_into_views(*, sync: bool) -> None:
    model = hpcompat.fully_shard(initialize(Transposed()))
    for step in range(3):
        model.set_requires_gradient_sync(sync or step == 2)
        train(model, step=step)
    assert_close(full_gradients(model), true_gradients(initialize(Transposed()), steps=(0, 1, 2)))


def ignored_parameter_with_a_view() -> None:
    """Parameters that no unit manages are added up by the engine: the first gradient must not be a view."""
    model, truth = initialize(Transposed()), initialize(Transposed())
    hpcompat.fully_shard(model, ignored_params={model.weight})
    total = np.zeros(model.weight.shape, np.float32)
    run = mindspore.value_and_grad(lambda *data: loss_of(truth, data), None, [truth.weight])
    for step in range(3):
        train(model, step=step)
        total += run(*batch(rank(), step=step))[1][0].asnumpy()
    np.testing.assert_allclose(model.weight._grad.asnumpy(), total, rtol=1e-6, atol=1e-7)


def _slow(value: Tensor) -> Tensor:
    """``value`` behind a queue of work."""
    busy = Tensor(np.eye(400, dtype=np.float32))
    for _ in range(8):
        busy = ops.matmul(busy, busy)
    return value + busy[0, 1]


UPDATES: dict[str, Callable[[Parameter, Tensor], Any]] = {
    "copy_": lambda parameter, value: parameter.copy_(value),
    "slice": lambda parameter, value: parameter.__setitem__(slice(None), value),
    "assign": lambda parameter, value: ops.assign(parameter, value),
    "assign_add": lambda parameter, value: ops.assign_add(parameter, value - parameter),
    "set_data": lambda parameter, value: parameter.set_data(value),
    "data": lambda parameter, value: setattr(parameter, "data", value),
}


def update_is_seen(how: str) -> None:
    """A step written in any way that works is in the next gather, even if it still waits in the queue."""
    model = wrap(initialize(Net()))
    train(model)
    target = named(initialize(Net(), seed=5))
    with autograd.no_grad():
        for name, parameter in named(model).items():
            shard = Tensor(np.ascontiguousarray(param_of(parameter).cut(target[name].asnumpy())))
            if shard.size:
                UPDATES[how](parameter, _slow(shard))
        output = model(batch(rank())[0])
    expected = initialize(Net(), seed=5)(batch(rank())[0])
    np.testing.assert_allclose(output.asnumpy(), expected.asnumpy(), rtol=1e-5, atol=1e-6)
    assert_close(full_values(model), {name: value.asnumpy() for name, value in target.items()}, tolerance=1e-6)


def gradients_of_a_slow_backward() -> None:
    """Gradients are reduced when they are finished, not when they are queued."""

    class Slow(Net):
        def construct(self, x: Tensor) -> Tensor:
            return super().construct(_slow(x))

    model, truth = wrap(initialize(Slow())), initialize(Slow())

    def loss(cell: Any, data: Any) -> Tensor:
        return _slow(loss_of(cell, data))

    train(model, loss=loss)
    assert_close(full_gradients(model), true_gradients(truth, loss=loss))


def data_changes_behind_the_queue() -> None:
    """Units that reshard in backward without a gradient of their own to wait for: frozen ones, and several forwards."""
    models = [initialize(Net()) for _ in range(2)]
    for model in models:
        for layer in (model.layers[1], model.layers[2]):
            for parameter in layer.get_parameters():
                parameter.requires_grad = False
    wrap(models[0])
    for step in range(3):
        losses = [loss_of(models[0], batch(rank(), step=2 * step + i)) for i in range(2)]
        autograd.backward(losses[0] + losses[1])
        assert_close(full_gradients(models[0]), true_gradients(models[1], steps=(2 * step, 2 * step + 1)))
        models[0].zero_grad()


def exceptions_with_queued_callbacks() -> None:
    """A backward that raises after a final callback has been queued used to end the process in a later forward."""
    model = wrap(initialize(Net()))
    state = {"armed": False}

    def explode(grad: Tensor) -> None:
        if state["armed"]:
            raise KeyError("here")

    for attempt in range(12):
        state["armed"] = attempt % 2 == 0
        x, y = batch(rank())
        source = Parameter(x, name="x")
        entered = source * 1.0
        entered.register_hook(explode)
        loss = ((model(entered) - y) ** 2).mean()
        try:
            autograd.backward(loss)
            assert not state["armed"]
        except KeyError:
            assert state["armed"]
            model.reset_iter_state()
        model.zero_grad()


def hooks_on_frozen_parameters() -> None:
    """MindSpore refuses hooks on them; wrapping must not need one."""
    model = initialize(Net())
    for parameter in named(model).values():
        parameter.requires_grad = False
    wrap(model)
    model(batch(rank())[0]).asnumpy()


def no_collectives_of_mindspore() -> None:
    """On the CPU they lack operations and were seen to give wrong sums: none of them may be called."""
    called: list[str] = []

    def forbid(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: called.append(name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (mindspore.mint.distributed, mindspore.communication.comm_func):
            for name in module.__all__:
                patch.setattr(module, name, forbid(name))
        train(wrap(initialize(Net())))
    assert called == []


def recomputation(*, inner: bool) -> None:
    """Activation checkpointing; the reentrant kind works with value_and_grad only."""
    models = [initialize(Net()) for _ in range(2)]
    for layer in models[0].layers:
        (layer.up if inner else layer).recompute(use_reentrant=False)
    wrap(models[0])
    train(models[0])
    assert_close(full_gradients(models[0]), true_gradients(models[1]))


def remembered_shapes(*, dtype: str | None) -> None:
    """MindSpore's older operators remember the shape and dtype of a parameter; the step meets another one."""
    policy = MixedPrecisionPolicy(param_dtype=None if dtype is None else getattr(mindspore, dtype))
    model, truth = wrap(initialize(Net()), mp_policy=policy), initialize(Net())
    members = list(named(model).values())
    step = nn.SGD(members, learning_rate=0.1)
    for number in range(2):
        train(model, step=number)
        expected = full_values(model)
        for name, grad in full_gradients(model).items():
            expected[name] = expected[name] - np.float32(0.1) * grad
        step(tuple(parameter.grad for parameter in members))
        assert_close(full_values(model), expected, tolerance=1e-6)
        model.zero_grad()
    with autograd.no_grad():
        model(batch(rank())[0])
        model.reshard()  # the root stays whole after forward
        for name, parameter in named(model).items():
            ops.assign(parameter, Tensor(np.ascontiguousarray(param_of(parameter).cut(named(truth)[name].asnumpy()))))
        model.layers[0].unshard()
        assert model.layers[0].up.bias.shape == (10,)
        assert ops.bias_add(
            Tensor(np.zeros((2, 10), np.float32)), model.layers[0].up.bias.astype(mindspore.float32)
        ).shape == (2, 10)
        model.layers[0].reshard()
    assert_close(full_values(model), full_values(truth), tolerance=0)


def gradient_shared_with_another(*, ignored: bool = False) -> None:
    """``x + w`` hands one gradient to both: adding it up must not change the other."""

    class Shift(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.shift = Parameter(Tensor(np.zeros((4, 5), np.float32)), name="shift")
            self.inner = nn.Dense(6, 5)

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.shift

    model, truth = initialize(Shift()), initialize(Shift())
    hpcompat.fully_shard(model, ignored_params={model.shift} if ignored else None)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        train(model, step=step)
    expected = true_gradients(truth, steps=(0, 1))
    actual = full_gradients(model)
    if ignored:
        assert model.shift._grad is not None
        actual["shift"] = expected["shift"]
    assert_close(actual, expected)
