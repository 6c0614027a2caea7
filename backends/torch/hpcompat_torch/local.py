"""The local side of distributed tensors: this rank's part, in the same memory, and the way back.

Distributed are torch's DTensor and the tensors of any library that keeps the local part in ``_local_tensor`` or gives
it by ``to_local()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcompat_torch.mesh import spec_with_dtype
from hpcompat_torch.param import make_dtensor
from hpcompat_torch.private import AsyncCollectiveTensor

PLAIN = frozenset({torch.Tensor, nn.Parameter})


def local_of(value: Any) -> Any:
    """This rank's part of a distributed tensor, in the same memory; anything else as it is."""
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return value
    local = getattr(value, "_local_tensor", None)
    if local is None and callable(getattr(value, "to_local", None)):
        local = value.to_local()
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    return value if local is None else local


def is_distributed(tensor: torch.Tensor) -> bool:
    return local_of(tensor) is not tensor


def is_placed_alike(one: DTensor, other: DTensor) -> bool:
    """Whether both have the same mesh and placements."""
    mine, theirs = one._spec, other._spec
    return mine is theirs or (mine.placements == theirs.placements and mine.mesh == theirs.mesh)


def distributed_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """``local`` itself as this rank's part of a tensor that is distributed as ``parameter`` is.

    A library without ``from_local(local, mesh, placements)`` gets the local tensor.
    """
    if isinstance(parameter, DTensor):
        return make_dtensor(local, spec_with_dtype(parameter._spec, local.dtype))
    from_local = getattr(type(parameter), "from_local", None)
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if from_local is None or mesh is None or placements is None:
        return local
    made = from_local(local, mesh, placements)
    return made if local_of(made).data_ptr() == local.data_ptr() else local  # type: ignore[no-any-return]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """What an update takes: ``grad``, else the ``main_grad`` of ``apply_grad_on_fp32_main_grad``."""
    grad = parameter.grad
    return getattr(parameter, "main_grad", None) if grad is None else grad


def settled_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The local part of the parameter's gradient, in the memory of the gradient.

    Where the two are placed differently (the gradient of a tensor-parallel parameter may still be a partial sum), the
    parameter gets the gradient in its own placement: a collective.

    Raises:
        ValueError: the gradient is on another mesh.
    """
    grad = gradient_of(parameter)
    if grad is None:
        return None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad._spec is not parameter._spec:
        if grad.device_mesh != parameter.device_mesh:
            raise ValueError(
                f"expected a gradient on the mesh of its parameter, {parameter.device_mesh}, but got one on "
                f"{grad.device_mesh}; redistribute it"
            )
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
            if parameter.grad is None:
                parameter.main_grad = grad  # type: ignore[attr-defined]
            else:
                parameter.grad = grad
    return local_of(grad)  # type: ignore[no-any-return]
