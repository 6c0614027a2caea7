"""What the ranks run: ways to accumulate, divide, cast and reduce gradients. Each must give the truth's numbers."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import hpcompat
from hpcompat import MixedPrecisionPolicy
from hpcompat_conformance.on_mindspore.framework import MindSporeFramework
from hpcompat_mindspore import autograd
from ms_models import NUM_OUT, Block, ElementwiseNet, Net, batch, initialize, loss_of, named
from ms_truth import (
    assert_close,
    follow,
    full_gradients,
    full_values,
    mesh_of,
    num_ranks,
    rank,
    train,
    true_gradients,
    wrap,
)


def accumulate(**options: Any) -> None:
    """Two microbatches without sync and one with."""
    model = wrap(initialize(Net()), **options)
    expected = true_gradients(initialize(Net()), steps=(0, 1, 2))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model.set_is_last_backward(step == 2)
        train(model, step=step)
        if step < 2:
            assert all(parameter.grad is None for parameter in named(model).values())
    assert_close(full_gradients(model), expected)


def accumulate_sharded() -> None:
    """Every microbatch reduces; gradients add up on the shards."""
    model = wrap(initialize(Net()))
    for step in range(3):
        train(model, step=step)
    assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1, 2)))


def partial_all_reduce() -> None:
    """HSDP: reduce-scatter every microbatch, all-reduce the last."""
    model = wrap(initialize(Net()), mesh=mesh_of((2, num_ranks() // 2)))
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        train(model, step=step)
    assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1, 2)))


def several_forwards() -> None:
    """Two forwards, then one backward of both."""
    model = wrap(initialize(Net()))
    losses = [loss_of(model, batch(rank(), step=step)) for step in range(2)]
    autograd.backward(losses[0] + losses[1])
    assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1)))


def forward_twice_backward_twice() -> None:
    model = wrap(initialize(Net()))
    losses = [loss_of(model, batch(rank(), step=step)) for step in range(2)]
    for loss in losses:
        autograd.backward(loss)
    assert_close(full_gradients(model), true_gradients(initialize(Net()), steps=(0, 1)))


def unused_parameter(*, fill: bool) -> None:
    """Rank 0 alone uses the last block."""

    class Skipping(Net):
        def construct(self, x: Tensor) -> Tensor:
            layers = list(self.layers)
            for layer in layers if rank() == 0 or not fill else layers[:-1]:
                x = x + layer(x)
            return self.head(x)

    class Truth(Net):
        member = 0

        def construct(self, x: Tensor) -> Tensor:
            layers = list(self.layers)
            for layer in layers if self.member == 0 or not fill else layers[:-1]:
                x = x + layer(x)
            return self.head(x)

    def loss(model: Any, data: Any) -> Tensor:
        return loss_of(model, data)

    model = hpcompat.fully_shard(initialize(Skipping()))
    model.set_reduce_scatter_unused_params(fill)
    train(model)
    total: dict[str, Any] = {}
    for member in range(num_ranks()):
        truth = initialize(Truth())
        truth.member = member
        parameters = named(truth)
        run = mindspore.value_and_grad(lambda *data, truth=truth: loss(truth, data), None, list(parameters.values()))
        _, grads = run(*batch(member))
        for name, grad in zip(parameters, grads, strict=True):
            total[name] = total.get(name, 0) + grad.asnumpy() / num_ranks()
    assert_close(full_gradients(model), total)


def divide(*, factor: float | None = None, op: str | None = None, scale: float | None = None) -> None:
    model = wrap(initialize(Net()))
    for module in (*model.layers, model):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
    if op is not None:
        model.set_reduce_op_type(op)
    if scale is not None:
        model.set_gradient_scaling_factor(scale)
    divisor = factor or (1.0 if op == "sum" else num_ranks())
    train(model)
    assert_close(full_gradients(model), true_gradients(initialize(Net()), divisor=divisor / (scale or 1.0)))


def mixed_precision(param: str, reduce: str | None, *, net: str = "net") -> None:
    """Gradients in ``param``, added in ``reduce``, divided, cast back: bit for bit what numpy gives on two ranks."""
    make = Net if net == "net" else ElementwiseNet
    param_dtype = getattr(mindspore, param)
    reduce_dtype = None if reduce is None else getattr(mindspore, reduce)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    num_in = 6 if net == "net" else NUM_OUT
    model = wrap(initialize(make()), mp_policy=policy)
    data = [batch(member, num_in=num_in) for member in range(num_ranks())]
    autograd.backward(loss_of(model, data[rank()]))
    actual = full_gradients(model)
    assert {p.dtype for p in named(model).values()} == {mindspore.float32}
    low = initialize(make())
    for parameter in named(low).values():
        parameter.set_dtype(param_dtype)
    run = mindspore.value_and_grad(lambda x, y: loss_of(low, (x, y)), None, list(named(low).values()))
    each = [run(x.astype(param_dtype), y)[1] for x, y in data]
    for index, name in enumerate(named(low)):
        grads = [grads[index].astype(reduce_dtype or param_dtype) for grads in each]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        total = (total / num_ranks()).astype(mindspore.float32)
        np.testing.assert_array_equal(actual[name], total.asnumpy(), err_msg=name)


def output_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=mindspore.float16, output_dtype=mindspore.float32)
    model = hpcompat.fully_shard(initialize(Net()), mp_policy=policy)
    assert model(batch(rank())[0]).dtype == mindspore.float32


def inputs_not_cast() -> None:
    policy = MixedPrecisionPolicy(param_dtype=mindspore.float16, cast_forward_inputs=False)
    model = hpcompat.fully_shard(initialize(Block(6, 8)), mp_policy=policy)
    x = batch(rank())[0]
    assert model(x.astype(mindspore.float16)).dtype == mindspore.float16
    with pytest.raises(TypeError):
        model(x)


def main_grad() -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=mindspore.float16, reduce_dtype=mindspore.float32, apply_grad_on_fp32_main_grad=True
    )
    model = wrap(initialize(Net()), mp_policy=policy)
    train(model)
    for parameter in named(model).values():
        assert parameter.grad is None
        assert parameter.main_grad.dtype == mindspore.float32


def penalty_on_shards() -> None:
    """A loss that reads the sharded parameters directly, beside the one that goes through the model."""
    model, truth = wrap(initialize(Net())), initialize(Net())
    train(model)
    autograd.backward(sum(((p * p).sum() for p in named(model).values()), Tensor(0.0)) * 0.5)
    expected = true_gradients(truth)
    for name, parameter in named(truth).items():
        expected[name] = expected[name] + parameter.asnumpy()
    assert_close(full_gradients(model), expected)


def penalty_in_the_same_backward() -> None:
    """Used in its unit and outside of it at once, a parameter would have to show two things. Refused, not wrong; on one
    rank the two are the same.
    """
    model = wrap(initialize(Net()))

    def both(model: Any, data: Any) -> Any:
        return loss_of(model, data) + sum(((p * p).sum() for p in named(model).values()), Tensor(0.0))

    if num_ranks() == 1:
        train(model, loss=both)
        assert_close(full_gradients(model), true_gradients(initialize(Net()), loss=both))
    else:
        with pytest.raises((RuntimeError, ValueError)):
            train(model, loss=both)
    model.reset_iter_state()
    model.zero_grad()
    follow(model, initialize(Net()))


def all_reduce_hook() -> None:
    model = wrap(initialize(Net()))
    model.layers[0].set_all_reduce_hook(lambda grad: grad * 2.0)
    model.layers[1].set_all_reduce_hook(lambda grad: grad.copy_(grad * 3.0))
    train(model)
    expected = true_gradients(initialize(Net()))
    factors = {"layers.0": 2.0, "layers.1": 3.0}
    for name in expected:
        expected[name] = expected[name] * factors.get(".".join(name.split(".")[:2]), 1.0)
    assert_close(full_gradients(model), expected)


def twenty_steps(kind: str) -> None:
    """Losses of 20 steps, sharded against unsharded."""
    models = [wrap(initialize(Net())), initialize(Net())]
    optimizers = [MindSporeFramework().optimizer(model, kind=kind, lr=0.05) for model in models]
    for step in range(20):
        loss = train(models[0], step=step)
        expected = float(loss_of(models[1], batch(rank(), step=step)).asnumpy())
        assert abs(loss - expected) <= 1e-6 * abs(expected), (step, loss, expected)
        for name, grad in true_gradients(models[1], steps=(step,)).items():
            named(models[1])[name]._grad = Tensor(grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_values(models[0]), full_values(models[1]))
