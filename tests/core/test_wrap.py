"""What ``fully_shard`` takes, what it refuses, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat.core.unit import unit_of
from hpcompat.errors import CapabilityError, UserError
from hpcompat_conformance import numpy_reference as ref
from training import Net, Stack, batch, train, wrap

pytestmark = pytest.mark.usefixtures("rank")


def names(module: Any) -> list[list[str]]:
    return [group.tensors.names for group in module._unit().groups]


# What a unit holds


def test_the_argument_comes_back() -> None:
    model, members = ref.Linear(4, 4), [ref.Linear(4, 4), ref.Linear(4, 4)]
    assert hpcompat.fully_shard(model) is model
    assert hpcompat.fully_shard(members) is members
    assert unit_of(members[0]) is unit_of(members[1]) is not None


def test_a_unit_takes_what_earlier_calls_left() -> None:
    model = wrap(Net())
    assert names(model.a) == [["weight", "bias"]]
    assert names(model) == [["weight", "bias"]]
    train(model, batch())
    assert names(model.b) == [["b.weight", "b.bias"]]
    assert names(model) == [["head.weight", "head.bias"]]


def test_a_root_without_parameters_has_no_group() -> None:
    assert names(wrap(Stack())) == []


def test_members_of_a_list_inside_others_are_left_to_those() -> None:
    inner = Stack()
    outer = ref.Sequential([inner, ref.Linear(4, 4)])
    hpcompat.fully_shard([outer, inner.b, outer])
    assert outer._unit().modules == (outer,)
    assert unit_of(inner.b) is None
    assert len(names(outer)[0]) == 8


def test_parameters_keep_their_names_and_places() -> None:
    model = Net()
    before = [name for name, _ in model.named_parameters()]
    wrap(model)
    assert [name for name, _ in model.named_parameters()] == before


def test_parameters_keep_their_number_when_they_are_replaced() -> None:
    model = ref.Linear(4, 4)
    uid = model.weight.uid
    hpcompat.fully_shard(model)
    assert model.weight.uid == uid
    model.unshard()
    assert model.weight.uid == uid


def test_modules_of_ignored_parameters_only_are_not_managed() -> None:
    from hpcompat.core.wrap import managed_modules

    model = Net()
    model.b.running = ref.Buffer(np.zeros(4))
    ignored = frozenset(parameter for module in (model.a, model.b) for _, parameter in module.named_parameters())
    assert managed_modules(ref.NumpyBackend(), (model,), ignored) == [model.b, model.c, model.head, model], (
        "b has a buffer"
    )


# Refusals


def test_twice_is_refused() -> None:
    model = hpcompat.fully_shard(ref.Linear(4, 4))
    with pytest.raises(UserError, match="can only be applied to a module once"):
        hpcompat.fully_shard(model)
    with pytest.raises(UserError, match="can only be applied to a module once"):
        hpcompat.fully_shard([ref.Linear(4, 4), model])


def test_bare_containers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not support containers that do not implement forward.*ModuleList"):
        hpcompat.fully_shard(ref.ModuleList([ref.Linear(4, 4)]))


def test_scalars_are_refused_by_name() -> None:
    model = ref.Linear(4, 4)
    model.temperature = ref.Parameter(np.float32(1).reshape(()))
    with pytest.raises(ValueError, match=r"doesn't support scalar parameters\. Change temperature to a 1D tensor"):
        hpcompat.fully_shard(model)


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_is_refused(empty: Any) -> None:
    with pytest.raises(ValueError, match="non-empty list of modules"):
        hpcompat.fully_shard(empty)


@pytest.mark.parametrize(
    "value", ["model", 3, None, ref.Parameter(np.zeros(3))], ids=["str", "int", "None", "parameter"]
)
def test_only_modules_are_wrapped(value: Any) -> None:
    with pytest.raises(TypeError):
        hpcompat.fully_shard(value)
    with pytest.raises(TypeError):
        hpcompat.fully_shard([ref.Linear(4, 4), value])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"mesh": "cpu"}, TypeError, "mesh to be a DeviceMesh"),
        ({"mesh": 2}, TypeError, "mesh to be a DeviceMesh"),
        ({"reshard_after_forward": "yes"}, ValueError, "should be a bool or an int"),
        ({"reshard_after_forward": 3}, ValueError, "should be a factor of 2"),
        ({"shard_placement_fn": 0}, TypeError, "shard_placement_fn to be callable"),
        ({"shard_placement_fn": lambda parameter: 0}, ValueError, "Invalid shard_placement_fn result"),
        ({"mp_policy": np.float16}, TypeError, "mp_policy to be a MixedPrecisionPolicy"),
        ({"mp_policy": None}, TypeError, "mp_policy to be a MixedPrecisionPolicy"),
        ({"mp_policy": hpcompat.MixedPrecisionPolicy(param_dtype=np.int32)}, ValueError, "floating dtype"),
        ({"offload_policy": True}, TypeError, "offload_policy to be an OffloadPolicy"),
        ({"offload_policy": hpcompat.CPUOffloadPolicy()}, CapabilityError, "pinned memory"),
        ({"ignored_params": "weight"}, TypeError, "ignored_params to be a set of parameters"),
        ({"ignored_params": {"weight"}}, TypeError, "ignored_params to hold parameters"),
        ({"ignored_params": 1}, TypeError, "ignored_params to be a set of parameters"),
        ({"replicate_params": {1}}, TypeError, "replicate_params to hold parameters"),
        ({"dp_mesh_dims": "shard"}, TypeError, "dp_mesh_dims to be a DataParallelMeshDims"),
        ({"dp_mesh_dims": hpcompat.DataParallelMeshDims(shard="x")}, ValueError, "mesh_dim_names"),
        ({"comm_fusion": 1}, TypeError, "comm_fusion to be a bool"),
        ({"comm_fusion": None}, TypeError, "comm_fusion to be a bool"),
        ({"comm_fusion_zero_copy": "no"}, TypeError, "comm_fusion_zero_copy to be a bool"),
        ({"backend": 1}, TypeError, "backend's name as a string"),
        ({"backend": "jax"}, ValueError, "to name an installed backend"),
    ],
)
def test_arguments_are_checked_before_anything_changes(
    kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = ref.Linear(4, 4)
    before = dict(vars(model))
    with pytest.raises(error, match=message):
        hpcompat.fully_shard(model, **kwargs)
    assert vars(model) == before
    assert type(model) is ref.Linear


def test_a_parameter_is_either_ignored_or_replicated() -> None:
    model = ref.Linear(4, 4)
    with pytest.raises(ValueError, match="expected ignored_params and replicate_params to be apart"):
        hpcompat.fully_shard(model, ignored_params={model.bias}, replicate_params={model.bias, model.weight})


def test_an_int_with_dp_mesh_dims_is_refused() -> None:
    mesh = ref.init_device_mesh((1, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(NotImplementedError, match="reshard_after_forward as int is not yet supported"):
        hpcompat.fully_shard(
            ref.Linear(4, 4), mesh=mesh, dp_mesh_dims=hpcompat.DataParallelMeshDims(shard="dp"), reshard_after_forward=2
        )


def test_placements_need_shards() -> None:
    mesh = ref.init_device_mesh((2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="is not supported with DDPMeshInfo"):
        hpcompat.fully_shard(
            ref.Linear(4, 4),
            mesh=mesh,
            dp_mesh_dims=hpcompat.DataParallelMeshDims(replicate="dp"),
            shard_placement_fn=lambda parameter: None,
        )


# The root


def test_a_list_cannot_be_the_root() -> None:
    members = [ref.Linear(4, 4), ref.Linear(4, 4)]
    hpcompat.fully_shard(members)
    with pytest.raises(RuntimeError, match="requires a single root module but got 2 modules"):
        members[0](batch())


def test_there_is_one_root_in_a_tree() -> None:
    model = wrap(Stack())
    model.b(batch())
    with pytest.raises(RuntimeError, match="FSDP state has already been lazily initialized for b: "):
        model(batch())


def test_the_root_is_the_first_that_runs() -> None:
    inner = wrap(Stack())
    model = ref.Sequential([inner, ref.Linear(4, 4)])  # not wrapped itself
    train(model, batch())
    assert [unit.is_root for unit in inner._unit().iteration.units] == [True, False, False, False]
