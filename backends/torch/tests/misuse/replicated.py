"""``replicate`` and what it makes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hpcompat import UserError
from misuse.models import batch, linear, mesh, stack, with_distributed_parameters, with_parameter
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)


def _dims(*, distributed: bool = True, **dims: Any) -> Any:
    """Replicate on a 2-D mesh with these ``dp_mesh_dims``."""

    def provoke(api: Any) -> None:
        device_mesh = mesh(1, 1, names="dp tp")
        module = with_distributed_parameters(device_mesh) if distributed else linear()
        api.replicate(module, mesh=device_mesh, dp_mesh_dims=api.DataParallelMeshDims(**dims))

    return provoke


def _list_as_root(api: Any) -> None:
    layers = [linear(), linear()]
    api.replicate(layers)
    layers[0](batch())


def _reset_below_the_root(api: Any) -> None:
    model = stack()
    for layer in model:
        api.replicate(layer)
    api.replicate(model)(batch())
    model[0].reset_iter_state()


def _tied_over_two_units(api: Any) -> None:
    model = stack()
    model[1].weight = model[0].weight
    for layer in model:
        api.replicate(layer)
    api.replicate(model)(batch())


def _on_meta(api: Any) -> None:
    with torch.device("meta"):
        module = linear()
    api.replicate(module)(batch())


MODULE_ROWS = [
    Misuse(
        "replicated-twice",
        lambda api: api.replicate(api.replicate(linear())),
        EITHER,
        r"can only be applied to a module once. replicate expects.*but got ReplicateLinear",
        r"wrap bottom-up, each module in one call",
        "LIF-09",
        native=AssertionError,
    ),
    Misuse(
        "replicated-twice-in-list",
        lambda api: api.replicate([linear(), api.replicate(linear())]),
        EITHER,
        r"can only be applied to a module once. replicate expects.*but got ReplicateLinear",
        r"wrap bottom-up, each module in one call",
        "LIF-09",
        native=AssertionError,
    ),
    Misuse(
        "replicate-over-fully-shard",
        lambda api: api.replicate(api.fully_shard(linear())),
        (RuntimeError,),
        r"already managed by `fully_shard`, but got FSDPLinear",
        r"wrap it with one of the two",
        "RPL-05",
        native=RuntimeError,
    ),
    Misuse(
        "fully-shard-over-replicate",
        lambda api: api.fully_shard(api.replicate(linear())),
        EITHER,
        r"already managed by `replicate`, but got ReplicateLinear",
        r"wrap it with one of the two",
        native=AssertionError,
    ),
    Misuse(
        "replicate-module-list",
        lambda api: api.replicate(nn.ModuleList([linear()])),
        (ValueError,),
        r"replicate does not support containers that do not implement forward, but got ModuleList",
        r"wrap its members, or pass them as a list",
        "ENT-07",
        native=ValueError,
    ),
    Misuse(
        "replicate-string",
        lambda api: api.replicate("model"),
        (TypeError,),
        r"but got an object of type builtins.str",
        r"choose one with backend=",
    ),
    Misuse(
        "replicate-list-empty",
        lambda api: api.replicate([]),
        (ValueError,),
        r"replicate expects a module or a non-empty list of modules, but got an empty list",
        r"a non-empty list",
    ),
    Misuse(
        "replicated-list-as-root",
        _list_as_root,
        (RuntimeError,),
        r"Replicate requires a single root module but got 2 modules: \['ReplicateLinear', 'ReplicateLinear'\]",
        r"run forward through a module that holds them all and is wrapped",
        "ENT-14",
        native=RuntimeError,
        world_size=2,
    ),
    Misuse(
        "replicated-tied-over-two-units",
        _tied_over_two_units,
        (ValueError,),
        r"Parameter 'Linear.weight' is shared with .* another FSDP group.*but got it as '\w+Linear.weight' too",
        r"Put the modules that share it into one unit",
        "ENT-03",
        native=ValueError,
        world_size=2,
    ),
    Misuse(
        "replicated-deepcopy",
        lambda api: copy.deepcopy(api.replicate(linear())),
        EITHER,
        r"FSDP does not support deepcopy. .*but got a deepcopy of ReplicateLinear",
        r"copy the module before wrapping it",
        "ENT-08",
        native=AssertionError,
    ),
    Misuse(
        "replicate-scalar",
        lambda api: api.replicate(with_parameter(torch.tensor(1.0))),
        (ValueError,),
        r"replicate doesn't support scalar parameters.*but got table of shape \(\)",
        r"Change table to a 1D tensor with numel equal to 1\.",
        "ENT-07",
        native=ValueError,
    ),
    Misuse(
        "replicate-non-contiguous",
        lambda api: api.replicate(with_parameter(torch.ones(3, 4).t())),
        (NotImplementedError,),
        r"does not support non-contiguous parameters.*but got 'table' of shape \(4, 3\) and stride \(1, 4\)",
        r"make it contiguous before wrapping",
        native=NotImplementedError,
    ),
    Misuse(
        "replicated-on-meta-at-forward",
        _on_meta,
        (RuntimeError,),
        r"materialized from meta device .*, but the following were still on meta device: \['weight', 'bias'\]",
        r"call module.to_empty",
        "SDT-10",
        native=RuntimeError,
    ),
]

MESH_ROWS = [
    Misuse(
        "replicate-mesh-2d",
        lambda api: api.replicate(linear(), mesh=mesh(1, 1, names="replicate shard")),
        (ValueError,),
        r"replicate expects a 1D DeviceMesh but got DeviceMesh.*replicate=1, shard=1",
        r"pass one axis of it, or all of them flattened",
        "RPL-05",
        native=ValueError,
    ),
    Misuse(
        "replicate-mesh-3d",
        lambda api: api.replicate(linear(), mesh=mesh(1, 1, 1, names="pp dp tp")),
        (ValueError,),
        r"replicate expects a 1D DeviceMesh but got DeviceMesh.*pp=1, dp=1, tp=1",
        r"pass one axis of it, or all of them flattened",
        native=ValueError,
    ),
    Misuse(
        "replicate-mesh-string",
        lambda api: api.replicate(linear(), mesh="cpu"),
        (TypeError,),
        r"expected mesh to be a DeviceMesh, but got 'cpu'",
        r"init_device_mesh",
    ),
    Misuse(
        "replicate-dims-shard",
        _dims(shard="dp"),
        (ValueError,),
        r"requires replicate-only dims .no shard dims., but got DataParallelMeshDims\(shard='dp', replicate=None\)",
        r"use fully_shard.. for sharding",
        native=ValueError,
    ),
    # Native takes these for HSDP and shards.
    Misuse(
        "replicate-dims-both",
        _dims(shard="tp", replicate="dp"),
        (ValueError,),
        r"requires replicate-only dims .no shard dims., but got DataParallelMeshDims\(shard='tp', replicate='dp'\)",
        r"use fully_shard.. for sharding",
    ),
    Misuse(
        "replicate-dims-unset",
        _dims(),
        (ValueError,),
        r"At least one of shard or replicate must be set in DataParallelMeshDims, but got neither",
        r"name the axes",
        native=ValueError,
    ),
    Misuse(
        "replicate-dims-unknown-axis",
        _dims(replicate="ddp"),
        (ValueError,),
        r"Mesh dim name 'ddp' not found in mesh.mesh_dim_names \('dp', 'tp'\).*but got .*replicate='ddp\'",
        r"name axes of the mesh",
        native=ValueError,
    ),
    Misuse(
        "replicate-dims-plain-parameters",
        _dims(distributed=False, replicate="dp"),
        (ValueError,),
        r"must be DTensors on the full SPMD mesh, but got plain tensor for parameter 'weight'",
        r"distribute the module first",
        native=ValueError,
    ),
    Misuse(
        "replicate-dims-tuple",
        lambda api: api.replicate(linear(), mesh=mesh(1, 1, names="dp tp"), dp_mesh_dims=("dp",)),
        (TypeError,),
        r"expected dp_mesh_dims to be a DataParallelMeshDims, but got \('dp',\)",
        r"DataParallelMeshDims",
    ),
]

ARGUMENT_ROWS = [
    Misuse(
        f"replicate-{name}",
        lambda api, options=options: api.replicate(linear(), **options),
        (TypeError,),
        message,
        advice,
    )
    for name, options, message, advice in [
        ("policy-dict", {"mp_policy": {}}, r"mp_policy to be a MixedPrecisionPolicy, but got \{\}", "expected"),
        ("offload-string", {"offload_policy": "cpu"}, r"to be an OffloadPolicy, but got 'cpu'", "expected"),
        ("ignored-name", {"ignored_params": {"weight"}}, r"to hold parameters, but got a str: 'weight'", "expected"),
        ("ignored-string", {"ignored_params": "weight"}, r"but got 'weight'", "expected .* a set of parameters"),
    ]
]

METHOD_ROWS = [
    *(
        Misuse(
            f"replicated-set-reshard-after-forward-{value}",
            lambda api, value=value: api.replicate(linear()).set_reshard_after_forward(value),
            EITHER,
            rf"reshard_after_forward( should be a bool, but got None|={value} on, but got ReplicateLinear)",
            r"leave the call out",
            "RPL-05",
            native=error,
        )
        for value, error in [(True, AssertionError), (False, AssertionError), (None, ValueError)]
    ),
    Misuse(
        "replicated-separate-group",
        lambda api: api.replicate(linear()).set_separate_reduce_scatter_group(),
        EITHER,
        r"Expected mesh_info to be FSDPMeshInfo, but got DDPMeshInfo",
        r"leave the call out",
        native=AssertionError,
    ),
    Misuse(
        "replicated-custom-all-gather",
        lambda api: api.replicate(linear()).set_custom_all_gather(object()),
        (TypeError,),
        r"set_custom_all_gather expects an object .*, but got <object",
        r"allocate\(\.\.\.\) and __call__\(\.\.\.\)",
    ),
    Misuse(
        "replicated-reset-below-the-root",
        _reset_below_the_root,
        (RuntimeError,),
        r"reset_iter_state must be called on the root FSDP module, but got '0'",
        r"call it on the module whose forward was run",
        "REC-06",
        native=RuntimeError,
    ),
]

ROWS = [*MODULE_ROWS, *MESH_ROWS, *ARGUMENT_ROWS, *METHOD_ROWS]
