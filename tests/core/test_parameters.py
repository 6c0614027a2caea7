"""Which parameters take part, and how: frozen, tied, ignored, replicated, unused; on which mesh, with whose comms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat.errors import UserError
from hpcompat.placement import Shard
from hpcompat_conformance import numpy_reference as ref
from hpcompat_conformance.numpy_reference.collectives import AllGather, ReduceScatter
from training import (
    Gradients,
    Net,
    Stack,
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


def mean(make: Any, num_ranks: int = 2, **kwargs: int) -> Gradients:
    return single_process(make, [batch(rank, **kwargs) for rank in range(num_ranks)], divisor=num_ranks)


def freeze(module: ref.Module, *, frozen: bool = True) -> None:
    for _, parameter in module.named_parameters():
        parameter.requires_grad = not frozen


# Frozen


def test_frozen_parameters_get_no_gradient_until_they_are_unfrozen() -> None:
    def run(rank: ref.Rank) -> list[Gradients]:
        model = initialize(Net())
        freeze(model.b)
        wrap(model)
        found = []
        for frozen in (True, False, True):
            freeze(model.b, frozen=frozen)
            zero_grad(model)
            train(model, batch(rank.number))
            found.append(gradients(model))
        return found

    whole = [join(list(step)) for step in zip(*ref.World(2).run(run), strict=True)]
    expected = mean(Net)
    without_b = {name: grad for name, grad in expected.items() if not name.startswith("b.")}
    for step, grads in zip((without_b, expected, without_b), whole, strict=True):
        assert_equal(grads, step)


def test_only_trainable_parameters_travel_in_a_reduction() -> None:
    with ref.DryWorld(2).rank() as rank:
        model = initialize(Net())
        freeze(model.a)
        freeze(model.c)
        hpcompat.fully_shard(model)
        train(model, batch())
    assert [call.num_sent for call in rank.calls if call.name == "reduce_scatter"] == [2 * (16 + 4)]


# Tied


class Tied(ref.Module):
    """The first layer's weight is the last one's."""

    def __init__(self, rows: int = 4) -> None:
        super().__init__()
        self.first, self.between, self.last = (
            ref.Linear(4, rows, bias=False),
            ref.Linear(rows, 4),
            ref.Linear(4, rows, bias=False),
        )
        self.last.weight = self.first.weight

    def forward(self, x: ref.Value) -> Any:
        return self.last(self.between(self.first(x)))


@pytest.mark.parametrize("rows", [4, 7])
def test_tied_parameters_of_one_unit_get_both_gradients(rows: int) -> None:
    """Also where the rows do not divide (LIF-07, pytorch/pytorch#176076)."""

    def run(rank: ref.Rank) -> Gradients:
        model = initialize(Tied(rows))
        hpcompat.fully_shard([model.first, model.last])
        hpcompat.fully_shard(model.between)
        hpcompat.fully_shard(model)
        train(model, batch(rank.number))
        assert model.first.weight is model.last.weight
        return gradients(model)

    assert_equal(join(ref.World(2).run(run)), mean(lambda: Tied(rows)))


def test_tied_parameters_of_two_units_are_refused() -> None:
    with ref.DryWorld(2).rank():
        model = Tied()
        expected = r"'Linear.weight' is shared .* managed by another FSDP group.*'FSDPLinear.weight'.*fully_shard\(\["
        with pytest.raises(ValueError, match=expected):
            wrap(model, "first", "last")


# Ignored and replicated


def test_ignored_parameters_are_left_alone() -> None:
    def run(rank: ref.Rank) -> Gradients:
        model = initialize(Net())
        kept = model.b.bias
        wrap(model, ignored_params={kept})
        train(model, batch(rank.number))
        assert model.b.bias is kept
        return gradients(model)

    found = ref.World(2).run(run)
    alone = [single_process(Net, [batch(rank)], divisor=1)["b.bias"] for rank in range(2)]
    for grads, own in zip(found, alone, strict=True):
        np.testing.assert_array_equal(grads.pop("b.bias"), own)
    expected = mean(Net)
    del expected["b.bias"]
    assert_equal(join(found), expected)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_replicated_parameters_stay_whole_and_average_over_all_ranks(shape: tuple[int, ...]) -> None:
    def run(rank: ref.Rank) -> Gradients:
        model = initialize(Net())
        mesh = ref.init_device_mesh(shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        wrap(model, "a", "c", mesh=mesh, root=False)
        hpcompat.fully_shard(model.b, mesh=mesh, replicate_params={model.b.weight})
        hpcompat.fully_shard(model, mesh=mesh)
        train(model, batch(rank.number))
        return gradients(model)

    found = ref.World(4).run(run)
    expected = mean(Net, 4)
    whole = expected.pop("b.weight")
    for grads in found:
        np.testing.assert_array_equal(grads.pop("b.weight"), whole)
    assert_equal(join(found[: shape[-1]]), expected)


def test_replicated_parameters_must_be_managed() -> None:
    with ref.DryWorld(2).rank(), pytest.raises(ValueError, match="replicate_params"):
        hpcompat.fully_shard(Net(), replicate_params={ref.Linear(4, 4).weight})


# Unused


class Either(Stack):
    """Uses a or b, as the caller says, then c."""

    def forward(self, x: ref.Value, *, use_a: bool) -> Any:
        return self.c(self.a(x) if use_a else self.b(x))


def test_ranks_may_use_different_parameters_of_a_unit_if_told_so() -> None:
    """RED-05, pytorch/pytorch#158719."""

    def run(rank: ref.Rank) -> Gradients:
        model = hpcompat.fully_shard(initialize(Either()))
        model.set_reduce_scatter_unused_params(True)
        ref.backward(ref.total(model(batch(rank.number), use_a=rank.number == 0)))
        return gradients(model)

    model = initialize(Either())
    for rank in range(2):
        ref.backward(ref.total(model(batch(rank), use_a=rank == 0)))
    assert_equal(join(ref.World(2).run(run)), {name: grad / 2 for name, grad in gradients(model).items()})


def test_ranks_that_use_different_parameters_otherwise_do_not_meet() -> None:
    def run(rank: ref.Rank) -> None:
        model = hpcompat.fully_shard(initialize(Either(size=4 + 4 * rank.number)))
        ref.backward(ref.total(model(batch(rank.number, size=4 + 4 * rank.number), use_a=True)))

    with pytest.raises(RuntimeError, match="expected 2 ranks to issue the same collective"):
        ref.World(2).run(run)


# Replaced before the first forward


def test_a_shard_that_was_assigned_is_taken_up() -> None:
    def run(rank: ref.Rank) -> Any:
        model = wrap(ref.Sequential([ref.Linear(4, 4, bias=False)]), "0")
        model[0].weight = ref.Parameter(np.full((2, 4), rank.number + 1, np.float32))
        with ref.no_grad():
            return model(ref.Value(np.ones((1, 4), np.float32))).data

    for output in ref.World(2).run(run):
        np.testing.assert_array_equal(output, [[4, 4, 8, 8]])


# Placements and meshes


@pytest.mark.parametrize("placement", [Shard(2), Shard(-3), "shard"])
def test_a_placement_must_fit(placement: Any) -> None:
    with ref.DryWorld(2).rank(), pytest.raises(ValueError, match="Shard"):
        hpcompat.fully_shard(ref.Linear(4, 4, bias=False), shard_placement_fn=lambda parameter: placement)


def test_other_dims_must_divide() -> None:
    with ref.DryWorld(2).rank(), pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        hpcompat.fully_shard(ref.Linear(3, 4, bias=False), shard_placement_fn=lambda parameter: Shard(-1))


def test_parameters_of_one_unit_may_live_on_different_meshes() -> None:
    """Weights over all four ranks, biases over two and their replicas (PLC-05)."""

    def run(rank: ref.Rank) -> Gradients:
        infos = {
            2: hpcompat.FSDPMeshInfo(ref.init_device_mesh((4,)), shard_mesh_dim=0),
            1: hpcompat.HSDPMeshInfo(
                ref.init_device_mesh((2, 2), mesh_dim_names=("r", "s")), shard_mesh_dim=1, replicate_mesh_dim=0
            ),
        }
        model = wrap(
            initialize(Net()),
            shard_placement_fn=lambda parameter: hpcompat.ShardPlacementResult(None, infos[parameter.data.ndim]),
        )
        assert [len(unit.groups) for unit in model._unit().iteration.units or [model._unit()]] == [2]
        train(model, batch(rank.number))
        return gradients(model)

    found = ref.World(4).run(run)
    weights = join([{name: grad for name, grad in grads.items() if "weight" in name} for grads in found])
    biases = [
        join([{n: g for n, g in grads.items() if "bias" in n} for grads in found[start : start + 2]])
        for start in (0, 2)
    ]
    assert_equal(biases[0], biases[1])
    expected = mean(Net, 4)
    assert_equal({name: {**weights, **biases[0]}[name] for name in expected}, expected)


def test_with_and_without_replicas_are_two_groups() -> None:
    """Also over the same shards: their reductions differ."""
    with ref.DryWorld(4).rank() as rank:
        mesh = ref.init_device_mesh((2, 2), mesh_dim_names=("r", "s"))
        infos = {
            2: hpcompat.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
            1: hpcompat.FSDPMeshInfo(mesh["s"], shard_mesh_dim=0),
        }
        model = hpcompat.fully_shard(
            ref.Linear(4, 4),
            mesh=mesh,
            shard_placement_fn=lambda parameter: hpcompat.ShardPlacementResult(None, infos[parameter.data.ndim]),
        )
        train(model, batch())
    reductions = [(call.name, call.num_sent) for call in rank.calls if call.op is not None]
    assert reductions == [("reduce_scatter", 4), ("reduce_scatter", 16), ("all_reduce", 8)]


def test_mesh_infos_over_the_same_ranks_must_be_one() -> None:
    with ref.DryWorld(2).rank():
        infos = iter([hpcompat.FSDPMeshInfo(ref.init_device_mesh((2,)), shard_mesh_dim=0) for _ in range(2)])
        with pytest.raises(ValueError, match="must use the same FSDPMeshInfo object"):
            hpcompat.fully_shard(
                ref.Linear(4, 4), shard_placement_fn=lambda parameter: hpcompat.ShardPlacementResult(None, next(infos))
            )


# Dtypes


@pytest.mark.parametrize("keeps_main_grad", [False, True])
def test_gradients_arrive_in_the_original_dtype_or_stay_in_that_of_the_reduction(keeps_main_grad: bool) -> None:
    policy = hpcompat.MixedPrecisionPolicy(
        param_dtype=np.float16, reduce_dtype=np.float32, apply_grad_on_fp32_main_grad=keeps_main_grad
    )

    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(Net(dtype=np.float64)), mp_policy=policy)
        output = model(batch(rank.number, dtype=np.float64))
        assert output.data.dtype == np.float16
        ref.backward(ref.total(output))
        for _, parameter in model.named_parameters():
            assert (parameter.grad is None) == keeps_main_grad
        return {
            name: parameter.main_grad if keeps_main_grad else parameter.grad
            for name, parameter in model.named_parameters()
        }

    grads = join(ref.World(2).run(run))
    assert {grad.dtype.name for grad in grads.values()} == {"float32" if keeps_main_grad else "float64"}
    assert_equal(grads, mean(Net))


def test_inputs_and_outputs_are_cast_as_told() -> None:
    with ref.DryWorld(2).rank():
        casts = hpcompat.MixedPrecisionPolicy(param_dtype=np.float16, output_dtype=np.float64)
        model = hpcompat.fully_shard(Net(), mp_policy=casts)
        x = batch()
        output = model(x)
        assert output.data.dtype == np.float64
        ref.backward(ref.total(output))
        assert x.grad is not None
        assert x.grad.dtype == np.float32
        plain = hpcompat.MixedPrecisionPolicy(param_dtype=np.float16, cast_forward_inputs=False)
        assert hpcompat.fully_shard(Net(), mp_policy=plain)(batch()).data.dtype == np.float32


# Collectives of the user


class CountingGather(AllGather):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        assert np.shares_memory(input_tensor, output_tensor.reshape(group.size, -1)[group.index])
        self.seen.append(async_op)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountingScatter(ReduceScatter):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.seen.append(async_op)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def test_custom_collectives_are_called_as_their_protocol_says() -> None:
    """Gathers are asynchronous only for ``unshard(async_op=True)``, reductions never (COM-05)."""

    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(Net()))
        gather, scatter = CountingGather(), CountingScatter()
        model.b.set_custom_all_gather(gather)
        model.b.set_custom_reduce_scatter(scatter)
        for _ in range(2):
            zero_grad(model)
            train(model, batch(rank.number))
        assert (gather.seen, scatter.seen) == ([False] * 4, [False] * 2)
        handle = model.b.unshard(async_op=True)
        assert handle is not None
        handle.wait()
        model.b.reshard()
        assert gather.seen[4:] == [True]
        return gradients(model)

    assert_equal(join(ref.World(2).run(run)), mean(Net))


def test_custom_collectives_and_allocators_exclude_each_other() -> None:
    with ref.DryWorld(2).rank():
        model = hpcompat.fully_shard(Net())
        model.set_allocate_memory_from_process_group_for_comm(True)
        train(model, batch())
        model.set_allocate_memory_from_process_group_for_comm(False)
        train(model, batch())
        model.set_custom_all_gather(CountingGather())
        with pytest.raises(UserError, match="comm is custom: expected the default one"):
            model.set_allocate_memory_from_process_group_for_comm(True)


def test_a_separate_group_for_reductions() -> None:
    def run(rank: ref.Rank) -> Gradients:
        model = wrap(initialize(Net()))
        model.set_separate_reduce_scatter_group()
        train(model, batch(rank.number))
        assert {group.label for group in rank.num_meetings} == {"", "separate"}
        model.set_separate_reduce_scatter_group(False)
        rank.num_meetings.clear()
        zero_grad(model)
        train(model, batch(rank.number))
        return gradients(model)

    assert_equal(join(ref.World(2).run(run)), mean(Net))
