"""Ranks that reduce different gradients are found out before anything is added up, and those that agree pay nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

import hpcompat
from hpcompat.core import agreement
from hpcompat_conformance import numpy_reference as ref
from training import Net, assert_equal, batch, gradients, initialize, train, wrap, zero_grad

pytestmark = pytest.mark.usefixtures("reference")


SHAPES = [(2,), (4,), (2, 2), (2, 1), (4, 1)]
Use = Callable[[int], Sequence[str]]


class Branches(ref.Module):
    """Those of the layers ``a``, ``b``, ``c`` that ``use`` names, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (ref.Linear(4, 4) for _ in range(3))
        self.use: Sequence[str] = ("a", "b", "c")

    def forward(self, x: ref.Value) -> ref.Value:
        total = None
        for name in self.use:
            y = getattr(self, name)(x)
            total = y if total is None else ref.add(total, y)
        assert total is not None
        return total


def sharded(shape: tuple[int, ...], *units: str) -> Any:
    """A unit for each of ``units``, the rest in the root's."""
    mesh = ref.init_device_mesh(shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = initialize(Branches())
    for name in units:
        hpcompat.fully_shard(getattr(model, name), mesh=mesh)
    return hpcompat.fully_shard(model, mesh=mesh)


def size_of(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def step(model: Any, rank: ref.Rank, use: Sequence[str], *, number: int = 0) -> str:
    """The error of a step with these layers, if there is one."""
    model.use = use
    try:
        train(model, batch(rank.number, step=number))
    except RuntimeError as error:
        return str(error)
    return ""


def check_in_step(model: Any, rank: ref.Rank) -> dict[str, Any]:
    """After an error: train together."""
    model.reset_iter_state()
    zero_grad(model)
    assert step(model, rank, ("a", "b", "c"), number=9) == ""
    return gradients(model)


def clean_gradients(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    return ref.World(size_of(shape)).run(lambda rank: check_in_step(sharded(shape), rank))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "use",
    [
        lambda rank: "ab" if rank % 2 else "ac",
        lambda rank: "ab" if rank == 0 else "ac",
        lambda rank: "ab" if rank < 2 and rank != 1 else "bc",
    ],
)
def test_all_ranks_raise_and_can_go_on(shape: tuple[int, ...], use: Use) -> None:
    """As many elements on every rank, so that the reduction itself would not fail."""

    def run(rank: ref.Rank) -> Any:
        model = sharded(shape)
        error = step(model, rank, use(rank.number))
        assert "set_reduce_scatter_unused_params(True)" in error
        for missing in ("a.weight, a.bias", "b.weight, b.bias", "c.weight, c.bias"):
            lacking = [number for number in range(size_of(shape)) if missing[0] not in use(number)]
            assert (f"without {missing}" in error) == bool(lacking)
        assert [call.name for call in rank.calls if "reduce" in call.name] == []
        return check_in_step(model, rank)

    for found, expected in zip(ref.World(size_of(shape)).run(run), clean_gradients(shape), strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("departing", [(0,), (1,), (0, 1)])
def test_ranks_that_have_begun_are_not_left_waiting(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], departing: tuple[int, ...]
) -> None:
    """Some do as they did before: they are in the reduction when the others find out."""
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.05)
    if len(departing) == size_of(shape):
        departing = (0,)

    def run(rank: ref.Rank) -> Any:
        model = sharded(shape)
        assert step(model, rank, "abc") == ""
        error = step(model, rank, "ab" if rank.number in departing else "abc")
        assert "without c.weight, c.bias" in error
        return check_in_step(model, rank), len(rank.calls)

    results = ref.World(size_of(shape)).run(run)
    assert len({num_calls for _, num_calls in results}) == 1
    for (found, _), expected in zip(results, clean_gradients(shape), strict=True):
        assert_equal(found, expected)


def test_replicas_may_differ_until_they_all_reduce() -> None:
    def run(rank: ref.Rank) -> str:
        model = sharded((2, 2))
        model.set_requires_all_reduce(False)
        mine = "ab" if rank.number < 2 else "ac"
        assert [step(model, rank, mine, number=number) for number in range(2)] == ["", ""]
        model.set_requires_all_reduce(True)
        return step(model, rank, mine)

    assert all("without c.weight" in error for error in ref.World(4).run(run))


def test_nothing_is_sent_as_long_as_nothing_changes() -> None:
    world = ref.World(2)

    def run(rank: ref.Rank) -> None:
        model = wrap(initialize(Net()))
        model.b.weight.requires_grad = False
        for number in range(3):
            train(model, batch(rank.number, step=number))

    world.run(run)
    assert world.notes == {}


def test_large_groups_are_left_alone_unless_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_RANKS", 1)
    world = ref.World(2)

    def run(rank: ref.Rank) -> str:
        return step(sharded((2,)), rank, ("a",))

    assert world.run(run) == ["", ""]
    assert world.notes == {}
    monkeypatch.setattr(agreement, "is_debugging", True)
    assert world.run(run) == ["", ""]
    assert world.notes != {}


def test_a_change_on_all_ranks_is_asked_about_once() -> None:
    """A step is a gather and a reduction; what is left out changes before the first, the third and the fifth."""
    world = ref.World(2)

    def run(rank: ref.Rank) -> None:
        model = sharded((2,))
        for number, use in enumerate(("ab", "ab", "abc", "abc", "b")):
            assert step(model, rank, use, number=number) == ""

    world.run(run)
    assert sorted(key for _, key, rank in world.notes if rank == 0) == ["0/1/.0.1", "0/5/.0.1", "0/9/.0.1"]


def test_steps_without_a_collective_between_them_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that reaches no parameter, and one that reaches all. A slow rank's note of the first is no answer to
    the second.
    """
    has_looked = threading.Event()
    wait_for = agreement.Pledge._wait_for

    def look(pledge: agreement.Pledge, rank: int, until: float) -> Any:
        pledge._notes.find(str(pledge.place), rank)
        if pledge.step.missing == ():
            has_looked.set()
        return wait_for(pledge, rank, until)

    monkeypatch.setattr(agreement.Pledge, "_wait_for", look)

    def run(rank: ref.Rank) -> None:
        group = sharded((2,))._unit().groups[0]
        assert group._agreement.before_reduction(("a.weight",)) is not None
        if rank.number == 0:
            assert has_looked.wait(timeout=60)
        assert group._agreement.before_reduction(()) is not None

    ref.World(2).run(run)


def test_a_rank_that_is_late_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.02)
    world = ref.World(2)

    def run(rank: ref.Rank) -> Any:
        model = sharded((2,))
        tensors = model._unit().groups[0].tensors
        start_reduce = tensors.start_reduce

        def start_late(*args: Any) -> Any:
            while not world.notes:  # until the other one has lost patience
                time.sleep(0)
            return start_reduce(*args)

        if rank.number == 1:
            tensors.start_reduce = start_late
        assert step(model, rank, "abc", number=9) == ""
        return gradients(model)

    for found, expected in zip(world.run(run), clean_gradients((2,)), strict=True):
        assert_equal(found, expected)
    assert {key for _, key, _ in world.notes} == {"0/1/.0.1"}


def test_debugging_a_rank_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "DEADLINE_SECONDS", 0.05)

    def run(rank: ref.Rank) -> str:
        model = sharded((2,))
        if rank.number == 0:
            agreement.is_debugging = True
            return step(model, rank, "ab")
        return ""

    monkeypatch.setattr(agreement, "is_debugging", False)
    error = ref.World(2).run(run)[0]
    assert "expected rank 1: gather 'the root' as well, but got no answer" in error


def test_nobody_waits_for_a_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is late: the reduction begins without its answer, and after a few such the group is left alone."""
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 0.05)
    uses = ("ab", "abc", "ab", "abc")
    has_begun = [threading.Event() for _ in uses]

    def run(rank: ref.Rank) -> Any:
        model = sharded((2,))
        reduce, notes = model._unit().groups[0]._reduce, []

        def reduce_first(*args: Any) -> None:
            has_begun[len(notes)].set()
            reduce(*args)

        if rank.number == 0:
            model._unit().groups[0]._reduce = reduce_first
        for number, use in enumerate(uses):
            model.use = use
            loss = ref.total(model(batch(rank.number, step=number)))
            if rank.number == 1:
                has_begun[number].wait()
            ref.backward(loss)
            notes.append(model._unit().groups[0]._agreement._notes[True].num_unanswered)
        return notes

    # In the end rank 0 asks no more, and so does not answer either.
    assert ref.World(2).run(run) == [[1, 2, 2, 2], [0, 0, 1, 2]]


def test_a_difference_that_is_told_too_late_is_found_after_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 0.05)
    has_begun = threading.Event()

    def run(rank: ref.Rank) -> str:
        model = sharded((2,))
        group = model._unit().groups[0]
        reduce, before = group._reduce, group._agreement.before_reduction

        def reduce_first(*args: Any) -> None:
            has_begun.set()
            reduce(*args)

        def ask_late(*args: Any) -> Any:
            has_begun.wait()
            return before(*args)

        if rank.number == 0:
            group._reduce = reduce_first
        else:
            group._agreement.before_reduction = ask_late
        return step(model, rank, "ab" if rank.number == 0 else "ac")

    assert all("without c.weight" in error for error in ref.World(2).run(run))


PLACES = ["before the reduction", "before it is issued", "after it is issued"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("units", "use", "unit"), [("ab", "ab", "a"), ("ab", "ab", "b"), ("c", "ac", "c"), ("c", "ac", "")]
)
@pytest.mark.parametrize("is_debugging", [False, True])
def test_a_rank_that_fails_and_catches_up_answers(
    monkeypatch: pytest.MonkeyPatch, place: str, units: str, use: str, unit: str, is_debugging: bool
) -> None:
    """The failed step and those after it depart from the ones before: the root reduces nothing, or only a part."""
    monkeypatch.setattr(agreement, "is_debugging", is_debugging)
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 20.0)
    monkeypatch.setattr(agreement, "DEADLINE_SECONDS", 20.0)

    def run(rank: ref.Rank) -> Any:
        model = sharded((2,), *units)
        assert step(model, rank, "abc") == ""
        start = model.begin_step()
        if rank.number == 1:
            with fault_in(model, unit, place):
                assert step(model, rank, use) == "the fault"
            with model.catch_up(start):
                assert step(model, rank, use, number=3) == ""
        else:
            assert step(model, rank, use) == ""
        model.reset_iter_state()
        zero_grad(model)
        assert [step(model, rank, use, number=9) for use in ("abc", use, "abc")] == ["", "", ""]
        return [notes.num_unanswered for notes in rank.notes.values()]

    assert ref.World(2).run(run) == [[0]] * 2


@contextmanager
def fault_in(model: Any, unit: str, place: str) -> Iterator[None]:
    group = (getattr(model, unit) if unit else model)._unit().groups[0]
    owner, name = {
        "before the reduction": (group.tensors, "accumulate_gradients"),
        "before it is issued": (group, "_start_reduce"),
        "after it is issued": (group.comm_ctx, "submit"),
    }[place]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the fault")

    with mock.patch.object(owner, name, fail):
        yield


@pytest.mark.parametrize("size", [2, 3])
def test_debugging_finds_ranks_that_run_different_units(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(agreement, "is_debugging", True)

    def run(rank: ref.Rank) -> Any:
        model = sharded((size,), "a", "b", "c")
        error = step(model, rank, "a" if rank.number == 0 else "b")
        assert "rank 0: gather 'a'" in error
        assert "gather 'b'" in error
        assert rank.calls == []
        return check_in_step(model, rank)

    assert len(ref.World(size).run(run)) == size


def test_debugging_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: ref.Rank) -> Any:
        model = sharded((2, 2), "a", "b")
        for number in range(2):
            assert step(model, rank, "abc", number=number) == ""
        return gradients(model), rank.calls

    expected = ref.World(4).run(run)
    monkeypatch.setattr(agreement, "is_debugging", True)
    for (found, calls), (clean, clean_calls) in zip(ref.World(4).run(run), expected, strict=True):
        assert_equal(found, clean)
        assert calls == clean_calls


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), (None, "False")])
def test_the_environment_switches_debugging_on(value: str | None, expected: str) -> None:
    environ = {name: kept for name, kept in os.environ.items() if name != "HPCOMPAT_DEBUG"}
    environ |= {} if value is None else {"HPCOMPAT_DEBUG": value}
    code = "from hpcompat.core import agreement; print(agreement.is_debugging)"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
