"""What a wrapped module can do: every method is a loop over units, the same for every framework."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from hpcompat.core.unit import unit_of
from hpcompat.core.wrap import post_forward_mesh_info
from hpcompat.errors import UserError
from hpcompat.mesh import FSDPMeshInfo
from hpcompat.recovery import Recovery

if TYPE_CHECKING:
    from hpcompat.comm import AllGather, ReduceScatter
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit


class UnshardHandle:
    """Waits for an ``unshard(async_op=True)``. Waiting twice, or never (forward waits), is fine."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Return when the unsharded parameters may be used; they are registered on the module from then on."""
        for group in self._groups:
            group.wait_for_unshard()
        self._groups = []


class HSDPModule(Recovery):
    """Mixed into the class of a module by ``fully_shard`` as ``FSDP<Original>`` (FSDP2 ``FSDPModule``).

    On torch the class is also a subclass of torch's own ``FSDPModule``, none of whose methods it runs.

    Methods with ``recurse`` act on every unit at or below the module by default; the others on the module's unit alone.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Containers build new containers of their own class when sliced: that must give a plain one.
        return cls.__mro__[_original_index(cls)](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UserError(
            "FSDP does not support deepcopy. Please use state dict for serialization. Expected a module that is not "
            f"wrapped, but got a deepcopy of {type(self).__name__}: copy the module before wrapping it; for an "
            "averaged copy (EMA), wrap a second model and update its parameters in place"
        )

    def __copy__(self) -> Any:
        # As copy.copy does for any object, which asks __reduce_ex__ where there is no __copy__.
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"expected a state dict to save, but got a pickled {type(self).__name__}: shards, process groups and hooks "
            "belong to this process. Save model.state_dict() of every rank, or the whole tensors that "
            "hpcompat.full_tensor gives, and load them into a newly wrapped model"
        )

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now. Returns a handle if ``async_op``, else waits and returns ``None``."""
        unit = self._unit()
        _check_bool("async_op", async_op)
        for group in unit.groups:
            group.prepare()
            group.unshard(async_op)
        handle = UnshardHandle(list(unit.groups))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the shards."""
        for group in self._unit().groups:
            group.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether to reshard after forward. Ends the special treatment of a root whose policy was left at ``None``."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, but got {reshard_after_forward!r}; an int goes to fully_shard"
            )
        for unit in self._units(recurse):
            unit.auto_reshard_after_forward = False
            for group in unit.groups:
                if isinstance(group.mesh_info, FSDPMeshInfo):
                    group.post_forward_mesh_info = post_forward_mesh_info(
                        unit.backend, group.mesh_info, reshard_after_forward
                    )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether to reshard after backward; off keeps parameters for the next microbatch at the cost of memory."""
        _check_bool("reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters; off for a unit whose backward does not read them (an embedding)."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    # Gradient synchronization

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients (both reduce-scatter and all-reduce); off accumulates them unsharded."""
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.reduce_grads = requires_gradient_sync
            group.all_reduce_grads = requires_gradient_sync

    @contextmanager
    def no_sync(self, *, recurse: bool = True) -> Iterator[None]:
        """``set_requires_gradient_sync(False)`` for a block: after it, also after an exception, each unit has the
        settings back that it had before (ACC-11). FSDP2 has no such method; the name is that of FSDP1 and DDP.
        """
        before = [(group, group.reduce_grads, group.all_reduce_grads) for group in self._groups(recurse)]
        self.set_requires_gradient_sync(False, recurse=recurse)
        try:
            yield
        finally:
            for group, reduce_grads, all_reduce_grads in before:
                group.reduce_grads, group.all_reduce_grads = reduce_grads, all_reduce_grads

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Under HSDP, whether backward all-reduces over replicas; off keeps the reduce-scattered partial sum."""
        _check_bool("requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last of the step: only then is per-step state cleared. Set it on the
        root.
        """
        _check_bool("is_last_backward", is_last_backward)
        self._unit().iteration.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by ``factor`` instead of the number of data-parallel ranks; 1.0 is a pure sum.

        The gradient becomes ``scaling_factor * sum over ranks / factor``, the same on FSDP and HSDP meshes and on
        groups without a premultiplied sum (RED-03, RED-10).
        """
        if not _is_number(factor):
            raise TypeError(f"expected the gradient divide factor to be a number, but got {factor!r}")
        if not _is_finite(factor) or factor <= 0:
            raise ValueError(f"expected the gradient divide factor to be positive and finite, but got {factor!r}")
        for group in self._groups(recurse=False):
            group.division.set(factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """:meth:`set_gradient_divide_factor`, by the name that it had in FSDP2 before."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_scaling_factor(self, factor: Any) -> None:
        """Multiply reduced gradients by ``factor``: a number, a one-element tensor, or ``None`` for no scaling."""
        is_number = _is_number(factor) and _is_finite(factor)
        is_one_element = callable(getattr(factor, "numel", None)) and factor.numel() == 1
        if factor is not None and not is_number and not is_one_element:
            raise TypeError(
                f"expected the gradient scaling factor to be a number, a one-element tensor or None, but got {factor!r}"
            )
        for group in self._groups(recurse=True):
            group.gradient_scaling_factor = float(factor) if is_number else factor

    def set_reduce_op_type(self, reduce_op_type: str) -> None:
        """``"avg"`` (default) averages over the data-parallel ranks, ``"sum"`` sums. A divide factor overrides both."""
        if reduce_op_type not in ("avg", "sum"):
            raise ValueError(f'expected reduce_op_type to be "avg" or "sum", but got {reduce_op_type!r}')
        for group in self._groups(recurse=True):
            group.division.set(op_type=reduce_op_type)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use only sums in collectives, with divisions around them."""
        _check_bool("enable", enable)
        for group in self._groups(recurse=False):
            group.division.set(force_sum=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Reduce zeros for parameters that got no gradient, so that ranks that use different ones agree (RED-05)."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in self._groups(recurse):
            group.reduce_scatter_unused_params = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may keep their input at once; the largest value in the tree counts for all of it."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, but got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, but got {max_input_buffers}")
        for unit in self._units(recurse):
            for group in unit.groups:
                group.max_input_buffers = max_input_buffers
            tree = unit.iteration.units
            if tree:  # after lazy init the cap in force lives in the shared context
                caps = [group.max_input_buffers for member in tree for group in member.groups]
                unit.comm_ctx.max_input_buffers = max(caps, default=1)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatters process groups of their own, so that they overlap with gathers. Collective."""
        _check_bool("enable", enable)
        made: dict[Any, Any] = {}
        for unit in self._units(recurse):
            for group in unit.groups:
                info = group.mesh_info
                if not isinstance(info, FSDPMeshInfo):
                    raise UserError(
                        f"Expected mesh_info to be FSDPMeshInfo, but got {info}: it has no reduce-scatter; leave the "
                        "call out"
                    )
                if not enable:
                    info.reduce_scatter_process_group = None
                elif info.reduce_scatter_process_group is None:
                    shared = info.shard_process_group
                    if shared not in made:
                        made[shared] = unit.backend.separate_group(shared)
                    info.reduce_scatter_process_group = made[shared]

    # Prefetching and communication

    def set_modules_to_forward_prefetch(self, modules: list[HSDPModule]) -> None:
        """Units whose gathers this one issues in forward, right after its own parameters are ready."""
        self._unit().forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[HSDPModule]) -> None:
        """Units whose gathers this one issues in backward, instead of the implicit prefetch of the unit before."""
        self._unit().backward_prefetch = _units_of(modules)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather with ``comm`` (see :class:`hpcompat.comm.AllGather`)."""
        _check_comm("set_custom_all_gather", comm)
        for group in self._only_group("set_custom_all_gather"):
            group.all_gather_comm = comm
            group.has_custom_comm = True

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter with ``comm`` (see :class:`hpcompat.comm.ReduceScatter`)."""
        _check_comm("set_custom_reduce_scatter", comm)
        for group in self._only_group("set_custom_reduce_scatter"):
            group.reduce_scatter_comm = comm
            group.has_custom_comm = True

    def set_all_reduce_hook(self, hook: Callable[[Any], None], *, stream: Any = None) -> None:
        """Call ``hook(flat_gradient)`` on the reduced shard, in place, before the last division and cast."""
        if not callable(hook):
            raise TypeError(f"expected the all-reduce hook to be callable, but got {hook!r}")
        for group in self._only_group("set_all_reduce_hook"):
            if stream is not None and group.is_hsdp:
                raise ValueError(
                    f"stream cannot be set when using native HSDP, but got {stream!r}; leave it out, the hook runs on "
                    "the all-reduce stream"
                )
            group.all_reduce_hook = hook
            if stream is not None:
                group.all_reduce_hook_stream = stream

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take communication buffers from the process group's allocator, where it has one."""
        _check_bool("enable", enable)
        self._set_comms("process_group" if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take communication buffers from symmetric memory.

        Raises:
            CapabilityError: the device has none.
        """
        if backend != "NCCL":
            raise ValueError(f'expected backend to be "NCCL", but got {backend!r}')
        self._set_comms("symm_mem")

    def set_post_optim_event(self, event: Any) -> None:
        """The event that the next forward's gathers wait for, instead of everything on the current stream. Used
        once.
        """
        self._unit().iteration.post_optim_event = event

    def hsdp_sync_stream(self) -> None:
        """Return when every gradient of this tree is on its shard."""
        self._unit().comm_ctx.finish()

    def _set_unshard_async_op(self, async_op: bool) -> None:
        for group in self._groups(recurse=True):
            group.unshard_async_op = async_op

    # Helpers

    def _unit(self) -> Unit:
        unit = unit_of(self)
        if unit is None:
            raise RuntimeError(
                f"expected a wrapped module, but {type(self).__name__} has no unit; call fully_shard on it"
            )
        return unit

    def _units(self, recurse: bool) -> Iterator[Unit]:
        own = self._unit()
        _check_bool("recurse", recurse)
        if not recurse:
            yield own
            return
        seen: set[Unit] = set()
        for _, module in own.backend.named_modules(self):
            unit = unit_of(module)
            if unit is not None and unit not in seen:
                seen.add(unit)
                yield unit

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        for unit in self._units(recurse):
            yield from unit.groups

    def _only_group(self, method: str) -> list[ParamGroup]:
        groups = self._unit().groups
        if len(groups) > 1:
            raise ValueError(
                f"{method} is not supported with multiple param groups, but got {len(groups)} in this unit: one object "
                "could not tell them apart; give the unit one mesh and comm_fusion=True"
            )
        return groups

    def _set_comms(self, kind: str | None) -> None:
        unit = self._unit()
        for group in unit.groups:
            if group.has_custom_comm:
                call = "set_symm_mem" if kind == "symm_mem" else "set_allocate_memory_from_process_group"
                kind_of_comm: str
                comm: object
                kind_of_comm, comm = "all gather", group.all_gather_comm
                if comm is None:
                    kind_of_comm, comm = "reduce scatter", group.reduce_scatter_comm
                raise UserError(
                    f"cannot call {call}() when {kind_of_comm} comm is custom: expected the default one, but got "
                    f"{comm!r}; choose one of the two"
                )
            if kind is None or not isinstance(group.mesh_info, FSDPMeshInfo):
                group.all_gather_comm = group.reduce_scatter_comm = None
                continue
            gather, scatter = unit.backend.comm_for(kind, group.mesh_info.shard_process_group)
            group.all_gather_comm = gather
            # Symmetric-memory reduce-scatters exist for sums only.
            group.reduce_scatter_comm = scatter if kind == "process_group" or group.division.forces_sum else None


class ReplicateModule(HSDPModule):
    """Mixed in by ``replicate`` as ``Replicate<Original>``: every rank holds whole parameters and gradients are
    averaged.
    """

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        if not isinstance(reshard_after_forward, bool):
            raise UserError(
                f"reshard_after_forward should be a bool, but got {reshard_after_forward!r}; leave the call out"
            )
        raise UserError(
            f"expected a sharded module to set reshard_after_forward={reshard_after_forward!r} on, but got "
            f"{type(self).__name__}, which keeps its parameters whole; leave the call out"
        )


def _original_index(cls: type) -> int:
    """Position of the user's class in ``FSDP<Original>``'s MRO: after it, the framework mixin and ours."""
    bases = cls.__bases__
    return cls.__mro__.index(bases[-1])


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"expected {name} to be a bool, but got {value!r}")


def _is_number(value: object) -> TypeGuard[Real]:
    """Python's and numpy's; not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond every float
        return False


def _check_comm(method: str, comm: object) -> None:
    if isinstance(comm, type) or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(f"{method} expects an object with allocate(...) and __call__(...), but got {comm!r}")


def _units_of(modules: list[HSDPModule]) -> list[Unit]:
    if isinstance(modules, HSDPModule) or not hasattr(modules, "__iter__"):
        raise TypeError(f"expected a list of FSDPModules, but got {type(modules).__name__}")
    modules = list(modules)
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: wrap it with fully_shard first")
    return [module._unit() for module in modules]
