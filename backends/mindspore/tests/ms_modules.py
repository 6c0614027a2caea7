"""What the ranks run: ways to wrap and to hold modules. Each must give the truth's numbers."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hpcompat
from hpcompat import Shard
from hpcompat_mindspore import autograd
from hpcompat_mindspore.param import param_of
from ms_models import NUM_OUT, Block, Net, TiedNet, batch, initialize, loss_of, named
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
    zero_grad,
)


def plain(*, hidden: int = 10, **options: Any) -> None:
    follow(wrap(initialize(Net(hidden=hidden)), **options), initialize(Net(hidden=hidden)))


def hsdp(shape: tuple[int, int], **options: Any) -> None:
    plain(mesh=mesh_of(shape), **options)


def root_only() -> None:
    follow(hpcompat.fully_shard(initialize(Net())), initialize(Net()))


def shard_dim(dim: int) -> None:
    def place(parameter: Parameter) -> Shard | None:
        return Shard(dim) if parameter.ndim > 1 and parameter.shape[dim] % num_ranks() == 0 else None

    plain(hidden=8, shard_placement_fn=place)


def module_list() -> None:
    model = initialize(Net())
    hpcompat.fully_shard([model.layers[0], model.layers[1]])
    hpcompat.fully_shard([model.layers[2], model.head])
    follow(hpcompat.fully_shard(model), initialize(Net()))


def frozen() -> None:
    models = [initialize(Net()) for _ in range(2)]
    for model in models:
        for parameter in model.layers[1].get_parameters():
            parameter.requires_grad = False
    follow(wrap(models[0]), models[1])


def replicate() -> None:
    model = initialize(Net(hidden=3))
    for layer in model.layers:
        hpcompat.replicate(layer)
    follow(hpcompat.replicate(model), initialize(Net(hidden=3)))
    assert isinstance(model, hpcompat.ReplicateModule)
    assert all(tuple(parameter.shape) == param_of(parameter).layout.shape for parameter in named(model).values())


def replicate_beside_sharded() -> None:
    model = initialize(Net())
    hpcompat.replicate(model.layers[0])
    hpcompat.fully_shard(model.layers[1])
    follow(hpcompat.fully_shard(model), initialize(Net()))


def thawed_later() -> None:
    models = [initialize(Net()) for _ in range(2)]
    for model in models:
        model.head.weight.requires_grad = False
    wrap(models[0])
    follow(models[0], models[1], num_steps=1)
    for model in models:
        model.head.weight.requires_grad = True
    follow(*models, num_steps=2)


def tied() -> None:
    model = initialize(TiedNet())
    hpcompat.fully_shard(model.inner)
    hpcompat.fully_shard(model)
    assert model.first.weight is model.last.weight
    follow(model, initialize(TiedNet()))


def ignored() -> None:
    model = initialize(Net())
    ignored_params = {model.head.weight, model.head.bias}
    wrap(model, ignored_params=ignored_params)
    assert all(param_of(parameter) is None for parameter in ignored_params)
    train(model)
    expected = true_gradients(initialize(Net()))
    assert_close(full_gradients(model), {n: g for n, g in expected.items() if not n.startswith("head")})


def replicated(shape: tuple[int, ...]) -> None:
    model = initialize(Net())
    mesh = mesh_of(shape)
    for layer in model.layers:
        hpcompat.fully_shard(layer, mesh=mesh, replicate_params={layer.up.bias})
    hpcompat.fully_shard(model, mesh=mesh, replicate_params={model.head.weight})
    assert model.head.weight.shape == (NUM_OUT, 6)
    follow(model, initialize(Net()))


def prefetch() -> None:
    model = wrap(initialize(Net()))
    first, second, third = model.layers
    model.set_modules_to_forward_prefetch([first])
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    follow(model, initialize(Net()))


def separate_group() -> None:
    model = wrap(initialize(Net()))
    model.set_separate_reduce_scatter_group()
    follow(model, initialize(Net()))


def several_dtypes() -> None:
    """float16 and float32 parameters in one unit travel together."""

    def make() -> Any:
        model = initialize(Net())
        model.head.weight.set_dtype(mindspore.float16)
        model.head.bias.set_dtype(mindspore.float16)
        return model

    def loss(model: Any, data: Any) -> Tensor:
        return ((model(data[0]).astype(mindspore.float32) - data[1]) ** 2).mean()

    class Cast(nn.Cell):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def construct(self, x: Tensor) -> Tensor:
            for layer in self.inner.layers:
                x = x + layer(x)
            return self.inner.head(x.astype(mindspore.float16))

    model, truth = Cast(make()), Cast(make())
    hpcompat.fully_shard(model)
    train(model, loss=loss)
    assert_close(full_gradients(model), true_gradients(truth, loss=loss), tolerance=1e-3)


def set_data_by_hand() -> None:
    """Values put on sharded parameters by set_data, as a loaded checkpoint does, are taken up."""
    model = wrap(initialize(Net()))
    target = named(initialize(Net(), seed=3))
    for name, parameter in named(model).items():
        whole = target[name].asnumpy()
        parameter.set_data(Tensor(param_of(parameter).cut(whole).copy()), slice_shape=True)
    follow(model, initialize(Net(), seed=3))


def another_parameter(when: str) -> None:
    """The object that was sharded must stay: another one would be trained by each rank for itself."""
    model = wrap(initialize(Net()))
    if when == "after a step":
        train(model)
        zero_grad(model)
    weight, bias = model.head.weight, model.head.bias
    model.head.weight = Parameter(Tensor(weight.asnumpy()), name="head.weight")
    with pytest.raises(TypeError, match=r"parameter 'head\.weight' to stay the object .* got Parameter in its place"):
        train(model)
    model.reset_iter_state()
    model.head.weight, model.head.bias = weight, None
    with pytest.raises(TypeError, match=r"parameter 'head\.bias' to stay the object .* got NoneType in its place"):
        train(model)
    model.reset_iter_state()
    model.head.bias = bias
    follow(model, initialize(Net()))


def meta_device() -> None:
    with mindspore.DeviceCtx("meta"):
        model = Net()
    wrap(model)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        train(model)
    model.reset_iter_state()
    model.to_empty(device="CPU")
    whole = {name: Tensor(value.copy()) for name, value in full_values(initialize(Net())).items()}
    model.load_state_dict(whole)
    follow(model, initialize(Net()))


def state_dict(**options: Any) -> None:
    model = wrap(initialize(Net()), **options)
    train(model)
    shards = {name: value.asnumpy().copy() for name, value in model.state_dict().items()}
    for name, parameter in named(model).items():
        assert shards[name].shape == param_of(parameter).shard_shape
    other = wrap(initialize(Net(), seed=1), **options)
    train(other)
    hpcompat.load_local_state_dict(other, {name: Tensor(value) for name, value in shards.items()})
    assert_close(full_values(other), full_values(initialize(Net())), tolerance=0)
    other.load_state_dict(wrap(initialize(Net(), seed=3), **options).state_dict())
    assert_close(full_values(other), full_values(initialize(Net(), seed=3)), tolerance=0)
    whole = {name: Tensor(value.copy()) for name, value in full_values(initialize(Net(), seed=2)).items()}
    other.load_state_dict(whole)
    assert_close(full_values(other), full_values(initialize(Net(), seed=2)), tolerance=0)
    zero_grad(other)
    follow(other, initialize(Net(), seed=2))
    with pytest.raises(ValueError, match=r"size mismatch for head\.bias"):
        other.load_state_dict({**whole, "head.bias": Tensor(np.zeros(77, np.float32))})
    if num_ranks() > 1:
        refuse_parts(other, shards)


def refuse_parts(model: Any, shards: dict[str, Any]) -> None:
    """A file that holds one rank's part would give every rank the same rows: wrapped or not, nothing of it counts."""
    before = full_values(model)
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for head\.weight: .*load_local_state_dict"):
        model.load_state_dict({name: Tensor(value) for name, value in shards.items()})
    with pytest.raises(ValueError, match=r"size mismatch for head\.weight: expected a value of the local shape"):
        hpcompat.load_local_state_dict(model, {name: Tensor(value) for name, value in before.items()})
    assert_close(full_values(model), before, tolerance=0)
    plain = initialize(Net())
    hpcompat.fully_shard(plain.head)
    values = {name: Tensor(parameter.asnumpy() + 1) for name, parameter in named(plain).items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        plain.load_state_dict(values)
    hpcompat.load_local_state_dict(plain, values)
    plain.load_state_dict({name: Tensor(value) for name, value in before.items()})
    assert_close(full_values(plain), before, tolerance=0)


def methods() -> None:
    """A method other than construct, gathered around."""

    class WithMethod(Block):
        def project(self, x: Tensor) -> Tensor:
            return self.down(ops.relu(self.up(x)))

    model = initialize(WithMethod(6, 8))
    truth = initialize(WithMethod(6, 8))
    hpcompat.fully_shard(model)
    hpcompat.register_fsdp_forward_method(model, "project")
    loss = lambda cell, data: (cell.project(data[0]) ** 2).mean()  # noqa: E731
    train(model, loss=loss)
    assert_close(full_gradients(model), true_gradients(truth, loss=loss))


def sliced_container() -> None:
    model = nn.SequentialCell(nn.Dense(6, 6), nn.Dense(6, 6))
    hpcompat.fully_shard(model)
    part = model[0:1]
    assert not isinstance(part, hpcompat.HSDPModule)


def unshard_by_hand() -> None:
    model = wrap(initialize(Net()))
    layer = model.layers[0]
    whole = named(initialize(Net()).layers[0])
    handle = layer.unshard(async_op=True)
    handle.wait()
    for name, parameter in named(layer).items():
        assert parameter.shape == whole[name].shape
    layer.reshard()
    for parameter in named(layer).values():
        assert parameter.shape == param_of(parameter).shard_shape
    follow(model, initialize(Net()))


def statistics_stay_whole() -> None:
    """Batch norm's statistics are parameters in MindSpore; they are kept as buffers, and forward updates them."""

    class Normed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = nn.Dense(6, 5), nn.BatchNorm1d(5)

        def construct(self, x: Tensor) -> Tensor:
            return self.norm(self.dense(x))

    def make() -> Any:
        model = Normed()
        for parameter in model.trainable_params():
            parameter.set_data(Tensor(np.full(parameter.shape, 0.5, np.float32)))
        return model.set_train()

    model, truth = hpcompat.fully_shard(make()), make()
    assert param_of(model.norm.moving_mean) is None
    train(model)
    loss_of(truth, batch(rank()))
    for name in ("moving_mean", "moving_variance"):
        actual, expected = getattr(model.norm, name).asnumpy(), getattr(truth.norm, name).asnumpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def is_collected() -> None:
    """A model that nobody holds any more is freed with its shards."""
    import gc
    import weakref

    model = wrap(initialize(Net()))
    train(model)
    flat = weakref.ref(model.layers[0]._unit().groups[0].tensors._flat)
    cell = weakref.ref(model)
    assert flat() is not None
    del model
    gc.collect()
    assert cell() is None
    assert flat() is None


def only_shards_are_alive() -> None:
    """Memory after forward with reshard and after backward, by weak references to every whole buffer."""
    import gc
    import weakref

    from hpcompat_mindspore.param import ShardedParam

    buffers: list[Any] = []
    show_whole = ShardedParam.show_whole

    def recording(self: ShardedParam) -> None:
        buffers.append((self.name, weakref.ref(self.whole_data)))
        show_whole(self)

    ShardedParam.show_whole = recording  # type: ignore[method-assign]
    try:
        model = wrap(initialize(Net()), reshard_after_forward=True)
        loss = loss_of(model, batch(rank()))
        autograd.executor.sync()
        gc.collect()
        assert len(buffers) == len(named(model))
        assert [name for name, buffer in buffers if buffer() is not None] == []
        autograd.backward(loss)
        autograd.executor.sync()
        gc.collect()
        assert [name for name, buffer in buffers if buffer() is not None] == []
    finally:
        ShardedParam.show_whole = show_whole  # type: ignore[method-assign]
    for parameter in named(model).values():
        assert parameter.shape == param_of(parameter).shard_shape
        assert parameter._grad is None


def custom_comms() -> None:
    from hpcompat_mindspore.collectives import ProcessGroupAllGather, ProcessGroupReduceScatter

    calls: list[str] = []

    class Gather(ProcessGroupAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("gather")
            return super().__call__(*args, **kwargs)

    class Scatter(ProcessGroupReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("scatter")
            return super().__call__(*args, **kwargs)

    model = wrap(initialize(Net()))
    for module in (*model.layers, model):
        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Scatter())
    follow(model, initialize(Net()), num_steps=2)
    assert calls.count("scatter") == (8 if num_ranks() > 1 else 0)
