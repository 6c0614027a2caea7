"""Real numbers: all ranks of a world train, and their gradients are those of one process, to the bit if floats can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat.comm import ReduceOp
from hpcompat.placement import Shard
from hpcompat_conformance import numpy_reference as ref
from training import (
    Gradients,
    Net,
    assert_equal,
    batch,
    gradients,
    initialize,
    join,
    single_process,
    train,
    wrap,
    zero_grad,
)

pytestmark = pytest.mark.usefixtures("reference")

NO_PREMUL = frozenset({ReduceOp.SUM, ReduceOp.AVG})
SUM_ONLY = frozenset({ReduceOp.SUM})


def mesh(*shape: int) -> ref.DeviceMesh:
    return ref.init_device_mesh(shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def reduced(
    make: Callable[[], Any],
    *,
    shape: tuple[int, ...],
    step: Callable[[Any, int], None] = lambda model, rank: train(model, batch(rank)),
    wrap: Callable[..., Any] = wrap,
    reductions: frozenset[ReduceOp] = frozenset(ReduceOp),
) -> Gradients:
    """The whole gradients after ``step`` on a mesh of ``shape``; every replica must have the same."""

    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(make()), mesh=mesh(*shape))
        step(model, rank.number)
        return gradients(model)

    shards = ref.World(int(np.prod(shape)), reductions=reductions).run(run)
    replicas = [join(shards[start : start + shape[-1]]) for start in range(0, len(shards), shape[-1])]
    for replica in replicas[1:]:
        assert_equal(replica, replicas[0])
    return replicas[0]


def mean(
    make: Callable[[], Any], num_ranks: int, *, dtype: Any = np.float32, divisor: float | None = None
) -> Gradients:
    batches = [batch(rank, dtype=dtype) for rank in range(num_ranks)]
    return single_process(make, batches, divisor=num_ranks if divisor is None else divisor)


# The average


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_gradients_are_the_mean_over_the_ranks(shape: tuple[int, ...], reshard_after_forward: bool | None) -> None:
    grads = reduced(Net, shape=shape, wrap=partial(wrap, reshard_after_forward=reshard_after_forward))
    assert_equal(grads, mean(Net, int(np.prod(shape))))


@pytest.mark.parametrize(("shape", "size"), [((4,), 2), ((4,), 1), ((4,), 4), ((1, 4), 2), ((2, 2), 2)], ids=str)
def test_resharding_to_a_smaller_group_changes_no_number(shape: tuple[int, ...], size: int) -> None:
    assert_equal(reduced(Net, shape=shape, wrap=partial(wrap, reshard_after_forward=size)), mean(Net, 4))


@pytest.mark.parametrize("reductions", [frozenset(ReduceOp), NO_PREMUL, SUM_ONLY])
def test_a_group_without_averages_averages(reductions: frozenset[ReduceOp]) -> None:
    assert_equal(reduced(Net, shape=(2, 2), reductions=reductions), mean(Net, 4))


@pytest.mark.parametrize("reductions", [frozenset(ReduceOp), NO_PREMUL, SUM_ONLY], ids=["all", "no premul", "sums"])
@pytest.mark.parametrize("factor", [None, 2.0, 8.0])
def test_the_hook_gets_the_same_whatever_the_group_has(reductions: frozenset[ReduceOp], factor: float | None) -> None:
    def step(model: Any, rank: int) -> None:
        if factor is not None:
            model.a.set_gradient_divide_factor(factor)
        model.a.set_all_reduce_hook(lambda shard: np.copyto(shard, np.abs(shard) + 1))
        train(model, batch(rank))

    expected = mean(Net, 4)
    hooked = mean(Net, 4, divisor=factor)
    expected |= {name: np.abs(value) + 1 for name, value in hooked.items() if name.startswith("a.")}
    assert_equal(reduced(Net, shape=(2, 2), step=step, reductions=reductions), expected)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_a_dtype_that_may_overflow_takes_the_split_path(shape: tuple[int, ...]) -> None:
    def make() -> Any:
        return Net(dtype=np.float64)

    grads = reduced(make, shape=shape, step=lambda model, rank: train(model, batch(rank, dtype=np.float64)))
    assert_equal(grads, mean(make, int(np.prod(shape)), dtype=np.float64))
    assert all(grad.dtype == np.float64 for grad in grads.values())


# Uneven shards


def uneven() -> Any:
    """Rows 7, 5, 3 and 1: on four ranks some shards are short and some are empty."""
    return ref.Sequential([ref.Linear(4, 7), ref.Linear(7, 5), ref.Linear(5, 3), ref.Linear(3, 1)])


@pytest.mark.parametrize("shape", [(2,), (4,), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("in_one_unit", [False, True])
def test_uneven_rows(shape: tuple[int, ...], in_one_unit: bool) -> None:
    def wrapped(model: Any, **kwargs: Any) -> Any:
        return hpcompat.fully_shard(model, **kwargs) if in_one_unit else wrap(model, "0", "1", "2", "3", **kwargs)

    assert_equal(reduced(uneven, shape=shape, wrap=wrapped), mean(uneven, int(np.prod(shape))))


def test_the_shapes_of_uneven_shards() -> None:
    def run(rank: ref.Rank) -> list[int]:
        return [len(parameter.data) for _, parameter in wrap(uneven(), "0", "1", mesh=mesh(4)).named_parameters()]

    rows = ref.World(4).run(run)
    assert [row[::2] for row in rows] == [row[1::2] for row in rows], "biases have as many rows as weights"
    assert [row[::2] for row in rows] == [[2, 2, 1, 1], [2, 2, 1, 0], [2, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_another_dim(size: int) -> None:
    def columns(parameter: ref.Parameter) -> Shard | None:
        return Shard(1) if parameter.data.ndim == 2 else None

    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(Net()), mesh=mesh(size), shard_placement_fn=columns)
        train(model, batch(rank.number))
        return gradients(model)

    shards = ref.World(size).run(run)
    weights, biases = (
        [{k: g for k, g in shard.items() if k.endswith(kind)} for shard in shards] for kind in ("weight", "bias")
    )
    assert weights[0]["a.weight"].shape == (4, 4 // size)
    assert_equal({**join(weights, dim=1), **join(biases)}, mean(Net, size))


# Factors


@pytest.mark.parametrize("reductions", [frozenset(ReduceOp), NO_PREMUL, SUM_ONLY], ids=["all", "no premul", "sums"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)], ids=str)
@pytest.mark.parametrize(
    ("configure", "divisor"),
    [
        (lambda layer: layer.set_gradient_divide_factor(1), 1),
        (lambda layer: layer.set_gradient_divide_factor(2), 2),
        (lambda layer: layer.set_gradient_divide_factor(4.0), 4),
        (lambda layer: layer.set_gradient_divide_factor(3.0), 3),
        (lambda layer: layer.set_gradient_divide_factor(300.0), 300),
        (lambda layer: layer.set_gradient_divide_factor(0.25), 0.25),
        (lambda layer: layer.set_reduce_op_type("sum"), 1),
        (lambda layer: (layer.set_reduce_op_type("sum"), layer.set_reduce_op_type("avg")), 4),
        (lambda layer: (layer.set_reduce_op_type("sum"), layer.set_gradient_divide_factor(8.0)), 8),
        (lambda layer: layer.set_force_sum_reduction_for_comms(True), 4),
        (lambda layer: layer.set_gradient_scaling_factor(2.0), 2),
        (lambda layer: (layer.set_gradient_scaling_factor(0.5), layer.set_gradient_divide_factor(1.0)), 2),
    ],
    ids=["1", "2", "4", "3", "300", "quarter", "sum", "avg-again", "sum-and-8", "force-sum", "scale-2", "scale-half"],
)
def test_a_factor_means_the_same_on_every_mesh_and_group(
    configure: Callable[[Any], object], divisor: float, shape: tuple[int, ...], reductions: frozenset[ReduceOp]
) -> None:
    """``scaling * sum / factor`` (RED-10)."""

    def step(model: Any, rank: int) -> None:
        for layer in (model.a, model.b, model.c, model):
            configure(layer)
        train(model, batch(rank))

    grads = reduced(Net, shape=shape, step=step, reductions=reductions)
    for name, expected in mean(Net, 4, divisor=divisor).items():
        rounding = 0 if np.log2(divisor).is_integer() else 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(grads[name], expected, rtol=0, atol=rounding, err_msg=name)


def test_a_factor_that_changes_counts_from_the_next_step_on() -> None:
    def step(model: Any, rank: int) -> None:
        for factor in (8.0, 2.0, 1.0):
            zero_grad(model)
            for layer in (model.a, model.b, model.c, model):
                layer.set_gradient_divide_factor(factor)
            train(model, batch(rank))

    assert_equal(reduced(Net, shape=(2,), step=step), mean(Net, 2, divisor=1))


# Accumulation


def accumulate(model: Any, rank: int, *, num_batches: int = 3, configure: Callable[[Any, bool], None]) -> None:
    for index in range(num_batches):
        configure(model, index == num_batches - 1)
        train(model, batch(rank, step=index))


def sync_last(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def sync_last_and_keep(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def all_reduce_last(model: Any, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def sync_always(model: Any, is_last: bool) -> None:
    model.set_is_last_backward(is_last)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("configure", [sync_last, sync_last_and_keep, all_reduce_last, sync_always])
def test_accumulated_gradients_are_the_sum_over_the_batches(
    shape: tuple[int, ...], configure: Callable[[Any, bool], None]
) -> None:
    num_ranks = int(np.prod(shape))
    grads = reduced(Net, shape=shape, step=partial(accumulate, configure=configure))
    batches = [batch(rank, step=step) for rank in range(num_ranks) for step in range(3)]
    assert_equal(grads, single_process(Net, batches, divisor=num_ranks))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("configure", [sync_last, all_reduce_last])
def test_a_bf16_like_policy_accumulates_in_the_reduce_dtype(
    shape: tuple[int, ...], configure: Callable[[Any, bool], None]
) -> None:
    """2048 + 1 + 1 is 2048 in half precision; the gradients of three batches are added in the reduce dtype."""
    policy = hpcompat.MixedPrecisionPolicy(param_dtype=np.float16, reduce_dtype=np.float32)

    def step(model: Any, rank: int) -> None:
        for index, value in enumerate((2048, 1, 1)):
            configure(model, index == 2)
            train(model, ref.Value(np.full((1, 1), value, np.float32)))

    def make() -> Any:
        return ref.Linear(1, 4, bias=False)

    grads = reduced(make, shape=shape, step=step, wrap=partial(hpcompat.fully_shard, mp_policy=policy))
    np.testing.assert_array_equal(grads["weight"], np.full((4, 1), 2050, np.float32))


# Ways through the model


class Twice(Net):
    def forward(self, x: ref.Value) -> Any:
        return self.head(self.b(self.a(self.a(x))))


class Recomputed(Net):
    def forward(self, x: ref.Value) -> Any:
        return self.head(ref.checkpoint(lambda h: self.c(ref.relu(self.b(h))), ref.checkpoint(self.a, x)))


class Residual(Net):
    def forward(self, x: ref.Value) -> Any:
        x = ref.add(x, self.a(x))
        x = ref.add(x, self.b(x))
        return self.head(ref.add(x, ref.relu(self.c(x))))


@pytest.mark.parametrize("make", [Twice, Recomputed, Residual])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_ways_through_the_model(make: type[Net], shape: tuple[int, ...], reshard_after_forward: bool) -> None:
    def step(model: Any, rank: int) -> None:
        train(model, batch(rank))
        zero_grad(model)
        train(model, batch(rank))  # again: nothing of the step before is in the way

    grads = reduced(make, shape=shape, step=step, wrap=partial(wrap, reshard_after_forward=reshard_after_forward))
    assert_equal(grads, mean(make, int(np.prod(shape))))


def test_several_forwards_before_one_backward() -> None:
    def step(model: Any, rank: int) -> None:
        first, second = model(batch(rank)), model(batch(rank, step=1))
        ref.backward(ref.total(ref.add(first, second)))

    batches = [batch(rank, step=step) for rank in range(2) for step in range(2)]
    assert_equal(reduced(Net, shape=(2,), step=step), single_process(Net, batches, divisor=2))


class HeadApart(Net):
    """Leaves the head to the caller."""

    def forward(self, x: ref.Value) -> Any:
        return self.c(self.b(self.a(x)))


def test_a_loss_by_chunks() -> None:
    """The head runs, backward too, once per chunk of rows, and the rest of the model afterwards (ACC-10)."""

    def by_chunks(model: Any, inputs: ref.Value, check: Callable[[Any], None]) -> None:
        hidden = model(inputs)
        grads = []
        for row in range(3):
            chunk = ref.Value(hidden.data[row : row + 1], requires_grad=True)
            train(model.head, chunk)
            grads.append(chunk.grad)
            check(model)
        ref.backward(hidden, np.concatenate(grads))

    def run(rank: ref.Rank) -> Gradients:
        model = initialize(HeadApart())
        hpcompat.fully_shard([model.c, model.head])
        wrap(model, "a", "b")
        train(model, batch())  # the root must have run before
        zero_grad(model)
        arrived: list[bool] = []
        by_chunks(model, batch(rank.number), lambda model: arrived.append(model.head.weight.grad is not None))
        assert arrived[0], "no final callback is coming: the first chunk's gradient is on the shard"
        return gradients(model)

    truth = initialize(HeadApart())
    for rank in range(2):
        by_chunks(truth, batch(rank), lambda model: None)
    expected = {name: grad / 2 for name, grad in gradients(truth).items()}
    assert_equal(join(ref.World(2).run(run)), expected)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_training_gives_the_parameters_of_one_process(shape: tuple[int, ...]) -> None:
    num_ranks = int(np.prod(shape))

    def update(model: Any) -> None:
        for _, parameter in model.named_parameters():
            parameter.data -= 2.0**-6 * parameter.grad

    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(Residual(dtype=np.float64)), mesh=mesh(*shape))
        for step in range(4):
            zero_grad(model)
            train(model, batch(rank.number, step=step, dtype=np.float64))
            update(model)
        return {name: parameter.data for name, parameter in model.named_parameters()}

    model = initialize(Residual(dtype=np.float64))
    for step in range(4):
        zero_grad(model)
        train(model, *(batch(rank, step=step, dtype=np.float64) for rank in range(num_ranks)))
        for _, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad /= num_ranks
        update(model)
    trained = join(ref.World(num_ranks).run(run)[: shape[-1]])
    for name, parameter in model.named_parameters():
        # No longer integers after the first step: the order of sums shows in the last bit.
        np.testing.assert_allclose(trained[name], parameter.data, rtol=1e-12, err_msg=name)
