"""What the scheduler does, in order: exact event lists (SCH-01 to SCH-11)."""

from __future__ import annotations

import pytest

from hpcompat_conformance import numpy_reference as ref
from recording_streams import RecordingStreams
from schedules import (
    BACKWARD,
    BACKWARD_INTO_ANOTHER_FORWARD,
    BACKWARD_KEEPING,
    FORWARD,
    FORWARD_KEEPING,
    events_of,
    expected,
    step,
    without,
)
from training import Net, Stack, batch, wrap

pytestmark = pytest.mark.usefixtures("rank")

# reshard_after_forward


@pytest.mark.parametrize("reshard_after_forward", [True, None])
def test_resharding_gathers_once_more_for_backward(reshard_after_forward: bool | None) -> None:
    model = wrap(Stack(), reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        assert step(model) == expected(FORWARD + BACKWARD)


def test_not_resharding_gathers_once() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    for _ in range(2):
        assert step(model) == expected(FORWARD_KEEPING + BACKWARD_KEEPING)


def test_an_int_reshards_to_the_smaller_group() -> None:
    with ref.DryWorld(4).rank() as rank:
        model = wrap(Stack(), reshard_after_forward=2)
        assert step(model) == expected(FORWARD.replace("reshard", "reshard_post_forward") + BACKWARD)
    gathers = [call.num_ranks for call in rank.calls if call.name == "all_gather"]
    assert gathers == [4, 4, 4, 2, 2, 2]


def test_the_root_keeps_its_parameters_by_default() -> None:
    assert step(wrap(Net())) == expected(
        """
        pre_forward root, unshard root, wait_for_unshard root
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
        pre_forward c, unshard c, wait_for_unshard c, reshard c, post_forward c
        post_forward root
        pre_backward root, prefetch c, unshard c
        pre_backward c, wait_for_unshard c, prefetch b, unshard b
        post_backward c, reshard c, reduce c
        pre_backward b, wait_for_unshard b, prefetch a, unshard a
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        post_backward root, reshard root, reduce root
        final_callback root
        """
    )


def test_a_root_told_to_reshard_does() -> None:
    events = step(wrap(Net(), reshard_after_forward=True))
    start = events.index("reshard root")
    assert events[start : start + 6] == expected(
        "reshard root, post_forward root, pre_backward root, unshard root, wait_for_unshard root, prefetch c"
    )


def test_the_setter_ends_the_roots_special_treatment() -> None:
    model = wrap(Net())
    model.set_reshard_after_forward(True)
    events = step(model)
    assert "unshard root" in events[events.index("pre_backward root") :]


# Backward without gradients of the inputs


def test_the_first_layer_reduces_in_the_final_callback_if_the_input_needs_no_gradient() -> None:
    assert step(wrap(Stack()), requires_grad=False)[-6:] == expected(
        "pre_backward a, wait_for_unshard a, final_callback root, post_backward a, reshard a, reduce a"
    )


def test_a_frozen_unit_is_gathered_for_backward_but_not_reduced() -> None:
    model = Stack()
    for _, parameter in model.b.named_parameters():
        parameter.requires_grad = False
    assert step(wrap(model)) == [event for event in expected(FORWARD + BACKWARD) if event != "reduce b"]


def test_a_unit_whose_backward_needs_no_parameters_is_not_gathered_for_it() -> None:
    model = wrap(Stack())
    model.b.set_unshard_in_backward(False)
    events = step(model)
    backward = events[events.index("pre_backward c") :]
    assert "unshard b" not in backward
    assert "prefetch b" in backward
    assert "reduce b" in backward


# Accumulation


def test_without_sync_nothing_is_reduced() -> None:
    model = wrap(Stack())
    model.set_requires_gradient_sync(False)
    assert step(model) == without(FORWARD + BACKWARD, "reduce")
    model.set_requires_gradient_sync(True)
    assert step(model) == expected(FORWARD + BACKWARD)


def test_without_reshard_after_backward_the_next_forward_gathers_nothing() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    assert step(model) == without(FORWARD_KEEPING + BACKWARD_KEEPING, "reduce", "reshard")
    assert step(model) == without(
        FORWARD_KEEPING + BACKWARD_KEEPING, "reduce", "reshard", "unshard", "wait_for_unshard"
    )
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    assert step(model) == without(FORWARD_KEEPING + BACKWARD_KEEPING, "unshard", "wait_for_unshard")


def test_the_order_of_forwards_is_kept_until_the_last_backward() -> None:
    model = wrap(Stack())
    model.set_is_last_backward(False)
    assert step(model) == expected(FORWARD + BACKWARD)
    model.set_is_last_backward(True)
    assert step(model) == expected(FORWARD + BACKWARD_INTO_ANOTHER_FORWARD)
    assert step(model) == expected(FORWARD + BACKWARD), "the last backward dropped the gather and the order"


# Prefetching


def test_explicit_forward_prefetch_follows_the_own_wait() -> None:
    model = wrap(Stack())
    model.a.set_modules_to_forward_prefetch([model.b, model.c])
    assert step(model) == expected(
        """
        pre_forward root
        pre_forward a, unshard a, wait_for_unshard a, prefetch b, unshard b, prefetch c, unshard c
        reshard a, post_forward a
        pre_forward b, wait_for_unshard b, reshard b, post_forward b
        pre_forward c, wait_for_unshard c, reshard c, post_forward c
        post_forward root
        """
        + BACKWARD
    )


def test_explicit_backward_prefetch_replaces_the_implicit_one_of_that_unit() -> None:
    model = wrap(Stack())
    model.c.set_modules_to_backward_prefetch([model.a, model.b])
    model.b.set_modules_to_backward_prefetch([model.b])
    assert step(model) == expected(
        FORWARD
        + """
        pre_backward c, unshard c, wait_for_unshard c, prefetch a, unshard a, prefetch b, unshard b
        pre_backward root
        post_backward c, reshard c, reduce c
        pre_backward b, wait_for_unshard b, prefetch b
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        """
    )


class Detour(Stack):
    """Runs b, but its output leads nowhere."""

    def forward(self, x: ref.Value) -> ref.Value:
        x = self.a(x)
        self.b(x)
        return self.c(x)


def test_a_wrong_guess_is_dropped() -> None:
    model = wrap(Detour())
    once = expected(
        FORWARD
        + """
        pre_backward c, unshard c, wait_for_unshard c, prefetch b, unshard b
        pre_backward root
        post_backward c, reshard c, reduce c
        pre_backward a, unshard a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        post_backward b
        """
    )
    assert step(model) == once
    assert step(model) == once, "b is gathered again, for the gather that nobody used is gone"


def test_a_device_with_streams_has_the_same_schedule() -> None:
    with ref.registered(ref.NumpyBackend(RecordingStreams())):
        model = wrap(Stack())
        assert step(model) == expected(FORWARD + BACKWARD)
        assert step(model) == expected(FORWARD + BACKWARD)


# Other ways through the modules


class Twice(Stack):
    def forward(self, x: ref.Value) -> ref.Value:
        return self.b(self.a(self.a(x)))


def test_a_module_called_twice_is_gathered_and_reduced_twice() -> None:
    assert step(wrap(Twice())) == expected(
        """
        pre_forward root
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward a, unshard a, wait_for_unshard a, reshard a, post_forward a
        pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
        post_forward root
        pre_backward b, unshard b, wait_for_unshard b, prefetch a, unshard a
        pre_backward root
        post_backward b, reshard b, reduce b
        pre_backward a, wait_for_unshard a, prefetch a
        post_backward a, reshard a, reduce a
        pre_backward a, unshard a, wait_for_unshard a
        post_backward a, reshard a, reduce a
        final_callback root
        post_backward c
        """
    )


def test_several_forwards_before_one_backward_are_undone_last_first() -> None:
    model = wrap(Stack())

    def body() -> None:
        first, second = model(batch()), model(batch(step=1))
        ref.backward(ref.total(ref.add(first, second)))

    backward = BACKWARD.replace("final_callback root", "")
    undo_second = BACKWARD_INTO_ANOTHER_FORWARD.replace("final_callback root", "")
    undo_first = backward.replace("pre_backward c, unshard c,", "pre_backward c,") + "final_callback root"
    assert events_of(body) == expected(FORWARD + FORWARD + undo_second + undo_first)


def test_evaluation_leaves_nothing_to_do() -> None:
    model = wrap(Stack())
    with ref.no_grad():
        for _ in range(2):
            assert events_of(lambda: model(batch())) == expected(FORWARD)


def test_the_order_of_an_evaluation_is_kept_until_the_next_backward() -> None:
    model = wrap(Stack())
    with ref.no_grad():
        for _ in range(3):
            model(batch())
    assert step(model) == expected(FORWARD + BACKWARD_INTO_ANOTHER_FORWARD)
    assert model._unit().comm_ctx.post_forward_order == []
    assert step(model) == expected(FORWARD + BACKWARD)


def test_evaluation_keeps_what_is_not_resharded() -> None:
    model = wrap(Stack(), reshard_after_forward=False)
    with ref.no_grad():
        assert events_of(lambda: model(batch())) == expected(FORWARD_KEEPING)
        assert events_of(lambda: model(batch())) == without(FORWARD_KEEPING, "unshard", "wait_for_unshard")


def test_a_unit_below_the_root_can_run_alone_after_the_first_step() -> None:
    model = wrap(Stack())
    step(model)
    assert step(model.b) == expected(
        """
        pre_forward b, unshard b, wait_for_unshard b, reshard b, post_forward b
        pre_backward b, unshard b, wait_for_unshard b
        post_backward b, reshard b, reduce b
        final_callback root
        post_backward a, post_backward c
        """
    )
