"""The reference itself: what its world refuses, so that a schedule which only seems to work is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcompat.comm import ReduceOp
from hpcompat.mesh import DataParallelMeshDims
from hpcompat_conformance import numpy_reference as ref
from hpcompat_conformance.numpy_reference.backend import submesh
from hpcompat_conformance.numpy_reference.collectives import AllGather, Reduce, ReduceScatter, all_reduce
from training import Net, batch, gradients, initialize, train


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def everyone(rank: ref.Rank) -> Any:
    return ref.init_device_mesh((rank.world.size,)).get_group()


# Collectives


def test_all_gather() -> None:
    def run(rank: ref.Rank) -> list[float]:
        output = floats(0, 0, 0, 0, 0, 0)
        AllGather()(output, floats(rank.number, 10 * rank.number), everyone(rank))
        return output.tolist()

    assert ref.World(3).run(run) == [[0, 0, 1, 10, 2, 20]] * 3


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (Reduce(ReduceOp.SUM), [[2, 4], [6, 8]]),
        (Reduce(ReduceOp.AVG), [[1, 2], [3, 4]]),
        (Reduce(ReduceOp.PREMUL_SUM, 0.25), [[0.5, 1], [1.5, 2]]),
    ],
)
def test_reduce_scatter(op: Reduce, expected: list[list[float]]) -> None:
    def run(rank: ref.Rank) -> list[float]:
        output = floats(0, 0)
        ReduceScatter()(output, floats(1, 2, 3, 4), everyone(rank), op)
        return output.tolist()

    assert ref.World(2).run(run) == expected


def test_all_reduce_is_in_place() -> None:
    def run(rank: ref.Rank) -> list[float]:
        buffer = floats(rank.number, 1)
        all_reduce(buffer, everyone(rank), Reduce(ReduceOp.SUM)).wait()
        return buffer.tolist()

    assert ref.World(3).run(run) == [[3, 3]] * 3


def test_nothing_arrives_before_the_wait() -> None:
    def run(rank: ref.Rank) -> tuple[bool, list[float]]:
        output = AllGather().allocate((2,), dtype=np.float32, device="numpy")
        work = AllGather()(output, floats(rank.number), everyone(rank), async_op=True)
        assert work is not None
        early = bool(np.isnan(output).all())
        work.wait()
        work.wait()
        return early, output.tolist()

    assert ref.World(2).run(run) == [(True, [0, 1])] * 2


def test_groups_do_not_meet_each_others_collectives() -> None:
    def run(rank: ref.Rank) -> list[float]:
        mesh = ref.init_device_mesh((2, 2))
        rows, columns = floats(rank.number), floats(rank.number)
        works = [
            all_reduce(buffer, mesh.get_group(axis), Reduce(ReduceOp.SUM)) for buffer, axis in ((rows, 1), (columns, 0))
        ]
        for work in works[:: 1 if rank.number % 2 else -1]:
            work.wait()
        return [*rows.tolist(), *columns.tolist()]

    assert ref.World(4).run(run) == [[1, 2], [1, 4], [5, 2], [5, 4]]


# Failures


def test_a_rank_that_raises_lets_nobody_hang() -> None:
    def run(rank: ref.Rank) -> None:
        if rank.number == 1:
            raise ZeroDivisionError
        for _ in range(2):
            with pytest.raises(ref.RankLost):
                all_reduce(floats(1), everyone(rank), Reduce(ReduceOp.SUM)).wait()

    with pytest.raises(ZeroDivisionError):
        ref.World(3).run(run)


def test_the_cause_is_raised_and_not_what_followed_from_it() -> None:
    def run(rank: ref.Rank) -> None:
        if rank.number == 2:
            raise ZeroDivisionError
        all_reduce(floats(1), everyone(rank), Reduce(ReduceOp.SUM)).wait()

    with pytest.raises(ZeroDivisionError):
        ref.World(3).run(run)


@pytest.mark.parametrize(
    "other",
    [
        lambda group: all_reduce(floats(1, 2), group, Reduce(ReduceOp.AVG)),
        lambda group: all_reduce(floats(1, 2, 3), group, Reduce(ReduceOp.SUM)),
        lambda group: all_reduce(np.zeros(2), group, Reduce(ReduceOp.SUM)),
        lambda group: AllGather()(np.zeros(4, np.float32), floats(1, 2), group, async_op=True),
    ],
    ids=["op", "size", "dtype", "kind"],
)
def test_ranks_that_issue_different_collectives_are_told(other: Callable[[Any], Any]) -> None:
    def run(rank: ref.Rank) -> None:
        mine = other if rank.number else lambda group: all_reduce(floats(1, 2), group, Reduce(ReduceOp.SUM))
        mine(everyone(rank)).wait()

    with pytest.raises(RuntimeError, match="expected 2 ranks to issue the same collective, but got"):
        ref.World(2).run(run)


def test_an_input_must_not_change_in_flight() -> None:
    def run(rank: ref.Rank) -> None:
        shard = floats(1, 2)
        work = AllGather()(np.zeros(4, np.float32), shard, everyone(rank), async_op=True)
        shard += 1
        assert work is not None
        work.wait()

    with pytest.raises(RuntimeError, match=r"expected the input of .* to stay as it was"):
        ref.World(2).run(run)


def test_off_the_world_there_is_no_rank() -> None:
    with pytest.raises(RuntimeError, match="expected to run on a rank"):
        ref.current_rank()


# Dry runs


def test_a_dry_world_is_one_of_equals() -> None:
    def run(rank: ref.Rank) -> list[Any]:
        gathered, scattered, reduced = floats(*[0] * 8), floats(0), floats(3)
        AllGather()(gathered, floats(1, 2), everyone(rank))
        ReduceScatter()(scattered, floats(1, 2, 3, 4), everyone(rank), Reduce(ReduceOp.SUM))
        all_reduce(reduced, everyone(rank), Reduce(ReduceOp.SUM)).wait()
        return [gathered.tolist(), scattered.tolist(), reduced.tolist(), rank.calls]

    with ref.DryWorld(4).rank(2) as rank:
        found = run(rank)
    assert found == ref.World(4).run(run)[2]
    assert found[:3] == [[1, 2] * 4, [12], [12]]


# Meshes


def test_axes_are_picked_in_the_order_of_their_names() -> None:
    with ref.DryWorld(12).rank(7):
        mesh = ref.init_device_mesh((2, 3, 2), mesh_dim_names=("x", "y", "z"))
        assert mesh["y"].ranks.tolist() == [7, 9, 11]
        assert mesh["z", "x"].ranks.tolist() == [[0, 6], [1, 7]]
        assert (mesh.get_local_rank("x"), mesh.get_local_rank("y"), mesh.get_local_rank("z")) == (1, 0, 1)
        dims = DataParallelMeshDims(shard=("y", "z"), replicate="x")
        assert submesh(mesh, dims).ranks.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


# Automatic differentiation


def test_gradients_are_those_of_finite_differences() -> None:
    class Model(Net):
        def forward(self, x: ref.Value) -> Any:
            x = ref.add(x, ref.relu(self.b(self.a(x))))
            return self.head(ref.checkpoint(lambda h: ref.relu(self.c(h)), x))

    model = initialize(Model(dtype=np.float64))
    for _, parameter in model.named_parameters():
        parameter.data += 0.1237  # no activation at the kink of relu
    inputs = batch(dtype=np.float64)
    train(model, inputs)
    for name, grad in gradients(model).items():
        parameter = dict(model.named_parameters())[name]
        for index in np.ndindex(grad.shape):
            values = []
            for step in (1e-3, -1e-3):
                parameter.data[index] += step
                values.append(float(ref.total(model(inputs)).data))
                parameter.data[index] -= step
            assert grad[index] == pytest.approx((values[0] - values[1]) / 2e-3, abs=1e-6), (name, index)


def test_hooks_run_once_and_callbacks_last() -> None:
    order: list[str] = []
    model = initialize(Net())
    hidden = model.a(batch())
    hidden.hooks.append(lambda: order.append("hidden"))
    hidden.hooks.append(lambda: ref.tape.queue_callback(lambda: order.append("end")))
    both = ref.add(model.b(hidden), model.c(hidden))
    both.hooks.append(lambda: order.append("both"))
    ref.backward(ref.total(both))
    assert order == ["both", "hidden", "end"]


def test_a_callback_needs_a_backward() -> None:
    with pytest.raises(RuntimeError, match="expected a running backward"):
        ref.tape.queue_callback(print)


def test_recomputation_stops_when_nothing_more_is_needed() -> None:
    ran: list[str] = []

    class Noisy(ref.Linear):
        def forward(self, x: ref.Value) -> Any:
            ran.append("enter")
            result = super().forward(x)
            ran.append("leave")
            return result

    layer = initialize(Noisy(4, 4, bias=False))
    train(ref.Sequential([layer]), batch())
    ran.clear()
    ref.backward(ref.total(ref.checkpoint(layer, batch())))
    assert ran == ["enter", "leave", "enter"]
