"""What wrapped modules can do: every setter checks its argument and acts on the units that it says."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat.contract.states import ShardedState
from hpcompat.errors import CapabilityError, UserError
from hpcompat_conformance import numpy_reference as ref
from schedules import expected, lines
from training import Net, Stack, batch, train, units, wrap

pytestmark = pytest.mark.usefixtures("rank")

Group = Any


class Buffers:
    """The shape of a custom collective."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class OnlyBuffers:
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any: ...


def attribute(name: str) -> Callable[[Group], Any]:
    return operator.attrgetter(name)


# Setters that take a bool: by name, what of a group they change, and whether they recurse.
BOOLS = {
    "set_reshard_after_backward": ("reshard_after_backward", True),
    "set_requires_gradient_sync": ("reduce_grads", True),
    "set_requires_all_reduce": ("all_reduce_grads", True),
    "set_reduce_scatter_unused_params": ("reduce_scatter_unused_params", True),
    "set_unshard_in_backward": ("unshard_in_backward", False),
    "set_force_sum_reduction_for_comms": ("division.forces_sum", False),
    "_set_unshard_async_op": ("unshard_async_op", True),
}
OTHER_BOOLS = [
    "set_is_last_backward",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "unshard",
]
PUBLIC_BOOLS = [name for name in (*BOOLS, *OTHER_BOOLS) if not name.startswith("_")]


@pytest.mark.parametrize("value", ["False", "", 0, 1, None, [], np.False_], ids=repr)
@pytest.mark.parametrize("name", PUBLIC_BOOLS)
def test_a_bool_is_a_bool(name: str, value: object) -> None:
    """A string is true, whatever it says."""
    model = wrap(Net())
    before = [vars(group).copy() for unit in units(model) for group in unit.groups]
    with pytest.raises(TypeError, match=r"to be a bool, but got"):
        getattr(model, name)(value)
    assert [vars(group) for unit in units(model) for group in unit.groups] == before


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("set_reshard_after_forward", 2, ValueError, "reshard_after_forward should be a bool"),
        ("set_reshard_after_forward", "True", ValueError, "reshard_after_forward should be a bool"),
        ("set_reshard_after_forward", None, ValueError, "reshard_after_forward should be a bool"),
        ("set_gradient_divide_factor", "2", TypeError, "divide factor to be a number"),
        ("set_gradient_divide_factor", True, TypeError, "divide factor to be a number"),
        ("set_gradient_divide_factor", None, TypeError, "divide factor to be a number"),
        ("set_gradient_divide_factor", 2j, TypeError, "divide factor to be a number"),
        ("set_gradient_divide_factor", 0, ValueError, "positive and finite"),
        ("set_gradient_divide_factor", -1.0, ValueError, "positive and finite"),
        ("set_gradient_divide_factor", math.inf, ValueError, "positive and finite"),
        ("set_gradient_divide_factor", math.nan, ValueError, "positive and finite"),
        ("set_reduce_scatter_divide_factor", "2", TypeError, "divide factor to be a number"),
        ("set_gradient_scaling_factor", "2", TypeError, "scaling factor to be a number"),
        ("set_gradient_scaling_factor", True, TypeError, "scaling factor to be a number"),
        ("set_reduce_op_type", "mean", ValueError, 'to be "avg" or "sum"'),
        ("set_reduce_op_type", None, ValueError, 'to be "avg" or "sum"'),
        ("set_reduce_op_type", "AVG", ValueError, 'to be "avg" or "sum"'),
        ("set_reduce_scatter_max_input_buffers", 1.0, TypeError, "must be an int"),
        ("set_reduce_scatter_max_input_buffers", True, TypeError, "must be an int"),
        ("set_reduce_scatter_max_input_buffers", "1", TypeError, "must be an int"),
        ("set_reduce_scatter_max_input_buffers", 0, ValueError, "must be a positive int"),
        ("set_reduce_scatter_max_input_buffers", -1, ValueError, "must be a positive int"),
        ("set_modules_to_forward_prefetch", None, TypeError, "expected a list of FSDPModules"),
        ("set_modules_to_forward_prefetch", [ref.Linear(1, 1)], ValueError, "Expects FSDPModule but got"),
        ("set_modules_to_forward_prefetch", "ab", ValueError, "Expects FSDPModule but got"),
        ("set_modules_to_backward_prefetch", 1, TypeError, "expected a list of FSDPModules"),
        ("set_modules_to_backward_prefetch", [None], ValueError, "Expects FSDPModule but got"),
        ("set_custom_all_gather", None, TypeError, "allocate"),
        ("set_custom_all_gather", OnlyBuffers(), TypeError, "allocate"),
        ("set_custom_all_gather", lambda *args: None, TypeError, "allocate"),
        ("set_custom_reduce_scatter", OnlyBuffers(), TypeError, "allocate"),
        ("set_custom_reduce_scatter", 3, TypeError, "allocate"),
        ("set_all_reduce_hook", None, TypeError, "hook to be callable"),
        ("set_all_reduce_hook", "hook", TypeError, "hook to be callable"),
        ("set_symm_mem_for_comm", "GLOO", ValueError, 'to be "NCCL"'),
        ("set_symm_mem_for_comm", "NCCL", CapabilityError, "symm_mem"),
    ],
)
def test_setters_refuse_what_they_cannot_mean(name: str, value: object, error: type[Exception], message: str) -> None:
    model = wrap(Net())
    with pytest.raises(error, match=message):
        getattr(model, name)(value)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.float64(2), np.int64(2)], ids=repr)
def test_factors_are_numbers_of_python_and_of_numpy(number: float) -> None:
    model = wrap(Net())
    model.set_reduce_scatter_divide_factor(number)  # its older name
    model.set_gradient_divide_factor(number)
    model.set_gradient_scaling_factor(number)
    assert {type(group.gradient_scaling_factor) for unit in units(model) for group in unit.groups} == {float}


class Elements:
    """The shape of a tensor, as far as the setter asks."""

    def __init__(self, numel: Any) -> None:
        self.numel = numel


@pytest.mark.parametrize(
    "value",
    [[2.0], np.ones(3), math.nan, math.inf, -math.inf, 2j, object(), Elements(lambda: 2), Elements(1)],
    ids=["list", "array", "nan", "inf", "-inf", "complex", "object", "two elements", "numel that is no method"],
)
def test_a_scaling_factor_is_one_number(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="scaling factor"):
        wrap(Net()).set_gradient_scaling_factor(value)


@pytest.mark.parametrize("value", [None, 2, -0.5, Elements(lambda: 1)], ids=["None", "int", "float", "one element"])
def test_a_scaling_factor_may_be_a_number_or_a_tensor_or_none(value: object) -> None:
    model = wrap(Net())
    model.set_gradient_scaling_factor(3)
    model.set_gradient_scaling_factor(value)
    assert told(model, attribute("gradient_scaling_factor"), value) == EVERYONE


@pytest.mark.parametrize("name", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"])
def test_a_module_for_a_list_is_refused(name: str) -> None:
    model = wrap(Net())
    with pytest.raises(TypeError, match="expected a list of FSDPModules"):
        getattr(model, name)(model.a)


def test_there_is_a_row_for_every_setter() -> None:
    public = {name for name in dir(hpcompat.HSDPModule) if name.startswith("set_")}
    tested = {*PUBLIC_BOOLS, *(row[0] for row in _table(test_setters_refuse_what_they_cannot_mean))}
    assert public - tested == {"set_post_optim_event"}, "which takes whatever an event is on the device"


def _table(test: Any) -> list[tuple[Any, ...]]:
    return [row for mark in test.pytestmark if mark.name == "parametrize" for row in mark.args[1]]


# Recursion


def told(model: Any, of: Callable[[Group], Any], value: object) -> set[str]:
    """The children of ``model``, and ``root``, whose groups have ``value``."""
    members = {"root": model, "a": model.a, "b": model.b, "c": model.c}
    return {name for name, module in members.items() if all(of(group) == value for group in module._unit().groups)}


EVERYONE = {"root", "a", "b", "c"}


@pytest.mark.parametrize("name", BOOLS)
def test_bools_reach_the_units_below_as_documented(name: str) -> None:
    changed, recurses = BOOLS[name]
    model = wrap(Net())
    before = attribute(changed)(model._unit().groups[0])
    getattr(model, name)(not before)
    assert told(model, attribute(changed), not before) == (EVERYONE if recurses else {"root"})
    getattr(model, name)(before)
    getattr(model.b, name)(not before)
    assert told(model, attribute(changed), not before) == {"b"}


@pytest.mark.parametrize(
    ("name", "value", "changed"),
    [
        ("set_reshard_after_backward", False, "reshard_after_backward"),
        ("set_requires_gradient_sync", False, "reduce_grads"),
        ("set_requires_all_reduce", False, "all_reduce_grads"),
        ("set_reduce_scatter_unused_params", True, "reduce_scatter_unused_params"),
        ("set_reduce_scatter_max_input_buffers", 3, "max_input_buffers"),
        ("set_reshard_after_forward", False, "post_forward_mesh_info"),
    ],
)
def test_recursion_can_be_turned_off(name: str, value: object, changed: str) -> None:
    model = wrap(Net())
    getattr(model, name)(value, recurse=False)
    stored = None if changed == "post_forward_mesh_info" else value
    assert told(model, attribute(changed), stored) == {"root"}
    getattr(model, name)(value)
    assert told(model, attribute(changed), stored) == EVERYONE


def test_gradient_sync_switches_the_all_reduce_too() -> None:
    model = wrap(Net())
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    assert told(model, attribute("all_reduce_grads"), True) == EVERYONE


@pytest.mark.parametrize(
    ("name", "value", "changed", "stored", "reached"),
    [
        ("set_gradient_divide_factor", 3, "division.factor", 3.0, {"root"}),
        ("set_gradient_scaling_factor", 3, "gradient_scaling_factor", 3, EVERYONE),
        ("set_reduce_op_type", "sum", "division.op_type", "sum", EVERYONE),
        ("set_custom_all_gather", Buffers(), "has_custom_comm", True, {"root"}),
        ("set_custom_reduce_scatter", Buffers(), "has_custom_comm", True, {"root"}),
        ("set_all_reduce_hook", print, "all_reduce_hook", print, {"root"}),
    ],
)
def test_other_setters_reach_what_they_say(name: str, value: Any, changed: str, stored: Any, reached: set[str]) -> None:
    model = wrap(Net())
    getattr(model, name)(value)
    assert told(model, attribute(changed), stored) == reached


def test_the_last_backward_is_the_trees() -> None:
    model = wrap(Net())
    train(model, batch())
    model.b.set_is_last_backward(False)
    assert model._unit().iteration.is_last_backward is False


def test_a_stream_for_the_hook_is_refused_where_the_all_reduce_has_one() -> None:
    with ref.DryWorld(4).rank():
        mesh = ref.init_device_mesh((2, 2), mesh_dim_names=("replicate", "shard"))
        model = wrap(Net(), mesh=mesh)
        with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
            model.set_all_reduce_hook(print, stream="stream")


@pytest.mark.parametrize("name", ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_one_object_for_several_groups_is_refused(name: str) -> None:
    model = hpcompat.fully_shard(ref.Linear(4, 4), comm_fusion=False)
    with pytest.raises(ValueError, match="is not supported with multiple param groups"):
        getattr(model, name)(Buffers())


def test_a_separate_reduce_scatter_group_needs_shards() -> None:
    model = ref.Linear(4, 4)
    hpcompat.fully_shard(model, replicate_params={model.weight})
    with pytest.raises(UserError, match="Expected mesh_info to be FSDPMeshInfo"):
        model.set_separate_reduce_scatter_group()


# Unshard, reshard


def test_unshard_and_reshard_swap_what_is_registered() -> None:
    model = wrap(Net())
    shard = model.b.weight
    assert shard.data.shape == (2, 4)
    assert model.b.unshard() is None
    assert model.b.weight.data.shape == (4, 4)
    assert model.a.weight.data.shape == (2, 4), "only this unit"
    model.b.reshard()
    assert model.b.weight is shard


def test_an_async_unshard_is_there_after_the_handles_wait() -> None:
    model = wrap(Net())
    handle = model.b.unshard(async_op=True)
    assert isinstance(handle, hpcompat.UnshardHandle)
    assert model.b.weight.data.shape == (2, 4)
    handle.wait()
    assert model.b.weight.data.shape == (4, 4)
    handle.wait()


def test_forward_takes_up_an_unshard_that_nobody_waited_for() -> None:
    model = wrap(Stack())
    handle = model.b.unshard(async_op=True)
    with hpcompat.record_events() as events:
        train(model, batch())
    assert lines(events)[5:9] == expected("post_forward a, pre_forward b, wait_for_unshard b, reshard b")
    handle.wait()
    assert model.b._unit().groups[0].sharded_state is ShardedState.SHARDED, "a handle of the past changes nothing"


def test_reshard_by_hand_does_not_ask_the_policy() -> None:
    for policy, state in ((True, ShardedState.SHARDED), (False, ShardedState.UNSHARDED)):
        model = wrap(Stack(), reshard_after_forward=policy)
        with ref.no_grad():
            model(batch())
        assert model.a._unit().groups[0].sharded_state is state
        model.a.reshard()
        assert model.a._unit().groups[0].sharded_state is ShardedState.SHARDED, "outside forward, always"


# A forward that was refused


def test_a_refused_forward_can_be_mended_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parameters on the meta device, which ``to_empty`` mends."""
    model = wrap(Net())
    tensors = model.b._unit().groups[0].tensors
    with monkeypatch.context() as patch:
        patch.setattr(tensors, "prepare", _refuse)
        with pytest.raises(RuntimeError, match="should be materialized"):
            model(batch())
    with hpcompat.record_events() as retried:
        train(model, batch())
    fresh = wrap(Net())
    with hpcompat.record_events() as clean:
        train(fresh, batch())
    assert retried == clean


def _refuse() -> None:
    raise RuntimeError("FSDP parameters should be materialized from meta device before training")


# The class


def test_the_class_is_the_original_one_and_more() -> None:
    model = hpcompat.fully_shard(ref.Linear(4, 4))
    assert type(model).__name__ == "FSDPLinear"
    assert isinstance(model, ref.Linear)
    assert isinstance(model, hpcompat.FSDPModule)
    assert type(hpcompat.fully_shard(ref.Linear(2, 2))) is type(model)


def test_slicing_a_wrapped_container_gives_a_plain_one() -> None:
    model = hpcompat.fully_shard(ref.Sequential([ref.Linear(4, 4) for _ in range(3)]))
    assert type(model[1:]) is ref.Sequential
    assert [type(layer) for layer in model[1:]] == [ref.Linear, ref.Linear]


def test_copies_are_refused() -> None:
    with pytest.raises(UserError, match="does not support deepcopy"):
        copy.deepcopy(hpcompat.fully_shard(ref.Linear(4, 4)))


def test_a_wrapped_class_without_a_unit_says_so() -> None:
    stray = ref.Linear(4, 4)
    stray.__class__ = type(hpcompat.fully_shard(ref.Linear(4, 4)))
    with pytest.raises(RuntimeError, match="has no unit; call fully_shard on it"):
        stray.reshard()


# Functions beside the methods


class WithMethod(Stack):
    def generate(self, x: ref.Value, *, scale: int = 1) -> Any:
        return self.b(x) if scale == 1 else None


def test_a_registered_method_gathers_as_forward_does() -> None:
    """ENT-01, pytorch/pytorch#125394."""
    model = hpcompat.fully_shard(WithMethod())
    hpcompat.register_fsdp_forward_method(model, "generate")
    assert model.generate.__name__ == "generate"
    with hpcompat.record_events() as events:
        ref.backward(ref.total(model.generate(batch(), scale=1)))
    assert lines(events) == expected(
        """
        pre_forward root, unshard root, wait_for_unshard root, post_forward root
        pre_backward root, post_backward root, reshard root, reduce root, final_callback root
        """
    )


def test_registering_a_method_of_a_plain_module_does_nothing() -> None:
    model = WithMethod()
    hpcompat.register_fsdp_forward_method(model, "generate")
    assert "generate" not in vars(model)


@pytest.mark.parametrize("name", ["absent", "number"])
def test_only_methods_can_be_registered(name: str) -> None:
    model = hpcompat.fully_shard(WithMethod())
    model.number = 42
    with pytest.raises(ValueError, match="does not have a method"):
        hpcompat.register_fsdp_forward_method(model, name)


def test_only_wrapped_modules_share_a_context() -> None:
    hpcompat.share_comm_ctx([])
    with pytest.raises(ValueError, match="Expects list of FSDPModules but got"):
        hpcompat.share_comm_ctx([wrap(Net()), Net()])
