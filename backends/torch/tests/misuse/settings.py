"""Setters and methods of a wrapped module."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from hpcompat import CapabilityError, FSDPMeshInfo, ShardPlacementResult, UserError
from misuse.models import linear, mesh, wrapped
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)

# Every method that takes a switch: its name -> the argument's.
SWITCHES = {
    "unshard": "async_op",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_unshard_in_backward": "unshard_in_backward",
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_is_last_backward": "is_last_backward",
    "set_force_sum_reduction_for_comms": "enable",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group": "enable",
    "set_allocate_memory_from_process_group_for_comm": "enable",
}


class WithoutAllocate:
    def __call__(self, **arguments: Any) -> None: ...


class WithoutCall:
    def allocate(self, *arguments: Any, **options: Any) -> None: ...


class Comm(WithoutAllocate, WithoutCall):
    """As complete as the setters can see."""


def _call(method: str, *arguments: Any, **options: Any) -> Any:
    return lambda api: getattr(wrapped(api), method)(*arguments, **options)


def _with_two_groups(api: Any) -> Any:
    """A layer whose weight and bias are sharded over different ranks."""
    device_mesh = mesh(2, 1, names="dp ep")
    weight_info = FSDPMeshInfo(device_mesh["dp"], shard_mesh_dim=0)
    bias_info = FSDPMeshInfo(device_mesh["ep"], shard_mesh_dim=0)
    return api.fully_shard(
        linear(),
        mesh=device_mesh["dp"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), weight_info if p.ndim == 2 else bias_info),
    )


def _two_allocators(api: Any) -> None:
    module = wrapped(api)
    module.set_custom_all_gather(Comm())
    module.set_allocate_memory_from_process_group_for_comm(True)


def _switch(method: str, argument: str, value: object) -> Misuse:
    return Misuse(
        f"{method}-{type(value).__name__}",
        _call(method, value),
        (TypeError,),
        rf"expected {argument} to be a bool, but got {value!r}",
        r"a bool",
    )


SWITCH_ROWS = [
    _switch(method, argument, value) for method, argument in SWITCHES.items() for value in ("False", 1, None)
]

DIVISION_ROWS = [
    *(
        Misuse(
            f"divide-factor-{name}",
            _call("set_gradient_divide_factor", value),
            (TypeError,),
            rf"expected the gradient divide factor to be a number, but got {got}",
            r"a number",
        )
        for name, value, got in [
            ("string", "2", "'2'"),
            ("bool", True, "True"),
            ("none", None, "None"),
            ("tensor", torch.tensor(2.0), r"tensor\(2\.\)"),
        ]
    ),
    *(
        Misuse(
            f"divide-factor-{name}",
            _call("set_gradient_divide_factor", value),
            (ValueError,),
            rf"expected the gradient divide factor to be positive and finite, but got {value!r}",
            r"positive and finite",
        )
        for name, value in [("negative", -1.0), ("zero", 0), ("nan", math.nan), ("infinite", math.inf)]
    ),
    *(
        Misuse(
            f"scaling-factor-{name}",
            _call("set_gradient_scaling_factor", value),
            (TypeError,),
            rf"expected the gradient scaling factor to be a number, a one-element tensor or None, but got {got}",
            r"a number, a one-element tensor or None",
        )
        for name, value, got in [
            ("string", "2", "'2'"),
            ("bool", True, "True"),
            ("vector", torch.ones(2), r"tensor\(\[1\., 1\.\]\)"),
            ("list", [1.0], r"\[1\.0\]"),
            ("dict", {}, r"\{\}"),
            ("nan", math.nan, "nan"),
        ]
    ),
    *(
        Misuse(
            f"reduce-op-type-{name}",
            _call("set_reduce_op_type", value),
            (ValueError,),
            rf"expected reduce_op_type to be .*, but got {got}",
            r'"avg" or "sum"',
        )
        for name, value, got in [("mean", "mean", "'mean'"), ("object", dist.ReduceOp.SUM, "<RedOpType.SUM")]
    ),
]

PREFETCH_ROWS = [
    Misuse(
        f"{method}-{name}",
        lambda api, method=method, make=make: getattr(wrapped(api), method)(make(api)),
        (error,),
        message,
        advice,
        "ENT-12",
        native=error,
    )
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")
    for name, make, error, message, advice in [
        (
            "plain-module",
            lambda api: [linear()],
            ValueError,
            r"Expects FSDPModule but got <class '.*Linear'>",
            r"wrap it with fully_shard first",
        ),
        (
            "one-module",
            lambda api: wrapped(api),
            TypeError,
            r"expected a list of FSDPModules, but got FSDPLinear",
            r"a list of FSDPModules",
        ),
        (
            "none",
            lambda api: None,
            TypeError,
            r"expected a list of FSDPModules, but got NoneType",
            r"a list of FSDPModules",
        ),
    ]
]

COMM_ROWS = [
    *(
        Misuse(
            f"{method}-{type(comm).__name__}",
            _call(method, comm),
            (TypeError,),
            rf"{method} expects an object .*, but got <.*{type(comm).__name__}",
            r"allocate\(\.\.\.\) and __call__\(\.\.\.\)",
        )
        for method in ("set_custom_all_gather", "set_custom_reduce_scatter")
        for comm in (WithoutAllocate(), WithoutCall())
    ),
    *(
        Misuse(
            f"{method}-with-several-groups",
            lambda api, method=method, value=value: getattr(_with_two_groups(api), method)(value),
            (ValueError,),
            rf"{method} is not supported with multiple param groups, but got 2",
            r"give the unit one mesh",
            "COM-06",
            world_size=2,
        )
        for method, value in [
            ("set_custom_all_gather", Comm()),
            ("set_custom_reduce_scatter", Comm()),
            ("set_all_reduce_hook", print),
        ]
    ),
    Misuse(
        "custom-comm-and-allocator",
        _two_allocators,
        EITHER,
        r"comm is custom: expected the default one, but got .*Comm",
        r"choose one of the two",
        "COM-11",
        native=AssertionError,
    ),
    Misuse(
        "all-reduce-hook-string",
        _call("set_all_reduce_hook", "print"),
        (TypeError,),
        r"expected the all-reduce hook to be callable, but got 'print'",
        r"callable",
    ),
    Misuse(
        "all-reduce-hook-stream-under-hsdp",
        lambda api: wrapped(api, mesh=mesh(1, 1, names="replicate shard")).set_all_reduce_hook(print, stream="side"),
        (ValueError,),
        r"stream cannot be set when using native HSDP.*but got 'side'",
        r"leave it out",
        "COM-09",
        native=ValueError,
    ),
    Misuse(
        "symmetric-memory-of-another-kind",
        _call("set_symm_mem_for_comm", "NVSHMEM"),
        (ValueError,),
        r'expected backend to be "NCCL", but got \'NVSHMEM\'',
        r'"NCCL"',
        "COM-12",
    ),
]

# Only gloo is known to lack it.
SYMMETRIC_MEMORY_ROW = Misuse(
    "symmetric-memory-on-gloo",
    _call("set_symm_mem_for_comm"),
    (CapabilityError, NotImplementedError, RuntimeError),
    r"backend 'torch' lacks the capability 'symmetric memory'.*but got .*'gloo'",
    r"drop the call",
    "COM-12",
    native=RuntimeError,
)

METHOD_ROWS = [
    *(
        Misuse(
            f"set-reshard-after-forward-{name}",
            _call("set_reshard_after_forward", value),
            (ValueError,),
            rf"reshard_after_forward should be a bool, but got {value!r}",
            r"an int goes to fully_shard",
            "RSF-14",
            native=ValueError,
        )
        for name, value in [("int", 2), ("string", "True"), ("none", None)]
    ),
    *(
        Misuse(
            f"max-input-buffers-{name}",
            _call("set_reduce_scatter_max_input_buffers", value),
            (error,),
            rf"max_input_buffers must be .*, but got {value!r}",
            advice,
            "COM-14",
            native=error,
        )
        for name, value, error, advice in [
            ("string", "2", TypeError, "an int"),
            ("bool", True, TypeError, "an int"),
            ("zero", 0, ValueError, "a positive int"),
        ]
    ),
    *(
        Misuse(
            f"forward-method-{name}",
            lambda api, method=method: api.register_fsdp_forward_method(wrapped(api), method),
            (ValueError,),
            rf"FSDPLinear'> does not have a method {method}: .*but got '{method}'",
            r"define it",
            "ENT-02",
            native=native,
        )
        for name, method, native in [("missing", "generate", ValueError), ("not-callable", "training", None)]
    ),
    Misuse(
        "share-comm-ctx-plain-module",
        lambda api: api.share_comm_ctx([wrapped(api), linear()]),
        (ValueError,),
        r"Expects list of FSDPModules but got <class '.*Linear'>",
        r"wrap it with fully_shard first",
        "COM-16",
        native=ValueError,
    ),
]
ROWS = [*SWITCH_ROWS, *DIVISION_ROWS, *PREFETCH_ROWS, *COMM_ROWS, SYMMETRIC_MEMORY_ROW, *METHOD_ROWS]
