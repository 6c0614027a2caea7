"""One parameter: the object that never changes, the data it shows, and its gradients.

``mindspore.value_and_grad`` and the optimizers hold parameter objects, so sharding does not replace them: the data of
the one object switches between this rank's shard, the whole, and the slice kept after forward. Backward reads the data
that the parameter shows at that time, which is why the scheduler's gather before backward is enough.

The buffers of all parameters of a group are laid out together in :mod:`hpcompat_mindspore.group`; this file knows one
parameter's shapes and places.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto
from math import prod
from typing import Any

from mindspore import Parameter, Tensor, nn

from hpcompat.core.gradients import Gradient
from hpcompat.core.layout import ShardLayout, shard_dim
from hpcompat.mesh import DataParallelMeshInfo, FSDPMeshInfo, shard_rank, shard_world_size
from hpcompat_mindspore.tensors import Buffer, Memory

# By the identity of the parameter, which its owner keeps alive.
_SHARD_OF = "_hpcompat_shard_of"
_owners: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


class Shown(Enum):
    """Which of its representations a parameter shows."""

    SHARD = auto()
    SLICE = auto()
    WHOLE = auto()


class ShardedParam:
    """Shapes, places, representations and gradients of one parameter."""

    def __init__(
        self,
        parameter: Parameter,
        *,
        places: list[tuple[nn.Cell, str]],
        mesh_info: DataParallelMeshInfo,
        placement: Any,
        memory: Memory,
    ) -> None:
        self.parameter = parameter
        self.places = places
        self.name = places[0][1]
        self.mesh_info = mesh_info
        self.memory = memory
        self.dim = shard_dim(placement, name=self.name, shape=parameter.shape)
        self.world_size, self.rank = shard_world_size(mesh_info), shard_rank(mesh_info)
        self.layout = ShardLayout(tuple(parameter.shape), self.dim, self.world_size)
        _check_shardable(parameter, self.name, self.layout)
        self.shard_shape = self.layout.shard_shape(self.rank)
        self.padded_numel = self.layout.padded_numel

        # Set by the group from its policies.
        self.keeps_main_grad = False
        self.orig_dtype = parameter.dtype
        self.param_dtype = parameter.dtype
        self.reduce_dtype: Any = None

        self.shown = Shown.SHARD
        self.shard_data: Buffer = None  # flat, padded; what is gathered
        self._shard: Tensor = None
        self._shard_address = 0
        self.whole_data: Buffer = None  # flat, padded for all ranks
        self.slice_data: Buffer = None  # flat, padded; kept after forward

        # Whole gradients: the running backward's, and those of earlier ones with sync off (a buffer).
        self.new_grad: Tensor | None = None
        self.accumulated_grad: Buffer = None
        self.kept_dtype: Any = None  # of accumulated_grad
        self.partial_grad: Buffer = None  # reduce-scattered, not yet all-reduced (HSDP)
        self.is_captured = False
        # What value_and_grad will return, to be filled when backward ends.
        self.returned_grad: Tensor | None = None
        # Set by the hooks: the scheduler's group, which knows whether backward is in this parameter's unit.
        self.owner: Any = None

    def take_over(self) -> None:
        """From now on the parameter is ours. Its gradient, if it had one, was that of the whole."""
        _owners[id(self.parameter)] = self
        # In the instance itself, also where enable_backward_compat has given the class a property of that name.
        vars(self.parameter)["grad"] = None
        self.parameter._grad = None

    # Shard

    def cut(self, whole: Buffer) -> Buffer:
        """This rank's chunk of the whole data."""
        start, length = self.layout.start(self.rank), self.layout.length(self.rank)
        return whole[(slice(None),) * self.dim + (slice(start, start + length),)]

    def adopt_shard(self, flat: Buffer) -> None:
        """Make the shard live in ``flat`` (padded, already filled). Only leading rows are data, so it is contiguous."""
        self.shard_data = flat
        self._shard = self.memory.tensor(flat, self.shard_shape)
        self.show_shard()

    def adopt_meta_shard(self, shard: Tensor) -> None:
        # The initializer makes the whole parameter: it must not run on the shard.
        self.parameter.init_mode = None
        self._shard = shard
        self.show_shard()

    def show_shard(self) -> None:
        self.parameter.assign_value(self._shard)
        self.shown = Shown.SHARD
        self.whole_data = self.slice_data = None
        self._shard_address = 0 if self.is_meta else self._shard.data_ptr()

    @property
    def shard(self) -> Tensor:
        """The shard as a tensor, whatever the parameter shows."""
        return self.parameter if self.shown is Shown.SHARD else self._shard

    def padded_shard(self) -> Buffer:
        """The shard as it is now, flat, padded."""
        return self.memory.pad(self.memory.read(self.parameter).reshape(-1), self.padded_numel)

    def check_places(self) -> None:
        """The parameter object stays; another one in its place would be trained by itself on every rank.

        Raises:
            TypeError: a cell has another one, or none.
        """
        for cell, attribute in self.places:
            current = cell._params.get(attribute)
            if current is not self.parameter:
                raise TypeError(
                    f"expected parameter {self.name!r} to stay the object that was sharded, but got "
                    f"{type(current).__name__} in its place; give it new data with set_data, or load with "
                    "load_state_dict"
                )

    @property
    def is_meta(self) -> bool:
        return bool(self.parameter.is_meta)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the shown shard's data is no longer in ``shard_data``: cast, materialized, loaded, or set by hand."""
        parameter = self.parameter
        dtype = parameter.dtype  # asked for at every gather, where comparing dtypes takes longest
        if self.shard_data is None or (dtype is not self.orig_dtype and dtype != self.orig_dtype):
            return True
        if tuple(parameter.shape) != self.shard_shape:
            return True
        return prod(self.shard_shape) > 0 and parameter.data_ptr() != self._shard_address

    def current_shard(self) -> Buffer:
        """What the parameter shows now; a whole value that somebody set is cut.

        Raises:
            ValueError: it has neither the shard's nor the whole shape.
        """
        data = self.memory.read(self.parameter)
        if tuple(data.shape) == self.shard_shape:
            return data
        if tuple(data.shape) == self.layout.shape:
            return self.cut(data)
        raise ValueError(
            f"expected the data of {self.name!r} to have the shape of the shard, {self.shard_shape}, or of the whole, "
            f"{self.layout.shape}, but got {tuple(data.shape)}"
        )

    # Whole and slice

    def show_whole(self) -> None:
        self.parameter.assign_value(self.memory.tensor(self.whole_data, self.layout.shape))
        self.shown = Shown.WHOLE
        self.slice_data = None

    def show_slice(self, data: Buffer, *, rank: int, world_size: int) -> None:
        """Show rows ``rank`` of ``world_size``, kept in ``data`` (padded); free the whole."""
        shape = ShardLayout(self.layout.shape, 0, world_size).shard_shape(rank)
        self.parameter.assign_value(self.memory.tensor(data, shape))
        self.shown = Shown.SLICE
        self.slice_data = data
        self.whole_data = None

    def slice_numel(self, world_size: int) -> int:
        """Elements each rank keeps after forward over a group of ``world_size``."""
        if self.dim == 0:
            return self.padded_numel * self.world_size // world_size
        return ShardLayout(self.layout.shape, 0, world_size).padded_numel

    def join(self, rows: Buffer) -> Buffer:
        """The whole, flat, from every rank's padded chunk: undoes ``Shard(dim > 0)``."""
        if self.dim == 0:
            return rows
        before, chunk, after = self._blocks()
        return rows.reshape(self.world_size, before, chunk, after).swapaxes(0, 1).reshape(-1)

    def as_rows(self, whole: Buffer) -> Buffer:
        """``[world_size, padded_numel]``: every rank's padded chunk of a whole gradient."""
        if self.dim == 0:
            flat = self.memory.pad(whole.reshape(-1), self.padded_numel * self.world_size)
        else:
            before, chunk, after = self._blocks()
            flat = whole.reshape(before, self.world_size, chunk, after).swapaxes(0, 1)
        return flat.reshape(self.world_size, self.padded_numel)

    def _blocks(self) -> tuple[int, int, int]:
        shape = self.layout.padded_shape
        return prod(shape[: self.dim]), shape[self.dim], prod(shape[self.dim + 1 :])

    # Gradients

    def deliver(self, flat: Buffer) -> None:
        """Put a reduced gradient (flat, at least the shard's elements) on the parameter, or add it to what is there.

        Raises:
            TypeError: the gradient there is not a tensor of the shard's shape.
        """
        attribute = "main_grad" if self.keeps_main_grad else "grad"
        existing = getattr(self.parameter, attribute, None)
        if existing is not None:
            if not isinstance(existing, Tensor) or tuple(existing.shape) != self.shard_shape:
                raise TypeError(
                    f"expected the gradient of sharded parameter {self.name!r} to be a tensor of shape "
                    f"{self.shard_shape} or None, but got {existing!r}"
                )
            flat = self.memory.add(self.memory.read(existing).reshape(-1), flat[: prod(self.shard_shape)])
        setattr(self.parameter, attribute, self.memory.tensor(flat, self.shard_shape))

    @property
    def is_trainable(self) -> bool:
        return bool(self.parameter.requires_grad)

    def take_gradient(self, *, fill_unused: bool) -> Gradient | None:
        """As :class:`hpcompat.core.gradients.ReducedParam` says; likewise the next."""
        grad = self.accumulated_grad
        if grad is not None:
            self.accumulated_grad = None
            return grad, self.kept_dtype
        if self.new_grad is not None:
            new, self.new_grad = self.new_grad, None
            return self.memory.read(new), new.dtype
        if self.partial_grad is not None or (fill_unused and self.is_trainable):
            # A partial sum still waits for its all-reduce, or the other ranks may have used the parameter.
            return self.zero_gradient()
        return None

    def zero_gradient(self) -> Gradient:
        return self.memory.zeros(self.layout.shape, self.param_dtype), self.param_dtype

    def drop_gradients(self) -> None:
        self.new_grad = self.returned_grad = None
        self.accumulated_grad = self.partial_grad = None
        self.parameter._grad = None


def param_of(parameter: Parameter) -> ShardedParam | None:
    """The sharded parameter that ``parameter`` belongs to."""
    owner = _owners.get(id(parameter))
    return owner if owner is not None and owner.parameter is parameter else None


def managed_name(parameter: Parameter) -> str | None:
    """The class and attribute of ``parameter`` in the unit that shards it already."""
    owner = param_of(parameter)
    if owner is None:
        return None
    module, attribute = owner.places[0]
    return f"{type(module).__name__}.{attribute}"


def mark(shard: Tensor, param: ShardedParam) -> Tensor:
    """``shard``, which says from now on that it is one, cut as ``param`` is."""
    setattr(shard, _SHARD_OF, param)
    return shard


def shard_of(value: Tensor) -> ShardedParam | None:
    """What ``value`` is the shard of, as far as it says so."""
    return param_of(value) or getattr(value, _SHARD_OF, None)


def full_tensor(parameter: Parameter, value: Tensor | None = None) -> Tensor:
    """The whole of a sharded parameter, or of a ``value`` sharded like it (its gradient, an optimizer state).

    Collective over the parameter's shard group. Gives back plain parameters, or their ``value``, as they are, and
    scalars.

    Raises:
        ValueError: ``value`` has another shape than the shard.
    """
    param = param_of(parameter)
    if param is None:
        return parameter if value is None else value
    memory = param.memory
    if value is None and param.shown is Shown.WHOLE:
        return memory.copy_of(parameter)
    if value is not None and tuple(value.shape) != param.shard_shape:
        if value.ndim == 0:  # such as the number of steps
            return value
        raise ValueError(
            f"expected a value of the shape of the shard of {param.name!r}, {param.shard_shape}, but got "
            f"{tuple(value.shape)}"
        )
    data = param.current_shard() if value is None else memory.read(value)
    flat = memory.pad(data.reshape(-1), param.padded_numel)
    if param.world_size > 1:
        assert isinstance(param.mesh_info, FSDPMeshInfo)
        dtype = parameter.dtype if value is None else value.dtype
        output = memory.empty(param.padded_numel * param.world_size, dtype)
        param.mesh_info.shard_process_group.all_gather(output, flat).wait()
        flat = param.join(output)
    return memory.copy_of(memory.tensor(flat, param.layout.shape))


def _check_shardable(parameter: Parameter, name: str, layout: ShardLayout) -> None:
    if not parameter.is_meta and not parameter.is_contiguous():
        raise NotImplementedError(
            f"FSDP does not support non-contiguous parameters yet, but got {name!r} of shape {tuple(parameter.shape)}; "
            "make it contiguous before wrapping"
        )
    layout.check_even(name)


def places_of(
    parameters: Sequence[Parameter], modules: Sequence[nn.Cell]
) -> dict[Parameter, list[tuple[nn.Cell, str]]]:
    """Every (cell, attribute) below ``modules`` that holds one of ``parameters``, shared cells included once."""
    places: dict[Parameter, list[tuple[nn.Cell, str]]] = {parameter: [] for parameter in parameters}
    cells = dict.fromkeys(cell for root in modules for _, cell in root.cells_and_names())
    for cell in cells:
        for attribute, parameter in cell._params.items():
            if parameter is not None and parameter in places:
                places[parameter].append((cell, attribute))
    return places
