"""What the ranks run: ways to run backward and to fail. Each must give the truth's numbers."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

import hpcompat
from hpcompat_mindspore import autograd
from hpcompat_mindspore.param import full_tensor, param_of
from ms_models import Net, batch, initialize, loss_of, named
from ms_truth import (
    assert_close,
    follow,
    full_gradients,
    full_values,
    rank,
    sgd,
    true_gradients,
    wrap,
    zero_grad,
)


def value_and_grad(kind: str) -> None:
    """Both ways of training in MindSpore's style, over steps, with an auxiliary output."""
    autograd.stop_recording()
    model, truth = wrap(initialize(Net())), initialize(Net())
    members = list(named(model).values())
    function = lambda *data: (loss_of(model, data), data[0])  # noqa: E731
    if kind == "ours":
        run = autograd.value_and_grad(function, members, has_aux=True)
    else:
        run = mindspore.value_and_grad(function, None, members, has_aux=True)
    for step in range(3):
        expected = true_gradients(truth, steps=(step,))
        data = batch(rank(), step=step)
        (_, aux), grads = run(*data)
        assert aux.shape == data[0].shape
        wholes = {n: full_tensor(p, g).asnumpy() for (n, p), g in zip(named(model).items(), grads, strict=True)}
        assert_close(wholes, expected)
        assert_close(
            {n: p.grad.asnumpy() for n, p in named(model).items()},
            dict(zip(named(model), (g.asnumpy() for g in grads), strict=True)),
            tolerance=0,
        )
        sgd(members, grads)
        sgd(named(truth).values(), expected.values())


def no_grad_evaluation() -> None:
    model, truth = wrap(initialize(Net())), initialize(Net())
    with autograd.no_grad():
        output = model(batch(rank())[0])
    assert not autograd.requires_grad(output)
    np.testing.assert_allclose(output.asnumpy(), truth(batch(rank())[0]).asnumpy(), rtol=1e-6)
    assert [p.shape for p in named(model.layers[0]).values()] == [
        param_of(p).shard_shape for p in named(model.layers[0]).values()
    ]
    follow(model, truth)


class Boom(Exception):
    pass


def failing(where: str) -> None:
    """An exception in forward, in a hook during backward, or in the all-reduce hook; then training goes on."""
    model, truth = wrap(initialize(Net())), initialize(Net())
    state = {"armed": True}

    def explode(*args: Any) -> None:
        if state["armed"]:
            raise Boom(where)

    def loss(data: Any) -> Tensor:
        if where == "backward":
            x = model.layers[0](data[0])
            x.register_hook(explode)
            return loss_of(lambda value: model.head(model.layers[1](value)), (x, data[1]))
        return loss_of(model, data)

    if where == "forward":
        model.layers[1].down.register_forward_pre_hook(lambda cell, args: explode())
    if where == "reduction":
        model.layers[1].set_all_reduce_hook(explode)
    if where == "backward":

        class Through(nn.Cell):
            def __init__(self) -> None:
                super().__init__()

            def construct(self, x: Tensor) -> Tensor:
                x = x * 1.0
                x.register_hook(explode) if autograd.requires_grad(x) else None
                return x

        inner = Through()
        model.layers[1].up.register_forward_hook(lambda cell, args, output: inner(output))
    for _ in range(2):
        state["armed"] = True
        with pytest.raises(Boom):
            autograd.backward(loss_of(model, batch(rank())))
        state["armed"] = False
        model.reset_iter_state()
        zero_grad(model)
        follow(model, truth, num_steps=1)


def train_one_step_cell(optimizer: str) -> None:
    """MindSpore's own training loop: TrainOneStepCell, WithLossCell and an optimizer that updates in place."""
    autograd.stop_recording()
    model, truth = wrap(initialize(Net())), initialize(Net())

    def make(net: Any) -> Any:
        options = {"momentum": 0.9} if optimizer == "Momentum" else {}
        step = getattr(nn, optimizer)(list(named(net).values()), learning_rate=0.05, **options)
        return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), step)

    ours, theirs = make(model), make(truth)
    for step in range(3):
        # All ranks see one batch, so that the mean over the ranks is that of one process.
        data = batch(0, step=step)
        actual, expected = ours(*data).asnumpy(), theirs(*data).asnumpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert_close(full_values(model), full_values(truth), tolerance=1e-5)


def grad_of_a_cell() -> None:
    """``mindspore.value_and_grad`` of a wrapped cell itself."""
    autograd.stop_recording()

    class WithLoss(Net):
        def construct(self, x: Tensor, y: Tensor) -> Tensor:
            return ((super().construct(x) - y) ** 2).mean()

    model, truth = wrap(initialize(WithLoss())), initialize(WithLoss())
    run = mindspore.value_and_grad(model, None, list(named(model).values()))
    expected = true_gradients(truth, loss=lambda cell, data: cell(*data))
    for _ in range(2):
        _, grads = run(*batch(rank()))
        assert_close(
            {n: full_tensor(p, g).asnumpy() for (n, p), g in zip(named(model).items(), grads, strict=True)}, expected
        )


def sync_off_is_refused_by_mindspores_own() -> None:
    model = wrap(initialize(Net()))
    members = list(named(model).values())
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="gradient sync is off"):
        mindspore.value_and_grad(lambda *data: loss_of(model, data), None, members)(*batch(rank()))
    model.reset_iter_state()
    run = autograd.value_and_grad(lambda *data: loss_of(model, data), members)
    assert run(*batch(rank(), step=0))[1] == (None,) * len(members)
    model.set_requires_gradient_sync(True)
    _, grads = run(*batch(rank(), step=1))
    wholes = {n: full_tensor(p, g).asnumpy() for (n, p), g in zip(named(model).items(), grads, strict=True)}
    assert_close(wholes, true_gradients(initialize(Net()), steps=(0, 1)))


def value_and_grad_while_recording() -> None:
    """MindSpore switches recording off after its value_and_grad; the next forward and backward must not notice."""
    model, truth = wrap(initialize(Net())), initialize(Net())
    members = list(named(model).values())
    mindspore.value_and_grad(lambda *data: loss_of(model, data), None, members)(*batch(rank()))
    zero_grad(model)
    follow(model, truth)


def backward_without_recording() -> None:
    autograd.stop_recording()
    model = wrap(initialize(Net()))
    loss = loss_of(model, batch(rank()))
    with pytest.raises(RuntimeError, match="enable_mindspore_backward_compat"):
        autograd.backward(loss)


def backward_compat() -> None:
    """``loss.backward()`` and ``parameter.grad`` on sharded and on plain parameters."""
    autograd.enable_backward_compat()
    model = initialize(Net())
    hpcompat.fully_shard(model, ignored_params={model.head.weight})
    loss_of(model, batch(rank())).backward()
    expected = true_gradients(initialize(Net()))
    assert tuple(model.head.weight.grad.shape) == model.head.weight.shape
    model.head.weight.grad = None
    assert_close(full_gradients(model), {n: g for n, g in expected.items() if n != "head.weight"})
