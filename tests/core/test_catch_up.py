"""A rank that fails alone catches up: the others get the collectives they wait for, and the step can be dropped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import pytest

from faults import Countdown, Fault, at_calls, at_events
from hpcompat_conformance import numpy_reference as ref
from training import Net, Stack, assert_equal, batch, gradients, initialize, train, wrap, zero_grad

pytestmark = pytest.mark.usefixtures("reference")

DUMMY = 50


class Mode(NamedTuple):
    """How the model is wrapped, on what mesh, and whether each microbatch is reduced, and over the replicas."""

    options: dict[str, Any] = {}  # noqa: RUF012
    mesh: tuple[int, ...] = (2,)
    microbatches: tuple[tuple[bool, bool], ...] = ((True, True),)


MODES = {
    "plain": Mode(),
    "keeping": Mode({"reshard_after_forward": False}),
    "resharding to a smaller group": Mode({"reshard_after_forward": 2}, (4,)),
    "without sync": Mode(microbatches=((False, False), (True, True))),
    "HSDP without all-reduce": Mode(mesh=(2, 2), microbatches=((True, False), (True, True))),
}


def wrapped(mode: Mode) -> Any:
    mesh = ref.init_device_mesh(mode.mesh, mesh_dim_names=("replicate", "shard")[-len(mode.mesh) :])
    return wrap(initialize(Net()), mesh=mesh, **mode.options)


def run_step(model: Any, mode: Mode, rank: ref.Rank, *, number: int) -> None:
    for index, (sync, all_reduce) in enumerate(mode.microbatches):
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(all_reduce)
        train(model, batch(rank.number, step=10 * number + index))


def drop(model: Any) -> None:
    model.reset_iter_state()
    zero_grad(model)


def next_step(model: Any, mode: Mode, rank: ref.Rank) -> tuple[Any, list[ref.Call]]:
    num_calls = len(rank.calls)
    run_step(model, mode, rank, number=2)
    return gradients(model), rank.calls[num_calls:]


def clean(mode: Mode) -> list[Any]:
    return ref.World(prod(mode.mesh)).run(lambda rank: next_step(wrapped(mode), mode, rank))


def fail_alone(rank: ref.Rank, *, mode: Mode, countdown: Countdown, number: int) -> Any:
    """The last rank raises at the ``number``-th place of its first step ever."""
    model = wrapped(mode)
    start = model.begin_step()
    if rank.number < rank.world.size - 1:
        run_step(model, mode, rank, number=1)
    else:
        with pytest.raises(Fault), countdown.at(number):
            run_step(model, mode, rank, number=1)
        with model.catch_up(start):
            run_step(model, mode, rank, number=DUMMY)
    drop(model)
    return next_step(model, mode, rank)


def num_places(mode: Mode, countdown: Countdown) -> int:
    with ref.DryWorld(prod(mode.mesh)).rank() as rank:
        model = wrapped(mode)
        with countdown.at(10**9):
            run_step(model, mode, rank, number=1)
    return len(countdown.places)


@pytest.mark.parametrize(
    ("mode", "places"),
    [*((mode, at_events) for mode in MODES.values()), (MODES["plain"], partial(at_calls, after=False))],
    ids=[*MODES, "before calls"],
)
def test_a_rank_may_fail_anywhere(mode: Mode, places: Callable[[], Any]) -> None:
    expected = clean(mode)
    with places() as countdown:
        for number in range(num_places(mode, countdown)):
            world = ref.World(len(expected))
            found = world.run(partial(fail_alone, mode=mode, countdown=countdown, number=number))
            for (grads, calls), (clean_grads, clean_calls) in zip(found, expected, strict=True):
                assert_equal(grads, clean_grads)
                assert calls == clean_calls


def test_a_rank_may_fail_again_while_it_catches_up() -> None:
    mode = MODES["plain"]

    def body(rank: ref.Rank) -> Any:
        model = wrapped(mode)
        start = model.begin_step()
        if rank.number == 0:
            run_step(model, mode, rank, number=1)
        else:
            for number in (7, 12, 5):
                with pytest.raises(Fault), countdown.at(number):
                    run_step(model, mode, rank, number=1) if number == 7 else catch_up(model, start, rank)
            catch_up(model, start, rank)
        drop(model)
        return next_step(model, mode, rank)

    def catch_up(model: Any, start: int, rank: ref.Rank) -> None:
        with model.catch_up(start):
            run_step(model, mode, rank, number=DUMMY)

    with at_events() as countdown:
        for (grads, calls), (clean_grads, clean_calls) in zip(ref.World(2).run(body), clean(mode), strict=True):
            assert_equal(grads, clean_grads)
            assert calls == clean_calls


def test_a_rank_that_was_left_behind_for_good_raises() -> None:
    """A dummy step that is too short cannot pair up with the others' collectives."""
    with ref.DryWorld(2).rank() as rank:
        model = wrapped(MODES["plain"])
        start = model.begin_step()
        train(model, batch())
        train(model, batch())
        issued = model._unit().comm_ctx.num_issued
        message = r"expected to issue the \d+ collectives again .* but got \d+; run the whole step"
        with pytest.raises(RuntimeError, match=message), model.catch_up(start):
            train(model, batch(step=DUMMY))
        assert model._unit().comm_ctx.num_issued == issued
        model.reset_iter_state()
        num_calls = len(rank.calls)
        train(model, batch())
        assert len(rank.calls) > num_calls, "communicates again"


@pytest.mark.parametrize("start", [-1, 1])
def test_a_start_that_is_none_is_refused(start: int) -> None:
    with ref.DryWorld(2).rank():
        model = wrapped(MODES["plain"])
        message = f"where a step of this model began, .*but got {start}"
        with pytest.raises(ValueError, match=message), model.catch_up(start):
            pass


def test_both_are_for_the_root() -> None:
    with ref.DryWorld(2).rank():
        model = wrap(initialize(Stack()))
        train(model, batch())
        with pytest.raises(RuntimeError, match="begin_step must be called on the root"):
            model.b.begin_step()
        with pytest.raises(RuntimeError, match="catch_up must be called on the root"), model.b.catch_up(0):
            pass


def test_a_step_begins_sharded() -> None:
    """What an evaluation or a gather by hand has left unsharded would not be gathered again on the others."""
    with ref.DryWorld(2).rank() as rank:
        model = wrapped(MODES["keeping"])
        with ref.no_grad():
            model(batch())
        model.a.unshard(async_op=True)
        start = model.begin_step()
        num_calls = len(rank.calls)
        train(model, batch())
        step = rank.calls[num_calls:]
        with model.catch_up(start):
            train(model, batch())
            assert model._unit().comm_ctx.takes_part
        assert rank.calls[num_calls:] == step


def test_gathers_by_hand_before_the_first_forward_are_dropped() -> None:
    with ref.DryWorld(2).rank():
        model = wrapped(MODES["plain"])
        shard = model.a.weight
        model.a.unshard(async_op=True)
        model.b.unshard()
        model.begin_step()
        assert model.a.weight is shard
        assert all(module._unit().groups[0]._gather is None for module in (model.a, model.b))


def test_what_is_repeated_gives_zeros() -> None:
    with ref.DryWorld(2).rank():
        model = wrapped(MODES["plain"])
        start = model.begin_step()
        train(model, batch())
        with model.catch_up(start):
            model.a.unshard()
            assert not model.a._unit().groups[0].tensors.params[0].unsharded.data.any()
            model.a.reshard()
            train(model, batch())


def test_ranks_may_fail_at_different_places_of_one_step() -> None:
    mode = MODES["plain"]

    def body(rank: ref.Rank) -> Any:
        model = wrapped(mode)
        start = model.begin_step()
        with pytest.raises(Fault), countdown.at((4, 22)[rank.number]):
            run_step(model, mode, rank, number=1)
        with model.catch_up(start):
            run_step(model, mode, rank, number=DUMMY)
        drop(model)
        return next_step(model, mode, rank)

    with at_events() as countdown:
        for (grads, calls), (clean_grads, clean_calls) in zip(ref.World(2).run(body), clean(mode), strict=True):
            assert_equal(grads, clean_grads)
            assert calls == clean_calls
