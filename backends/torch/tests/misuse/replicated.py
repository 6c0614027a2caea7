"""``replicate`` and what it makes."""

from __future__ import annotations

from typing import Any

from hpcompat import UserError
from misuse.models import linear, mesh, with_distributed_parameters
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)


def _dims(**dims: Any) -> Any:
    """Replicate on a 2-D mesh with these ``dp_mesh_dims``."""

    def provoke(api: Any) -> None:
        device_mesh = mesh(1, 1, names="dp tp")
        dims_of_mesh = api.DataParallelMeshDims(**dims)
        api.replicate(with_distributed_parameters(device_mesh), mesh=device_mesh, dp_mesh_dims=dims_of_mesh)

    return provoke


MODULE_ROWS = [
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
]

ROWS = [*MODULE_ROWS, *MESH_ROWS, *ARGUMENT_ROWS, *METHOD_ROWS]
