"""One parameter and its representations: original, shard, unsharded, and the gradients of the last two.

The original parameter is what the module held before wrapping; the sharded parameter is a DTensor over this rank's
shard; the unsharded parameter is what forward and backward compute with. The tensors of all parameters of a group are
laid out together in :mod:`hpcompat_torch.group`; this file knows one parameter's shapes, spec and places.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcompat.core.gradients import Gradient
from hpcompat.core.identity import mark, mark_of
from hpcompat.core.layout import ShardLayout, contiguous_strides, shard_dim
from hpcompat.mesh import DataParallelMeshInfo, FSDPMeshInfo, shard_rank, shard_world_size
from hpcompat_torch.mesh import sharding_spec, spec_with_dtype
from hpcompat_torch.private import AsyncCollectiveTensor, DTensorSpec

# On an original parameter that a shard has replaced: what did. An optimizer that still holds it trains nothing.
_REPLACED = "_hpcompat_replaced"
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()
# By the identity of each representation, which its owner keeps alive.
_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def replaced_name(parameter: torch.Tensor) -> str | None:
    """The name that ``parameter`` had before a shard took its place; ``None`` if it is none of those."""
    replaced = mark_of(parameter, _REPLACED)
    return None if replaced is None else replaced[0]


def owner_of(parameter: torch.Tensor) -> ShardedParam | None:
    """What ``parameter`` is a representation of: the shard, or what is registered in its place. Else ``None``, also for
    an original parameter or a copy.
    """
    owner = _owners.get(id(parameter))
    if owner is None:
        return None
    own = (owner.sharded_param, owner.unsharded_param, owner.post_forward_param)
    return owner if any(parameter is representation for representation in own) else None


def managed_name(parameter: torch.Tensor) -> str | None:
    """The class and attribute of what shards ``parameter``, or has taken its place."""
    owner = owner_of(parameter)
    if owner is None:
        replaced = mark_of(parameter, _REPLACED)
        owner = None if replaced is None else _by_number.get(replaced[1])
    if owner is None:
        return None
    module, attribute = owner.places[0]
    return f"{type(module).__name__}.{attribute}"


def clear_gradient(parameter: torch.Tensor, *, set_to_none: bool) -> None:
    """Clear ``grad`` and ``main_grad``; of a parameter that ``fully_shard`` has taken those of its shard, and what
    still waits for its reduction.
    """
    owner = owner_of(parameter)
    if owner is not None:
        owner.drop_gradients()
        _clear(owner.sharded_param, set_to_none=set_to_none)
    if owner is None or owner.sharded_param is not parameter:
        _clear(parameter, set_to_none=set_to_none)


def _clear(parameter: torch.Tensor, *, set_to_none: bool) -> None:
    for name in ("grad", "main_grad"):
        grad = getattr(parameter, name, None)
        if grad is None:
            continue
        if set_to_none:
            setattr(parameter, name, None)
        else:
            grad.detach_()
            grad.zero_()


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor around ``local`` itself, outside autograd."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[abstract, call-arg, arg-type]


class ShardedParam:
    """Shapes, spec, places and gradients of one parameter."""

    def __init__(
        self,
        parameter: nn.Parameter,
        *,
        places: list[tuple[nn.Module, str]],
        mesh_info: DataParallelMeshInfo,
        placement: Any,
        device: torch.device,
    ) -> None:
        self.places = places
        self.name = places[0][1]
        self._number = next(_numbers)
        _by_number[self._number] = self
        self.requires_grad = parameter.requires_grad
        self.dim = shard_dim(placement, name=self.name, shape=parameter.shape)
        self.spec = sharding_spec(parameter, self.name, mesh_info, self.dim)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        self.world_size, self.rank = shard_world_size(mesh_info), shard_rank(mesh_info)
        self.layout = ShardLayout(tuple(local.shape), self.dim, self.world_size)
        _check_shardable(local, self.name, self.layout)

        # Set by the group from its policies.
        self.device = device
        self.offloads = self.pin_memory = self.keeps_main_grad = False
        self.orig_dtype = local.dtype
        self.param_dtype = local.dtype  # of the unsharded parameter; fixed by GroupTensors.prepare
        self.reduce_dtype: torch.dtype | None = None
        self.orig_stride = contiguous_strides(self.layout.shape)
        self.shard_shape = self.layout.shard_shape(self.rank)
        self.shard_stride = contiguous_strides(self.shard_shape)
        self.padded_numel = self.layout.padded_numel
        self.sharded_param: nn.Parameter
        self.shard_data: torch.Tensor  # flat, padded; what is gathered
        self.unsharded_param: nn.Parameter | None = None
        self.post_forward_param: nn.Parameter | None = None
        self.post_forward_data: torch.Tensor | None = None
        self.accumulated_grad: torch.Tensor | None = None
        self.watched_param: nn.Parameter | None = None  # whose gradients are noted
        self.partial_grad: torch.Tensor | None = None  # reduce-scattered, not yet all-reduced (HSDP)
        self.offload_event: Any = None

    # Shard

    def cut(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the original parameter's data."""
        return local.narrow(self.dim, self.layout.start(self.rank), self.layout.length(self.rank))

    def unpad(self, flat: torch.Tensor) -> torch.Tensor:
        """The shard as a view of its flat padded data."""
        return flat.view(self.layout.padded_shape).narrow(self.dim, 0, self.shard_shape[self.dim])

    def adopt_shard(self, flat: torch.Tensor) -> None:
        """Make the sharded parameter live in ``flat`` (padded, already filled); the parameter object stays if there is
        one.
        """
        self.shard_data = flat
        local = self.unpad(flat)
        if hasattr(self, "sharded_param"):
            self.sharded_param._local_tensor = local  # type: ignore[attr-defined]
            return
        self.sharded_param = nn.Parameter(make_dtensor(local, self.spec.sharded), requires_grad=self.requires_grad)
        _owners[id(self.sharded_param)] = self

    def replaces(self, parameter: torch.Tensor) -> None:
        """``parameter`` is no longer what is trained."""
        mark(parameter, _REPLACED, (self.name, self._number))

    def stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter``, marked as registered in place of the shard for a while."""
        _owners[id(parameter)] = self
        self.replaces(parameter)
        return parameter

    @property
    def local_shard(self) -> torch.Tensor:
        return self.sharded_param._local_tensor  # type: ignore[no-any-return, attr-defined]

    @property
    def is_replaced(self) -> bool:
        """Whether somebody has registered another parameter in place of the shard."""
        module, attribute = self.places[0]
        return module._parameters.get(attribute) is not self.sharded_param

    def refresh_sharded_param(self) -> None:
        """Take up a parameter that was registered in place of ours, at every place that shares it."""
        module, attribute = self.places[0]
        current = module._parameters.get(attribute)
        if current is not self.sharded_param:
            if not isinstance(current, DTensor):
                raise TypeError(
                    f"expected parameter {self.name!r} to stay a DTensor, but got {type(current).__name__}; assign a "
                    "DTensor with the sharded parameter's mesh and placements, or load with load_state_dict; register "
                    "a parametrization before wrapping"
                )
            _owners[id(current)] = self
            self.sharded_param = current
            self.register(current)
        self.orig_dtype = self.local_shard.dtype
        self.spec.sharded = self.sharded_param._spec  # type: ignore[attr-defined]

    @property
    def is_elsewhere(self) -> bool:
        """Whether the sharded parameter's data is no longer in ``shard_data`` (moved, cast, materialized, assigned)."""
        local, data = self.local_shard, self.shard_data
        if local.is_meta or local.dtype != data.dtype or local.device != data.device:
            return True
        same_start = (
            local.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            and local.storage_offset() == data.storage_offset()
        )
        return local.numel() > 0 and not same_start

    def register(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = parameter
            else:
                setattr(module, attribute, parameter)

    # Gradients

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """The plain tensor that the data-parallel reduction takes; redistributes model-parallel axes where needed."""
        spec = self.spec.unsharded
        if spec is not None:
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
            if not isinstance(grad, DTensor):
                raise TypeError(
                    f"expected the gradient of {self.name!r} to be a DTensor like the parameter, but got "
                    f"{type(grad).__name__}"
                )
            wanted = tuple(
                grad.placements[axis] if axis in self.spec.data_parallel_dims else placement
                for axis, placement in enumerate(spec.placements)
            )
            if wanted != grad.placements:
                grad = grad.redistribute(placements=wanted)
            grad = grad._local_tensor
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
        return grad.detach() if grad.requires_grad else grad

    @property
    def is_trainable(self) -> bool:
        return self.sharded_param.requires_grad

    def take_gradient(self, *, fill_unused: bool) -> Gradient | None:
        """As :class:`hpcompat.core.gradients.ReducedParam` says; likewise the next."""
        grad = self.accumulated_grad
        unsharded = self.unsharded_param
        if grad is not None:
            self.accumulated_grad = None
        elif unsharded is not None and unsharded.grad is not None:
            grad = unsharded.grad
            unsharded.grad = None
        elif self.partial_grad is not None or (fill_unused and self.is_trainable):
            # A partial sum still waits for its all-reduce, or the other ranks may have used the parameter.
            return self.zero_gradient()
        else:
            return None
        grad = grad if self.spec.unsharded is None and not grad.requires_grad else self.local_grad(grad)
        return grad, grad.dtype

    def zero_gradient(self) -> Gradient:
        return torch.zeros(self.layout.shape, dtype=self.param_dtype, device=self.device), self.param_dtype

    def to_offload(self, grad: torch.Tensor, *, stream: Any) -> torch.Tensor:
        """A copy of ``grad`` in CPU memory; overlapped only if nothing on the CPU reads it during backward."""
        is_read_now = self.sharded_param.grad is not None or getattr(
            self.sharded_param, "_post_accumulate_grad_hooks", None
        )
        non_blocking = self.pin_memory and not is_read_now
        copy = grad.to(torch.device("cpu"), non_blocking=non_blocking)
        if non_blocking:
            self.offload_event = stream.record_event()
        return copy

    def deliver(self, grad: torch.Tensor, *, to_main_grad: bool) -> None:
        """Put the reduced gradient (a view of the reduction's output) on the sharded parameter, or add it to what is
        there.
        """
        parameter = self.sharded_param
        existing = getattr(parameter, "main_grad", None) if to_main_grad else parameter.grad
        if existing is not None:
            if not isinstance(existing, DTensor):
                raise TypeError(
                    f"expected the gradient of sharded parameter {self.name!r} to be a DTensor or None, but got "
                    f"{type(existing).__name__}"
                )
            existing._local_tensor += grad
        elif to_main_grad:
            parameter.main_grad = make_dtensor(grad, spec_with_dtype(self.spec.sharded, grad.dtype))  # type: ignore[attr-defined]
        else:
            parameter.grad = make_dtensor(grad, self.spec.sharded)
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            for hook in tuple(hooks.values()):
                hook(parameter)

    def drop_gradients(self) -> None:
        if self.unsharded_param is not None:
            self.unsharded_param.grad = None
        self.accumulated_grad = self.partial_grad = None

    def post_forward_numel(self, world_size: int) -> int:
        """Elements each rank keeps after forward over a group of ``world_size``."""
        if self.dim == 0:
            return self.padded_numel * self.world_size // world_size
        # The gathered parameter is already laid out in full; cutting it into rows keeps every rank's piece contiguous.
        return ShardLayout(self.layout.shape, 0, world_size).padded_numel


def _check_shardable(local: torch.Tensor, name: str, layout: ShardLayout) -> None:
    if not local.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet, but got {name!r} of shape {tuple(local.shape)} and "
            f"stride {local.stride()}; make it contiguous before wrapping"
        )
    layout.check_even(name)


def post_forward_param(param: ShardedParam, piece: torch.Tensor, mesh_info: FSDPMeshInfo) -> nn.Parameter:
    layout = ShardLayout(param.layout.shape, 0, mesh_info.shard_mesh_size)
    shape = layout.shard_shape(mesh_info.shard_mesh_rank)
    local = torch.as_strided(piece, shape, contiguous_strides(shape))
    meta = param.spec.sharded.tensor_meta
    spec = DTensorSpec(mesh_info.mesh, (Replicate(), Shard(0)), tensor_meta=meta)
    return nn.Parameter(
        make_dtensor(local, spec_with_dtype(spec, local.dtype)), requires_grad=param.sharded_param.requires_grad
    )


def places_of(
    parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Every (module, attribute) below ``modules`` that holds one of ``parameters``, shared modules included once."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {parameter: [] for parameter in parameters}
    for root in modules:
        for module in root.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter in places and (module, attribute) not in places[parameter]:
                    places[parameter].append((module, attribute))
    return places
