"""What is wrapped: modules, lists, parameters and their placements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from hpcompat import FSDPMeshInfo, ShardPlacementResult, UserError
from misuse.models import batch, linear, mesh, stack, with_parameter, wrapped, wrapped_stack
from misuse.row import Misuse

EITHER = (ValueError, AssertionError, UserError)


def _second_root(api: Any) -> None:
    model = wrapped_stack(api)
    model[0](batch())
    model(batch())


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
        "backend-unknown",
        lambda api: api.fully_shard(linear(), backend="jax"),
        (ValueError,),
        r"expected backend to name an installed backend, but got 'jax'; installed backends: .*torch",
        r"choose one with backend=",
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
    # Parameters
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
