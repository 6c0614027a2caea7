"""Mistakes that can be made with ``fully_shard`` and with ``replicate``, and have the same error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcompat import UserError
from misuse.models import batch, linear, mesh, stack, with_parameter
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)
# The call -> what the classes of its modules begin with.
PREFIXES = {"fully_shard": "FSDP", "replicate": "Replicate"}
# The mesh dims that the call is for.
AXES = {"fully_shard": "shard", "replicate": "replicate"}
Wrap = Callable[..., Any]


def _list_as_root(wrap: Wrap) -> None:
    layers = [linear(), linear()]
    wrap(layers)
    layers[0](batch())


def _tied_over_two_units(wrap: Wrap) -> None:
    model = stack()
    model[1].weight = model[0].weight
    for layer in model:
        wrap(layer)
    wrap(model)(batch())


def _on_meta(wrap: Wrap) -> None:
    with torch.device("meta"):
        module = linear()
    wrap(module)(batch())


def _reset_below_the_root(wrap: Wrap) -> None:
    model = stack()
    for layer in model:
        wrap(layer)
    wrap(model)(batch())
    model[0].reset_iter_state()


def _rows(call: str) -> list[Misuse]:
    prefix = PREFIXES[call]

    def row(
        name: str,
        provoke: Callable[[Wrap], object],
        types: tuple[type[Exception], ...],
        message: str,
        advice: str,
        clause: str = "",
        **options: Any,
    ) -> Misuse:
        return Misuse(
            f"{call}-{name}", lambda api: provoke(getattr(api, call)), types, message, advice, clause, **options
        )

    twice = (
        EITHER,
        rf"can only be applied to a module once. {call} expects.*but got {prefix}Linear",
        r"wrap bottom-up, each module in one call",
        "LIF-09",
    )
    container = (
        (ValueError,),
        rf"{call} does not support containers that do not implement forward, but got Module(List|Dict)",
        r"wrap its members, or pass them as a list",
        "ENT-07",
    )
    return [
        row("twice", lambda wrap: wrap(wrap(linear())), *twice, native=AssertionError),
        row("twice-in-list", lambda wrap: wrap([linear(), wrap(linear())]), *twice, native=AssertionError),
        row("module-list", lambda wrap: wrap(nn.ModuleList([linear()])), *container, native=ValueError),
        row("module-dict", lambda wrap: wrap(nn.ModuleDict({"head": linear()})), *container, native=ValueError),
        row(
            "string",
            lambda wrap: wrap("model"),
            (TypeError,),
            r"expected an object of an installed backend's framework, but got an object of type builtins.str",
            r"choose one with backend=",
        ),
        row(
            "list-empty",
            lambda wrap: wrap([]),
            (ValueError,),
            rf"{call} expects a module or a non-empty list of modules, but got an empty list",
            r"a non-empty list",
        ),
        row(
            "list-as-root",
            _list_as_root,
            (RuntimeError,),
            rf"{prefix} requires a single root module but got 2 modules: \['{prefix}Linear', '{prefix}Linear'\]",
            r"run forward through a module that holds them all and is wrapped",
            "ENT-14",
            native=RuntimeError,
            world_size=2,
        ),
        row(
            "deepcopy",
            lambda wrap: copy.deepcopy(wrap(linear())),
            EITHER,
            rf"FSDP does not support deepcopy. .*but got a deepcopy of {prefix}Linear",
            r"use state dict.*copy the module before wrapping it.*EMA.*wrap a second model",
            "ENT-08",
            native=AssertionError,
        ),
        row(
            "tied-over-two-units",
            _tied_over_two_units,
            (ValueError,),
            r"Parameter 'Linear.weight' is shared with .* another FSDP group.*but got it as '\w+Linear.weight' too",
            r"Put the modules that share it into one unit: fully_shard\(\[module_a, module_b\]\)",
            "ENT-03",
            native=ValueError,
            world_size=2,
        ),
        row(
            "scalar",
            lambda wrap: wrap(with_parameter(torch.tensor(1.0))),
            (ValueError,),
            rf"{call} doesn't support scalar parameters.*but got table of shape \(\)",
            r"Change table to a 1D tensor with numel equal to 1\.",
            "ENT-07",
            native=ValueError,
        ),
        row(
            "non-contiguous",
            lambda wrap: wrap(with_parameter(torch.ones(3, 4).t())),
            (NotImplementedError,),
            r"does not support non-contiguous parameters.*but got 'table' of shape \(4, 3\) and stride \(1, 4\)",
            r"make it contiguous before wrapping",
            native=NotImplementedError,
        ),
        row(
            "on-meta-at-forward",
            _on_meta,
            (RuntimeError,),
            r"materialized from meta device .*, but the following were still on meta device: \['weight', 'bias'\]",
            r"call module.to_empty\(device=...\) and initialize them, or load a state dict with assign=True",
            "SDT-10",
            native=RuntimeError,
        ),
        row(
            "reset-below-the-root",
            _reset_below_the_root,
            (RuntimeError,),
            r"reset_iter_state must be called on the root FSDP module, but got '0'",
            r"call it on the module whose forward was run",
            "REC-06",
            native=RuntimeError,
        ),
        row(
            "mesh-string",
            lambda wrap: wrap(linear(), mesh="cuda"),
            (TypeError,),
            r"expected mesh to be a DeviceMesh, but got 'cuda'",
            r"init_device_mesh",
        ),
        row(
            "dims-tuple",
            lambda wrap: wrap(linear(), mesh=mesh(1, 1, names="dp tp"), dp_mesh_dims=("dp",)),
            (TypeError,),
            r"expected dp_mesh_dims to be a DataParallelMeshDims, but got \('dp',\)",
            r"DataParallelMeshDims",
        ),
        *(
            Misuse(
                f"{call}-dims-{name}",
                lambda api, dims=dims: getattr(api, call)(
                    linear(), mesh=mesh(1, 1, names="dp tp"), dp_mesh_dims=api.DataParallelMeshDims(**dims)
                ),
                (ValueError,),
                message,
                advice,
                native=ValueError,
            )
            for name, dims, message, advice in _dims(AXES[call])
        ),
    ]


def _dims(axis: str) -> list[tuple[str, dict[str, str], str, str]]:
    """On a mesh of axes dp and tp, with plain parameters."""
    return [
        ("unset", {}, "At least one of shard or replicate must be set in .*Dims, but got neither", "name the axes"),
        (
            "unknown-axis",
            {axis: "unknown"},
            rf"Mesh dim name 'unknown' not found in mesh.mesh_dim_names \('dp', 'tp'\).*but got .*{axis}='unknown'",
            "name axes of the mesh",
        ),
        (
            "plain-parameters",
            {axis: "dp"},
            "all parameters must be DTensors on the full SPMD mesh, but got plain tensor for parameter 'weight'",
            r"distribute the module first \(distribute_module\)",
        ),
    ]


ROWS = [row for call in PREFIXES for row in _rows(call)]
