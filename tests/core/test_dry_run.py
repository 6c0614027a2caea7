"""How often and how much is communicated: one rank's view of up to 1024 (SCH-01)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat_conformance import numpy_reference as ref
from training import Net, Stack, batch, initialize, train, wrap

pytestmark = pytest.mark.usefixtures("reference")

WIDTH = 256
NUM_ELEMENTS = WIDTH * WIDTH + WIDTH  # of one layer


def wide() -> Any:
    return Stack(size=WIDTH)


def wide_batch(step: int = 0) -> ref.Value:
    return batch(step=step, size=WIDTH)


@pytest.mark.parametrize("num_ranks", [64, 256])
def test_a_step_of_many_ranks(num_ranks: int) -> None:
    with ref.DryWorld(num_ranks).rank() as rank:
        train(wrap(wide()), wide_batch())
    share = NUM_ELEMENTS // num_ranks
    gather = ref.Call("all_gather", num_ranks, share, "float32")
    reduce = ref.Call("reduce_scatter", num_ranks, NUM_ELEMENTS, "float32", "avg")
    # Forward gathers all three; backward the last, the one before ahead of each reduction, and so on.
    assert rank.calls == [gather] * 3 + [gather, gather, reduce, gather, reduce, reduce]


def test_with_more_ranks_than_rows_padding_is_communicated_too() -> None:
    with ref.DryWorld(1024).rank(1023) as rank:
        model = wrap(wide())
        assert model.a.weight.data.shape == (0, WIDTH)
        assert model.a.bias.data.shape == (0,)
        train(model, wide_batch())
        assert all(parameter.grad is not None and parameter.grad.size == 0 for _, parameter in model.named_parameters())
    gather = ref.Call("all_gather", 1024, WIDTH + 1, "float32")
    reduce = ref.Call("reduce_scatter", 1024, 1024 * (WIDTH + 1), "float32", "avg")
    assert rank.calls == [gather] * 3 + [gather, gather, reduce, gather, reduce, reduce]


@pytest.mark.parametrize("number", [0, 5, 1023])
def test_every_rank_sees_the_same_schedule(number: int) -> None:
    with ref.DryWorld(1024).rank(0) as first:
        train(wrap(Net(4)), batch())
    with ref.DryWorld(1024).rank(number) as other:
        train(wrap(Net(4)), batch())
    assert other.calls == first.calls


def test_replicas_of_shards_reduce_over_both() -> None:
    with ref.DryWorld(1024).rank(77) as rank:
        mesh = ref.init_device_mesh((16, 64), mesh_dim_names=("dp_replicate", "dp_shard"))
        train(wrap(wide(), mesh=mesh), wide_batch())
    share = NUM_ELEMENTS // 64
    gather = ref.Call("all_gather", 64, share, "float32")
    reduce = [
        ref.Call("reduce_scatter", 64, NUM_ELEMENTS, "float32", "avg"),
        ref.Call("all_reduce", 16, share, "float32", "avg"),
    ]
    assert rank.calls == [gather] * 3 + [gather, gather, *reduce, gather, *reduce, *reduce]


@pytest.mark.parametrize("lacking", [2, 4])
def test_only_what_both_groups_have_is_used(
    reference: ref.NumpyBackend, monkeypatch: pytest.MonkeyPatch, lacking: int
) -> None:
    def supported(group: Any, **_: Any) -> frozenset[hpcompat.ReduceOp]:
        return frozenset({hpcompat.ReduceOp.SUM}) if group.size == lacking else frozenset(hpcompat.ReduceOp)

    monkeypatch.setattr(reference, "supported_reductions", supported)
    with ref.DryWorld(8).rank() as rank:
        mesh = ref.init_device_mesh((4, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        train(wrap(initialize(Net()), mesh=mesh), batch())
    assert {call.op for call in rank.calls} == {None, "sum"}


@pytest.mark.parametrize(("shape", "op"), [((8,), "sum"), ((4, 2), "sum"), ((8, 1), "avg")], ids=str)
def test_a_reduction_that_one_collective_lacks_is_used_where_only_the_other_runs(
    reference: ref.NumpyBackend, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], op: str
) -> None:
    def supported(group: Any, *, collective: str, device: str) -> frozenset[hpcompat.ReduceOp]:
        lacks = collective == "reduce_scatter"
        return frozenset({hpcompat.ReduceOp.SUM}) if lacks else frozenset(hpcompat.ReduceOp)

    monkeypatch.setattr(reference, "supported_reductions", supported)
    with ref.DryWorld(8).rank() as rank:
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        train(wrap(initialize(Net()), mesh=ref.init_device_mesh(shape, mesh_dim_names=names)), batch())
    assert {call.op for call in rank.calls} - {None} == {op}


def test_a_smaller_group_gathers_for_backward() -> None:
    with ref.DryWorld(64).rank(20) as rank:
        train(wrap(wide(), reshard_after_forward=8), wide_batch())
    gathers = [(call.num_ranks, call.num_sent) for call in rank.calls if call.name == "all_gather"]
    assert gathers == [(64, NUM_ELEMENTS // 64)] * 3 + [(8, NUM_ELEMENTS // 8)] * 3
    assert {call.num_ranks for call in rank.calls if call.name == "reduce_scatter"} == {64}


def test_the_slice_for_a_smaller_group_includes_the_padding() -> None:
    with ref.DryWorld(4).rank() as rank:
        model = ref.Sequential([ref.Linear(3, 5, bias=False)])
        train(wrap(model, "0", reshard_after_forward=2), batch(size=3))
    # 5 rows in chunks of 2: 8 rows with padding, of which each of two ranks keeps 4.
    assert [call.num_sent for call in rank.calls] == [2 * 3, 4 * 3, 8 * 3]


def test_mixed_precision_travels_in_its_dtypes() -> None:
    policy = hpcompat.MixedPrecisionPolicy(param_dtype=np.float16, reduce_dtype=np.float32)
    with ref.DryWorld(64).rank() as rank:
        train(wrap(wide(), mp_policy=policy), wide_batch())
    assert {(call.name, call.dtype) for call in rank.calls} == {
        ("all_gather", "float16"),
        ("reduce_scatter", "float32"),
    }


# Numbers of collectives per unit and step, setting by setting


def counts(rank: ref.Rank, run: Callable[[], object]) -> dict[str, int]:
    num_before = len(rank.calls)
    run()
    names = Counter(call.name for call in rank.calls[num_before:])
    return {name: names[name] for name in ("all_gather", "reduce_scatter", "all_reduce")}


def no_sync(model: Any) -> None:
    model.set_requires_gradient_sync(False)


def no_sync_and_keep(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)


def no_all_reduce(model: Any) -> None:
    model.set_requires_all_reduce(False)


def freeze(model: Any) -> None:
    for _, parameter in model.named_parameters():
        parameter.requires_grad = False


def not_in_backward(model: Any) -> None:
    for module in (model.a, model.b, model.c):
        module.set_unshard_in_backward(False)


def nothing(model: Any) -> None: ...


@pytest.mark.parametrize(
    ("shape", "reshard_after_forward", "configure", "first", "later"),
    [
        ((4,), True, nothing, (2, 1, 0), (2, 1, 0)),
        ((4,), 2, nothing, (2, 1, 0), (2, 1, 0)),
        ((4,), False, nothing, (1, 1, 0), (1, 1, 0)),
        ((2, 2), True, nothing, (2, 1, 1), (2, 1, 1)),
        ((2, 2), False, nothing, (1, 1, 1), (1, 1, 1)),
        ((4,), True, no_sync, (2, 0, 0), (2, 0, 0)),
        ((4,), False, no_sync, (1, 0, 0), (1, 0, 0)),
        ((4,), False, no_sync_and_keep, (1, 0, 0), (0, 0, 0)),
        ((4,), True, no_sync_and_keep, (2, 0, 0), (1, 0, 0)),
        ((2, 2), True, no_all_reduce, (2, 1, 0), (2, 1, 0)),
        ((4,), True, not_in_backward, (1, 1, 0), (1, 1, 0)),
        ((4,), True, freeze, (2, 0, 0), (2, 0, 0)),
        ((1,), True, nothing, (0, 0, 0), (0, 0, 0)),
        ((4, 1), True, nothing, (0, 0, 1), (0, 0, 1)),
        ((1, 4), True, nothing, (2, 1, 1), (2, 1, 1)),
    ],
)
def test_the_communication_of_a_unit(
    shape: tuple[int, ...],
    reshard_after_forward: bool | int,
    configure: Callable[[Any], None],
    first: tuple[int, ...],
    later: tuple[int, ...],
) -> None:
    with ref.DryWorld(int(np.prod(shape))).rank() as rank:
        mesh = ref.init_device_mesh(shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = wrap(initialize(Stack()), mesh=mesh, reshard_after_forward=reshard_after_forward)
        configure(model)
        for expected in (first, later, later):
            found = counts(rank, lambda: train(model, batch()))
            assert tuple(found.values()) == tuple(3 * count for count in expected), found


@pytest.mark.parametrize(("reshard_after_forward", "first", "later"), [(True, 1, 1), (False, 1, 0)])
def test_the_communication_of_an_evaluation(reshard_after_forward: bool, first: int, later: int) -> None:
    with ref.DryWorld(4).rank() as rank, ref.no_grad():
        model = wrap(initialize(Stack()), reshard_after_forward=reshard_after_forward)
        for expected in (first, later):
            found = counts(rank, lambda: model(batch()))
            assert found == {"all_gather": 3 * expected, "reduce_scatter": 0, "all_reduce": 0}


def test_a_group_communicates_once_however_many_parameters_it_has() -> None:
    with ref.DryWorld(4).rank() as rank:
        model = hpcompat.fully_shard(ref.Sequential([ref.Linear(4, 4) for _ in range(10)]))
        assert counts(rank, lambda: train(model, batch())) == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 0}


def test_without_fusion_every_parameter_communicates_by_itself() -> None:
    with ref.DryWorld(4).rank() as rank:
        model = hpcompat.fully_shard(ref.Sequential([ref.Linear(4, 4) for _ in range(3)]), comm_fusion=False)
        assert counts(rank, lambda: train(model, batch())) == {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 0}
