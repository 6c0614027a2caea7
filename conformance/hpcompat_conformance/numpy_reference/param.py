"""One parameter and its representations: original, shard, unsharded, slice after forward; and the gradients of each."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np

from hpcompat.core.gradients import Gradient
from hpcompat.core.layout import ShardLayout, shard_dim
from hpcompat.mesh import DataParallelMeshInfo, shard_rank, shard_world_size
from hpcompat.policy import MixedPrecisionPolicy
from hpcompat_conformance.numpy_reference.module import Module, Parameter
from hpcompat_conformance.numpy_reference.world import Array

_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def managed_name(parameter: Parameter) -> str | None:
    owner = _owners.get(parameter.uid)
    if owner is None:
        return None
    module, attribute = owner.places[0]
    return f"{type(module).__name__}.{attribute}"


class ShardedParam:
    """What is registered on the modules at ``places`` is one of ``sharded``, ``unsharded`` and ``post_forward``."""

    def __init__(
        self,
        original: Parameter,
        *,
        modules: tuple[Module, ...],
        mesh_info: DataParallelMeshInfo,
        placement: Any,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.places = [
            (module, name)
            for module in dict.fromkeys(module for root in modules for _, module in root.named_modules())
            for name, parameter in module.members(Parameter)
            if parameter is original
        ]
        self.name = self.places[0][1]
        self.uid = original.uid
        _owners[self.uid] = self
        self.rank = shard_rank(mesh_info)
        dim = shard_dim(placement, name=self.name, shape=original.data.shape)
        self.layout = ShardLayout(original.data.shape, dim, shard_world_size(mesh_info))
        self.layout.check_even(self.name)
        self._policy = policy
        self.sharded = Parameter(
            self.cut(original.data, self.rank), requires_grad=original.requires_grad, uid=original.uid
        )
        self.unsharded: Parameter | None = None
        self.post_forward: Parameter | None = None
        self.accumulated_grad: Array | None = None  # with sync off: unsharded, in the reduce dtype
        self.partial_grad: Array | None = None  # with all-reduce off: reduced over the shards only

    # Dtypes: they follow the shard's, which may still change before the first use

    @property
    def orig_dtype(self) -> Any:
        return self.sharded.data.dtype

    @property
    def param_dtype(self) -> Any:
        return np.dtype(self._policy.param_dtype or self.orig_dtype)

    @property
    def reduce_dtype(self) -> Any:
        """``None``: the gradient's own."""
        wanted = self._policy.reduce_dtype
        return None if wanted is None or wanted == self._policy.param_dtype else np.dtype(wanted)

    # Representations

    def register(self, parameter: Parameter) -> None:
        for module, name in self.places:
            setattr(module, name, parameter)

    def cut(self, whole: Array, rank: int) -> Array:
        """The chunk of ``rank``, without padding."""
        start = self.layout.start(rank)
        index = (slice(None),) * self.layout.dim + (slice(start, start + self.layout.length(rank)),)
        return np.array(whole[index])

    def pad(self, chunk: Array) -> Array:
        """``chunk``, flat, with zeros up to what every rank sends."""
        padded = np.zeros(self.layout.padded_shape, chunk.dtype)
        padded[tuple(slice(size) for size in chunk.shape)] = chunk
        return padded.reshape(-1)

    def unpad(self, flat: Array, rank: int) -> Array:
        """The chunk of ``rank`` as a view of its padded data."""
        return flat.reshape(self.layout.padded_shape)[tuple(slice(size) for size in self.layout.shard_shape(rank))]

    def join(self, rows: Array) -> Array:
        """The whole parameter, from every rank's padded chunk."""
        return np.concatenate([self.unpad(row, rank) for rank, row in enumerate(rows)], axis=self.layout.dim)

    def fill(self, whole: Array) -> None:
        """Give the unsharded parameter its values: in place, so that arrays which backward kept become valid again."""
        if self.unsharded is None or self.unsharded.data.dtype != whole.dtype:
            self.unsharded = Parameter(np.empty_like(whole), uid=self.uid)
        self.unsharded.data[...] = whole

    def free(self) -> None:
        """What stands for freeing the memory: nobody can compute with it by mistake."""
        if self.unsharded is not None:
            self.unsharded.data.fill(np.nan)

    # After forward with an integer reshard_after_forward

    def slice_numel(self, world_size: int) -> int:
        return self.layout.padded_numel * self.layout.world_size // world_size

    def keep_slice(self, rank: int, world_size: int) -> None:
        assert self.unsharded is not None
        size = self.slice_numel(world_size)
        whole = np.zeros(size * world_size, self.unsharded.data.dtype)
        whole[: self.unsharded.data.size] = self.unsharded.data.reshape(-1)
        self.post_forward = Parameter(whole[rank * size :][:size].copy(), uid=self.uid)

    def join_slices(self, rows: Array) -> Array:
        return rows.reshape(-1)[: prod(self.layout.shape)].reshape(self.layout.shape)

    # Gradients

    @property
    def is_trainable(self) -> bool:
        return self.sharded.requires_grad

    def take_gradient(self, *, fill_unused: bool) -> Gradient | None:
        """The gradient that is due, or zeros if the other ranks may have one; the caller's from then on."""
        kept, self.accumulated_grad = self.accumulated_grad, None
        grad = self.take_new_gradient() if kept is None else kept
        if grad is not None:
            return grad, grad.dtype
        is_due = self.partial_grad is not None or (fill_unused and self.is_trainable)
        return self.zero_gradient() if is_due else None

    def zero_gradient(self) -> Gradient:
        return np.zeros(self.layout.shape, self.param_dtype), self.param_dtype

    @property
    def has_new_gradient(self) -> bool:
        return self.unsharded is not None and self.unsharded.grad is not None

    def take_new_gradient(self) -> Array | None:
        if self.unsharded is None:
            return None
        grad, self.unsharded.grad = self.unsharded.grad, None
        return grad

    def deliver(self, piece: Array, *, orig_dtype: Any) -> None:
        """Add a reduced gradient (padded) to the shard's."""
        grad = self.unpad(piece, self.rank)
        sharded = self.sharded
        if self._policy.apply_grad_on_fp32_main_grad:
            sharded.main_grad = grad.copy() if sharded.main_grad is None else sharded.main_grad + grad
        else:
            grad = grad.astype(orig_dtype)
            sharded.grad = grad if sharded.grad is None else sharded.grad + grad

    def drop_gradients(self) -> None:
        self.take_new_gradient()
        self.accumulated_grad = self.partial_grad = None
