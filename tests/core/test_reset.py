"""After an exception anywhere, ``reset_iter_state`` and ``zero_grad`` leave no trace of the failed step.

A step fails at one place after another, on every rank alike; the next step is then compared with that of a run which
skipped the failed batch: the same gradients to the bit, the same collectives (REC-01 to REC-07).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import hpcompat
from faults import Countdown, Fault, at_calls, at_events
from hpcompat.contract.states import ShardedState, TrainingState
from hpcompat_conformance import numpy_reference as ref
from training import Net, Stack, assert_equal, batch, gradients, initialize, train, units, wrap, zero_grad

pytestmark = pytest.mark.usefixtures("reference")

Places = Callable[[], AbstractContextManager[Countdown]]

PLACES: dict[str, Places] = {
    "events": at_events,
    "before calls": partial(at_calls, after=False),
    "after calls": partial(at_calls, after=True),
}


class Mode(NamedTuple):
    """A way to train: how the model is wrapped, on what mesh, and what a step is."""

    wrap: Callable[..., Any]
    step: Callable[[Any, int], None]
    mesh: tuple[int, ...] = (2,)


def one_batch(model: Any, rank: int) -> None:
    train(model, batch(rank, step=1))


def without_sync(model: Any, rank: int) -> None:
    model.set_requires_gradient_sync(False)
    train(model, batch(rank, step=1))
    model.set_requires_gradient_sync(True)
    train(model, batch(rank, step=2))


def without_all_reduce(model: Any, rank: int) -> None:
    model.set_requires_all_reduce(False)
    train(model, batch(rank, step=1))
    model.set_requires_all_reduce(True)
    train(model, batch(rank, step=2))


def several_backwards(model: Any, rank: int) -> None:
    model.set_is_last_backward(False)
    train(model, batch(rank, step=1))
    model.set_is_last_backward(True)
    train(model, batch(rank, step=2))


class Short(Net):
    def forward(self, x: ref.Value) -> Any:
        return self.head(self.b(self.a(x)))


def wrap_short(model: Any, **kwargs: Any) -> Any:
    del model.c
    return wrap(model, "a", "b", **kwargs)


MODES = {
    "plain": Mode(wrap_short, one_batch),
    "one rank": Mode(wrap_short, one_batch, (1,)),
    "keeping": Mode(partial(wrap_short, reshard_after_forward=False), one_batch),
    "resharding to a smaller group": Mode(partial(wrap_short, reshard_after_forward=2), one_batch, (4,)),
    "without sync": Mode(wrap_short, without_sync),
    "without sync, in another dtype": Mode(
        partial(wrap_short, mp_policy=hpcompat.MixedPrecisionPolicy(np.float16, np.float32)), without_sync
    ),
    "without all-reduce": Mode(wrap_short, without_all_reduce, (2, 2)),
    "several backwards": Mode(wrap_short, several_backwards),
}


def prepared(mode: Mode, rank: ref.Rank) -> Any:
    """A model that has trained before."""
    mesh = ref.init_device_mesh(mode.mesh, mesh_dim_names=("replicate", "shard")[-len(mode.mesh) :])
    model = mode.wrap(initialize(Short()), mesh=mesh)
    train(model, batch(rank.number))
    zero_grad(model)
    return model


def fail(mode: Mode, model: Any, rank: ref.Rank) -> None:
    """A step that raises, and what users do then; the setters keep what they were told last."""
    with pytest.raises(Fault):
        mode.step(model, rank.number)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)


def next_step(model: Any, rank: ref.Rank) -> tuple[Any, list[ref.Call]]:
    zero_grad(model)
    num_calls = len(rank.calls)
    train(model, batch(rank.number, step=9))
    return gradients(model), rank.calls[num_calls:]


def assert_clean(model: Any) -> None:
    iteration, ctx = model._unit().iteration, model._unit().comm_ctx
    assert (iteration.forward_root, iteration.final_callback_queued) == (None, False)
    assert (ctx.post_forward_order, len(ctx._reductions)) == ([], 0)
    for unit in units(model):
        assert unit.training_state is TrainingState.IDLE
        for group in unit.groups:
            assert group.training_state is TrainingState.IDLE
            assert group.sharded_state is ShardedState.SHARDED
            assert (group.post_forward_indices, group._gather) == ([], None)
            for param in group.tensors.params:
                assert [param.accumulated_grad, param.partial_grad, param.take_new_gradient()] == [None] * 3
                assert all(getattr(module, name) is param.sharded for module, name in param.places)


def places_of(mode: Mode, countdown: Countdown) -> list[str]:
    """What a step of ``mode`` passes."""
    with ref.DryWorld(int(np.prod(mode.mesh))).rank() as rank:
        model = prepared(mode, rank)
        with countdown.at(10**9):
            mode.step(model, rank.number)
    return list(countdown.places)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_next_step_is_that_of_a_run_without_the_failed_one(mode: Mode, places: Places) -> None:
    world = ref.DryWorld(int(np.prod(mode.mesh)))
    with world.rank() as rank:
        clean_grads, clean_calls = next_step(prepared(mode, rank), rank)
    with places() as countdown:
        for number, place in enumerate(places_of(mode, countdown)):
            with world.rank() as rank:
                model = prepared(mode, rank)
                with countdown.at(number):
                    fail(mode, model, rank)
                assert_clean(model)
                grads, calls = next_step(model, rank)
            assert_equal(grads, clean_grads)
            assert calls == clean_calls, place


def test_an_interrupted_registration_is_undone() -> None:
    mode = MODES["plain"]
    with ref.DryWorld(2).rank() as rank, at_calls(after=True) as countdown:
        model = prepared(mode, rank)
        number = places_of(mode, countdown).index("to_unsharded")
        with rank, countdown.at(number):
            fail(mode, model, rank)
        assert_clean(model)


@pytest.mark.parametrize("number", [3, 12, 30])
def test_ranks_that_fail_together_agree_afterwards(number: int) -> None:
    mode = MODES["without sync"]

    def clean(rank: ref.Rank) -> Any:
        return next_step(prepared(mode, rank), rank)

    def failed(rank: ref.Rank) -> Any:
        model = prepared(mode, rank)
        with countdown.at(number):
            fail(mode, model, rank)
        return next_step(model, rank)

    expected = ref.World(2).run(clean)
    with at_events() as countdown:
        for (grads, calls), (clean_grads, clean_calls) in zip(ref.World(2).run(failed), expected, strict=True):
            assert_equal(grads, clean_grads)
            assert calls == clean_calls


class Failing(ref.Module):
    """Raises in its forward, or in its backward, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_in: str | None = None

    def forward(self, x: ref.Value) -> ref.Value:
        if self.fails_in == "forward":
            raise Fault("forward")
        x.hooks.append(self._backward)
        return x

    def _backward(self) -> None:
        if self.fails_in == "backward":
            raise Fault("backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("position", ["before", "inside"])
def test_the_models_own_exceptions_leave_no_trace(where: str, position: str) -> None:
    def run(*, fails: bool) -> Any:
        with ref.DryWorld(2).rank() as rank:
            failing = Failing()
            inner = ref.Sequential(
                [ref.Linear(4, 4), failing, ref.Linear(4, 4)] if position == "inside" else [ref.Linear(4, 4)]
            )
            layers = [ref.Linear(4, 4), inner] if position == "inside" else [ref.Linear(4, 4), failing, inner]
            model = initialize(ref.Sequential(layers))
            wrap(model, "0", str(len(layers) - 1))
            train(model, batch())
            zero_grad(model)
            if fails:
                failing.fails_in = where
                with pytest.raises(Fault):
                    train(model, batch(step=1))
                failing.fails_in = None
                model.reset_iter_state()
            return next_step(model, rank)

    (grads, calls), (clean_grads, clean_calls) = run(fails=True), run(fails=False)
    assert_equal(grads, clean_grads)
    assert calls == clean_calls


# What it leaves, and where it may be called


@pytest.fixture
def model(rank: ref.Rank) -> Any:
    return wrap(initialize(Stack()))


def test_gradients_on_the_shards_stay(model: Any) -> None:
    train(model, batch())
    before = {name: grad.copy() for name, grad in gradients(model).items()}
    model.reset_iter_state()
    assert_equal(gradients(model), before)


def test_setters_stay(model: Any) -> None:
    train(model, batch())
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    model.set_post_optim_event("event")
    model.reset_iter_state()
    for unit in units(model):
        for group in unit.groups:
            assert not group.reduce_grads
            assert not group.reshard_after_backward
    assert model._unit().iteration.is_last_backward is False
    assert model._unit().iteration.post_optim_event == "event"


def test_before_the_first_forward_it_undoes_what_was_done_by_hand(model: Any) -> None:
    # REC-05; native (torch 2.13) raises AttributeError there.
    shard = model.a.weight
    model.a.unshard(async_op=True)
    model.b.unshard()
    model.reset_iter_state()
    assert model.a.weight is shard
    assert_clean(model)
    train(model, batch())


def test_it_is_for_the_root(model: Any) -> None:
    train(model, batch())
    with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root FSDP module"):
        model.b.reset_iter_state()


def test_unfinished_gathers_are_waited_for(model: Any) -> None:
    train(model, batch())
    model.b.unshard(async_op=True)
    model.reset_iter_state()
    assert_clean(model)


def test_twice_is_as_good_as_once(model: Any) -> None:
    with at_events() as countdown, countdown.at(9), pytest.raises(Fault):
        train(model, batch())
    model.reset_iter_state()
    model.reset_iter_state()
    assert_clean(model)
    train(model, batch())
