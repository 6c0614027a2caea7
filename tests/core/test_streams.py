"""The commands that a step gives to the streams of a device, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hpcompat
from hpcompat.core.comm_ctx import CommContext
from hpcompat_conformance import numpy_reference as ref
from recording_streams import RecordingStreams
from training import Net, Stack, batch, train, wrap


@pytest.fixture
def streams() -> RecordingStreams:
    return RecordingStreams()


@pytest.fixture
def device(streams: RecordingStreams) -> Iterator[RecordingStreams]:
    """Rank 0 of four on a device with streams."""
    with ref.registered(ref.NumpyBackend(streams)), ref.DryWorld(4).rank():
        yield streams


def one_layer(**kwargs: Any) -> Any:
    return wrap(ref.Sequential([ref.Linear(4, 4)]), "0", **kwargs)


def log_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


FORWARD_LOG = """
    copy-in waits for current
    gather waits for current
    gather waits for copy-in
    gather records event 1
    current waits for event 1
    current records event 2
    copy-in waits for event 2
    gather waits for event 2
"""
BACKWARD_LOG = """
    gather waits for copy-in
    gather records event 3
    current waits for event 3
    current records event 4
    copy-in waits for event 4
    gather waits for event 4
    reduce waits for current
    reduce records event 5
    reduce records event 6
    current waits for event 5
    current waits for event 6
"""


def test_the_streams_of_a_step(device: RecordingStreams) -> None:
    """Gathers wait for the optimizer, copies for gathers, the next gather for the copy, and all for the gradients."""
    train(one_layer(), batch())
    assert device.log == log_of(FORWARD_LOG + BACKWARD_LOG)


def test_the_streams_of_a_backward_that_is_not_the_last(device: RecordingStreams) -> None:
    model = one_layer()
    model.set_is_last_backward(False)
    train(model, batch())
    assert device.take_log() == log_of(FORWARD_LOG + BACKWARD_LOG)[:-2], "nothing waits for the gradients yet"
    model.hsdp_sync_stream()
    assert device.take_log() == ["current waits for event 5", "current waits for event 6"]


def test_the_buffer_of_a_gather_is_held_until_the_next_is_copied(device: RecordingStreams) -> None:
    model = wrap(ref.Sequential([ref.Linear(4, 4), ref.Linear(4, 4)]), "0", "1")
    with ref.no_grad():
        model(batch())
    assert device.log == log_of(
        """
        copy-in waits for current
        gather waits for current
        gather waits for copy-in
        gather records event 1
        current waits for event 1
        current records event 2
        gather waits for copy-in
        gather records event 3
        copy-in waits for event 2
        gather waits for event 2
        current waits for event 3
        current records event 4
        copy-in waits for event 4
        gather waits for event 4
        """
    ), "the second gather does not wait for event 2, the copy of the first"


def test_a_post_optimizer_event_replaces_the_wait_for_the_current_stream_once(device: RecordingStreams) -> None:
    model = one_layer()
    with ref.no_grad():
        model(batch())
        model.set_post_optim_event("optimizer step")
        device.take_log()
        model(batch())
        assert device.take_log()[:3] == [
            "copy-in waits for optimizer step",
            "gather waits for optimizer step",
            "gather waits for copy-in",
        ]
        model(batch())
        assert device.take_log()[:2] == ["copy-in waits for current", "gather waits for current"]


def test_a_gather_from_the_smaller_group_waits_for_the_slice(device: RecordingStreams) -> None:
    model = one_layer(reshard_after_forward=2)
    with ref.no_grad():
        model(batch())
    written = device.take_log()[-3]
    assert written == "current records event 3"
    model(batch())
    assert device.log[2:4] == ["copy-in waits for event 3", "gather waits for event 3"]


def test_all_reduces_have_a_stream_of_their_own(device: RecordingStreams) -> None:
    mesh = ref.init_device_mesh((2, 2), mesh_dim_names=("replicate", "shard"))
    model = one_layer(mesh=mesh)
    train(model, batch())
    assert device.log[-6:] == log_of(
        """
        reduce waits for current
        reduce records event 5
        all-reduce waits for reduce
        all-reduce records event 6
        current waits for event 5
        current waits for event 6
        """
    )


def test_a_reduction_waits_for_the_one_before_that_another_stream_used(device: RecordingStreams) -> None:
    """Where several backwards come before the last; the output of the one before is then let go."""
    mesh = ref.init_device_mesh((2, 2), mesh_dim_names=("replicate", "shard"))
    model = one_layer(mesh=mesh)
    model.set_is_last_backward(False)
    train(model, batch())
    assert device.take_log()[-1] == "all-reduce records event 6", "nothing waits yet"
    train(model, batch())
    assert device.take_log()[-5:] == log_of(
        """
        reduce waits for current
        reduce records event 11
        all-reduce waits for reduce
        all-reduce records event 12
        current waits for event 6
        """
    )


def test_a_hook_runs_on_its_stream(device: RecordingStreams) -> None:
    model = one_layer()
    stream = type(device.current())(device, "hook")
    model[0].set_all_reduce_hook(lambda flat: device.log.append("hook"), stream=stream)
    train(model, batch())
    assert device.log[-7:] == log_of(
        """
        reduce waits for current
        reduce records event 5
        hook waits for reduce
        hook
        hook records event 6
        current waits for event 5
        current waits for event 6
        """
    )


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_cap_holds_in_training_whenever_it_is_set(
    device: RecordingStreams, monkeypatch: pytest.MonkeyPatch, cap: int, is_late: bool
) -> None:
    # Native (torch 2.13) ignores a cap that is set after the first forward.
    kept: list[int] = []
    submit = CommContext.submit

    def submit_and_count(self: CommContext, group: Any, reduction: Any) -> None:
        submit(self, group, reduction)
        kept.append(len(self._reductions))

    monkeypatch.setattr(CommContext, "submit", submit_and_count)
    model = wrap(Stack())
    if is_late:
        train(model, batch())
        kept.clear()
    model.b.set_reduce_scatter_max_input_buffers(cap)  # one unit's cap is the tree's
    train(model, batch())
    assert kept == [min(number, cap) for number in (1, 2, 3)]


def test_the_groups_of_a_unit_make_room_once(device: RecordingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction of the group that comes first in backward overlaps with the unit's other groups."""
    kept: list[int] = []
    submit = CommContext.submit

    def submit_and_count(self: CommContext, group: Any, reduction: Any) -> None:
        submit(self, group, reduction)
        kept.append(len(self._reductions))

    monkeypatch.setattr(CommContext, "submit", submit_and_count)
    model = wrap(Stack(), comm_fusion=False)
    train(model, batch())
    assert kept == [1, 2] * 3


# Several roots


def test_roots_that_share_a_context_share_it_in_every_unit(device: RecordingStreams) -> None:
    stages = [wrap(Net()), wrap(Net())]
    hpcompat.share_comm_ctx(stages)
    hidden = batch()
    for stage in stages:
        hidden = stage(hidden)
    ref.backward(ref.total(hidden))
    contexts = {unit.comm_ctx for stage in stages for unit in stage._unit().iteration.units}
    contexts |= {group.comm_ctx for stage in stages for unit in stage._unit().iteration.units for group in unit.groups}
    assert len(contexts) == 1
    assert len(device.priorities) == 4, "the streams were made once"


def test_roots_that_share_a_context_keep_the_largest_cap(device: RecordingStreams) -> None:
    stages = [wrap(Stack()), wrap(Stack())]
    stages[0].set_reduce_scatter_max_input_buffers(3)
    hpcompat.share_comm_ctx(stages)
    ref.backward(ref.total(stages[1](stages[0](batch()))))
    assert stages[0]._unit().comm_ctx.max_input_buffers == 3
