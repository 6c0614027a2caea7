"""What is wrapped: modules, lists, parameters and their placements."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hpcompat import FSDPMeshInfo, ShardPlacementResult, UserError
from misuse.models import batch, linear, mesh, stack, with_parameter, wrapped, wrapped_stack
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)


def _list_as_root(api: Any) -> None:
    layers = [linear(), linear()]
    api.fully_shard(layers)
    layers[0](batch())


def _second_root(api: Any) -> None:
    model = wrapped_stack(api)
    model[0](batch())
    model(batch())


def _tied_over_two_units(api: Any) -> None:
    model = stack()
    model[1].weight = model[0].weight
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)(batch())


def _on_meta(api: Any) -> Any:
    with torch.device("meta"):
        module = linear()
    return api.fully_shard(module)


def _replaced_by_a_plain_parameter(api: Any) -> None:
    module = wrapped(api)
    module.weight = nn.Parameter(torch.ones(4, 4))
    module(batch())


def _placed(placement: Any) -> Any:
    """Wrap a 4 x 4 layer with a ``shard_placement_fn`` that returns ``placement``."""
    return lambda api: api.fully_shard(linear(), shard_placement_fn=lambda parameter: placement)


def _placed_uneven(api: Any) -> None:
    api.fully_shard(with_parameter(torch.ones(4, 3)), shard_placement_fn=lambda parameter: Shard(1))


def _replicated_result(api: Any) -> None:
    result = ShardPlacementResult(Replicate(), FSDPMeshInfo(mesh(1), shard_mesh_dim=0))
    api.fully_shard(linear(), shard_placement_fn=lambda parameter: result)


def _new_mesh_info_per_parameter(api: Any) -> None:
    api.fully_shard(
        linear(),
        shard_placement_fn=lambda parameter: ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh(1), shard_mesh_dim=0)),
    )


ROWS = [
    Misuse(
        "module-string",
        lambda api: api.fully_shard("model"),
        (TypeError,),
        r"expected an object of an installed backend's framework, but got an object of type builtins.str",
        r"choose one with backend=",
    ),
    Misuse(
        "module-parameter",
        lambda api: api.fully_shard(linear().weight),
        (TypeError,),
        r"but got Parameter",
        r"expects a module or a list of modules of torch",
    ),
    Misuse(
        "module-generator",
        lambda api: api.fully_shard(layer for layer in stack()),
        (TypeError,),
        r"but got an object of type builtins.generator",
        r"choose one with backend=",
    ),
    Misuse(
        "list-with-string",
        lambda api: api.fully_shard([linear(), "head"]),
        (TypeError,),
        r"expects a module or a list of modules of torch, but got str",
        r"a list of modules",
    ),
    Misuse(
        "list-empty",
        lambda api: api.fully_shard([]),
        (ValueError,),
        r"but got an empty list",
        r"expects a module or a non-empty list of modules",
    ),
    Misuse(
        "backend-unknown",
        lambda api: api.fully_shard(linear(), backend="jax"),
        (ValueError,),
        r"expected backend to name an installed backend, but got 'jax'; installed backends: .*torch",
        r"choose one with backend=",
    ),
    Misuse(
        "wrapped-twice",
        lambda api: api.fully_shard(wrapped(api)),
        EITHER,
        r"can only be applied to a module once.*but got FSDPLinear",
        r"wrap bottom-up, each module in one call",
        "LIF-09",
        native=AssertionError,
    ),
    Misuse(
        "wrapped-twice-in-list",
        lambda api: api.fully_shard([linear(), wrapped(api)]),
        EITHER,
        r"can only be applied to a module once.*but got FSDPLinear",
        r"wrap bottom-up, each module in one call",
        "LIF-09",
        native=AssertionError,
    ),
    Misuse(
        "module-list",
        lambda api: api.fully_shard(nn.ModuleList([linear()])),
        (ValueError,),
        r"does not support containers that do not implement forward, but got ModuleList",
        r"wrap its members, or pass them as a list",
        "ENT-07",
        native=ValueError,
    ),
    Misuse(
        "module-dict",
        lambda api: api.fully_shard(nn.ModuleDict({"head": linear()})),
        (ValueError,),
        r"does not support containers that do not implement forward, but got ModuleDict",
        r"wrap its members, or pass them as a list",
        "ENT-07",
        native=ValueError,
    ),
    Misuse(
        "list-as-root",
        _list_as_root,
        (RuntimeError,),
        r"requires a single root module but got 2 modules: \['FSDPLinear', 'FSDPLinear'\]",
        r"run forward through a module that holds them all and is wrapped",
        "ENT-14",
        native=RuntimeError,
        world_size=2,
    ),
    Misuse(
        "second-root",
        _second_root,
        (RuntimeError,),
        r"has already been lazily initialized for 0: .*but got a forward of '' after one of '0'",
        r"run forward through the root module first",
        "ENT-13",
        native=RuntimeError,
        world_size=2,
    ),
    Misuse(
        "tied-over-two-units",
        _tied_over_two_units,
        (ValueError,),
        r"Parameter 'Linear.weight' is shared with .* another FSDP group.*but got it as '\w+Linear.weight' too",
        r"one unit: fully_shard\(\[module_a, module_b\]\)",
        "ENT-03",
        native=ValueError,
        world_size=2,
    ),
    Misuse(
        "deepcopy",
        lambda api: copy.deepcopy(wrapped(api)),
        EITHER,
        r"FSDP does not support deepcopy. .*but got a deepcopy of FSDPLinear",
        r"use state dict.*copy the module before wrapping it.*EMA.*wrap a second model",
        "ENT-08",
        native=AssertionError,
    ),
    # Parameters
    Misuse(
        "parameter-scalar",
        lambda api: api.fully_shard(with_parameter(torch.tensor(1.0))),
        (ValueError,),
        r"doesn't support scalar parameters.*but got table of shape \(\)",
        r"Change table to a 1D tensor with numel equal to 1\.",
        "ENT-07",
        native=ValueError,
    ),
    Misuse(
        "parameter-non-contiguous",
        lambda api: api.fully_shard(with_parameter(torch.ones(3, 4).t())),
        (NotImplementedError,),
        r"does not support non-contiguous parameters.*but got 'table' of shape \(4, 3\) and stride \(1, 4\)",
        r"make it contiguous before wrapping",
        native=NotImplementedError,
    ),
    Misuse(
        "parameter-on-meta-at-forward",
        lambda api: _on_meta(api)(batch()),
        (RuntimeError,),
        r"materialized from meta device .*, but the following were still on meta device: \['weight', 'bias'\]",
        r"call module.to_empty\(device=...\) and initialize them, or load a state dict with assign=True",
        "SDT-10",
        native=RuntimeError,
    ),
    Misuse(
        "parameter-on-meta-at-unshard",
        lambda api: _on_meta(api).unshard(),
        (RuntimeError,),
        r"materialized from meta device .*, but the following were still on meta device: \['weight', 'bias'\]",
        r"call module.to_empty",
        native=RuntimeError,
    ),
    Misuse(
        "parameter-replaced-by-a-plain-one",
        _replaced_by_a_plain_parameter,
        (TypeError,),
        r"expected parameter 'weight' to stay a DTensor, but got Parameter",
        r"assign a DTensor .* or load with load_state_dict",
    ),
    # Placements
    Misuse(
        "shard-uneven-columns",
        _placed_uneven,
        (NotImplementedError,),
        r"does not support uneven sharding on dim 1.*but got 'table' of shape \(4, 3\) \(world size: 2\)",
        r"shard it on dim 0",
        "ENT-07",
        native=NotImplementedError,
        world_size=2,
    ),
    Misuse(
        "shard-dim-too-large",
        _placed(Shard(2)),
        EITHER,
        r"Shard dim 2 is invalid for 2D tensor: .*but got it for parameter 'weight' of shape \(4, 4\)",
        r"expected a dim from -2 to 1",
        "ENT-07",
        native=AssertionError,
    ),
    Misuse(
        "shard-dim-too-small",
        _placed(Shard(-3)),
        EITHER,
        r"Shard dim -3 is invalid for 2D tensor: .*but got it for parameter 'weight' of shape \(4, 4\)",
        r"expected a dim from -2 to 1",
        "ENT-07",
        native=AssertionError,
    ),
    Misuse(
        "placement-int",
        _placed(0),
        (ValueError,),
        r"Invalid shard_placement_fn result: .*but got 0",
        r"Expected None, a Shard or a ShardPlacementResult",
        "PLC-08",
        native=ValueError,
    ),
    Misuse(
        "placement-replicate",
        _placed(Replicate()),
        (ValueError,),
        r"Invalid shard_placement_fn result: .*but got Replicate\(\)",
        r"Expected None, a Shard or a ShardPlacementResult",
        "PLC-08",
        native=ValueError,
    ),
    Misuse(
        "placement-replicate-in-result",
        _replicated_result,
        EITHER,
        r"for parameter 'weight', but got Replicate\(\)",
        r"expected a Shard placement",
        "PLC-08",
    ),
    Misuse(
        "placement-fn-not-callable",
        lambda api: api.fully_shard(linear(), shard_placement_fn=Shard(1)),
        (TypeError,),
        r"expected shard_placement_fn to be callable, but got Shard\(dim=1\)",
        r"callable",
        native=TypeError,
    ),
    Misuse(
        "mesh-info-objects-differ",
        _new_mesh_info_per_parameter,
        (ValueError,),
        r"must use the same FSDPMeshInfo object, but got different objects: FSDPMeshInfo.* vs FSDPMeshInfo",
        r"make one and return it for all of them",
        "PLC-08",
    ),
]
