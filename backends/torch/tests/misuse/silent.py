"""Mistakes that native FSDP2 accepts silently, or answers with an error about something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as native_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hpcompat import DDPMeshInfo, ShardPlacementResult
from misuse.models import batch, linear, mesh, wrapped, wrapped_stack
from misuse.models import with_distributed_parameters as distributed
from misuse.row import Misuse
from misuse.settings import Comm
from misuse.training import Box


def _placed(make_info: Callable[[], Any]) -> Any:
    def provoke(api: Any) -> None:
        result = ShardPlacementResult(Shard(0), make_info())
        api.fully_shard(linear(), shard_placement_fn=lambda parameter: result)

    return provoke


def _int_axis(api: Any) -> None:
    device_mesh = mesh(1, 1, names="dp tp")
    api.fully_shard(distributed(device_mesh), mesh=device_mesh, dp_mesh_dims=api.DataParallelMeshDims(shard=0))


def _optimizer_while_unsharded(api: Any) -> None:
    module = wrapped(api)
    with torch.no_grad():
        module(batch())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(batch()).sum().backward()
    optimizer.step()


def _stale_parameters_added_later(api: Any) -> None:
    module = linear()
    old_bias = module.bias
    api.fully_shard(module)
    optimizer = torch.optim.SGD([module.weight], lr=0.1)
    module(batch()).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": [old_bias]})
    optimizer.step()


def _plain_parameter_after_a_step(api: Any) -> None:
    module = wrapped(api)
    module(batch()).sum().backward()
    module.weight = nn.Parameter(torch.ones(4, 4))
    module(batch())


def _forward_with_a_buffer_on_meta(api: Any) -> None:
    with torch.device("meta"):
        module = nn.BatchNorm1d(4)
    api.fully_shard(module)
    module.load_state_dict({"weight": torch.ones(4), "bias": torch.ones(4)}, strict=False, assign=True)
    module(batch())


def _sparse_gradient(api: Any) -> None:
    module = api.fully_shard(nn.Embedding(7, 4, sparse=True))
    module(torch.tensor([1, 2])).sum().backward()


def _below_native(api: Any) -> None:
    model = nn.Sequential(linear(), linear())
    native_fsdp.fully_shard(model[0])
    api.fully_shard(model)


class Returns(nn.Linear):
    """Returns its result in the form that ``form`` gives it."""

    form: Callable[[Tensor], Any]

    def forward(self, inputs: Tensor) -> Any:
        return self.form(super().forward(inputs))


def _returns(form: Callable[[Tensor], Any]) -> Any:
    def provoke(api: Any) -> None:
        module = Returns(4, 4)
        module.form = form
        api.fully_shard(module)(batch())

    return provoke


def _boxed(result: Tensor, *, depth: int = 7) -> Any:
    boxed: Any = result
    for _ in range(depth):
        boxed = Box(boxed)
    return boxed


ROWS = [
    Misuse(
        "placement-result-with-a-mesh",
        _placed(lambda: mesh(1)),
        (TypeError,),
        r"mesh_info.*but got DeviceMesh",
        r"FSDPMeshInfo\(",
    ),
    Misuse(
        "placement-result-with-a-replicated-mesh",
        _placed(lambda: DDPMeshInfo(mesh(1), replicate_mesh_dim=0)),
        (TypeError,),
        r"mesh_info.*but got DDPMeshInfo",
        r"FSDPMeshInfo\(",
    ),
    Misuse(
        "dims-axis-as-a-number",
        _int_axis,
        (TypeError,),
        r"shard.*but got 0",
        r"names?",
        native=TypeError,
    ),
    Misuse(
        "parameters-on-an-unrelated-mesh",
        lambda api: api.fully_shard(distributed(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))),
        (ValueError,),
        r"'weight'.*but got .*DeviceMesh",
        r"one mesh",
    ),
    Misuse(
        "unit-of-native-below",
        _below_native,
        (ValueError,),
        r"but got FSDPLinear",
        r"hpcompat",
    ),
    *(
        Misuse(
            f"policy-{name}-string",
            lambda api, name=name: wrapped(api, mp_policy=api.MixedPrecisionPolicy(**{name: "no"})),
            (TypeError,),
            rf"{name} to be a bool, but got 'no'",
            r"a bool",
        )
        for name in ("cast_forward_inputs", "apply_grad_on_fp32_main_grad")
    ),
    Misuse(
        "recurse-string",
        lambda api: wrapped(api).set_requires_gradient_sync(True, recurse="no"),
        (TypeError,),
        r"expected recurse to be a bool, but got 'no'",
        r"a bool",
    ),
    Misuse(
        "custom-comm-class",
        lambda api: wrapped(api).set_custom_all_gather(Comm),
        (TypeError,),
        r"set_custom_all_gather expects an object.*but got <class",
        r"an object",
    ),
    *(
        Misuse(
            f"share-comm-ctx-{name}",
            lambda api, make=make: api.share_comm_ctx(make(api)),
            (TypeError,),
            rf"list of FSDPModules.*but got FSDP{kind}",
            r"a list",
            "COM-16",
        )
        for name, make, kind in [
            ("one-module", wrapped, "Linear"),
            ("one-sequential", wrapped_stack, "Sequential"),
        ]
    ),
    Misuse(
        "load-state-dict-list",
        lambda api: wrapped(api).load_state_dict([1]),
        (TypeError,),
        r"state_dict.*but got",
        r"dict",
        native=TypeError,
    ),
    Misuse(
        "load-state-dict-wrong-shape-as-torch",
        lambda api: wrapped(api).load_state_dict({"weight": torch.ones(3, 4), "bias": torch.ones(4)}),
        (ValueError, RuntimeError),
        r"size mismatch for weight: .*but got \(3, 4\)",
        r"global shape",
        "SDT-07",
        native=RuntimeError,
    ),
    Misuse(
        "optimizer-over-unsharded-parameters",
        _optimizer_while_unsharded,
        (ValueError,),
        r"expected SGD to hold sharded parameters, but got 2",
        r"reshard",
    ),
    Misuse(
        "optimizer-with-stale-parameters-added-later",
        _stale_parameters_added_later,
        (ValueError,),
        r"expected SGD to hold sharded parameters, but got 1",
        r"Create the optimizer after wrapping",
        "OPT-08",
    ),
    Misuse(
        "parameter-replaced-after-a-step",
        _plain_parameter_after_a_step,
        (TypeError,),
        r"expected parameter 'weight' to stay a DTensor, but got Parameter",
        r"load_state_dict",
    ),
    Misuse(
        "buffer-on-meta-at-forward",
        _forward_with_a_buffer_on_meta,
        (RuntimeError,),
        r"but got .*running_mean",
        r"to_empty",
        "SDT-10",
    ),
    Misuse(
        "gradient-sparse",
        _sparse_gradient,
        (NotImplementedError,),
        r"but got a sparse gradient for 'weight'",
        r"sparse=False",
        native=NotImplementedError,
    ),
    *(
        Misuse(
            f"output-hides-tensors-in-{name}",
            _returns(form),
            (TypeError,),
            r"expected the output of unit '' \(FSDPReturns\) .*but got a .*that hides tensors",
            r"Return the tensors",
            "FWD-02",
        )
        for name, form in [
            ("a-closure", lambda result: lambda: result),
            ("a-generator", lambda result: (result for _ in range(1))),
            ("deep-objects", _boxed),
        ]
    ),
]
