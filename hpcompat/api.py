"""The entry points: check the arguments, find the backend, delegate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from hpcompat import registry
from hpcompat.contract.backend import Backend
from hpcompat.core.wrap import WrapOptions, mesh_info_for, root_modules, wrap
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, validate_mesh
from hpcompat.module import HSDPModule, ReplicateModule
from hpcompat.policy import MixedPrecisionPolicy, OffloadPolicy


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[Any] | None = None,
    replicate_params: set[Any] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_fusion: bool = True,
    comm_fusion_zero_copy: bool | None = None,
    backend: str | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the data-parallel ranks, in place (FSDP2 ``fully_shard``).

    The call makes one unit of every parameter at or below ``module`` that no earlier call took, so wrap bottom-up. A
    unit is gathered in one collective before its forward and again before its backward, and its gradients are reduced
    in one. Afterwards ``module`` is an :class:`HSDPModule` and its parameters are sharded.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D: shard over it. 2-D with names: axis 0 replicates, axis 1 shards (HSDP). Default: all ranks, sharded.
        reshard_after_forward: ``True`` frees the parameters after forward and gathers them again for backward;
            ``False`` keeps them; an int ``k`` that divides the shard axis keeps a slice over groups of ``k`` ranks;
            ``None`` is ``True`` except for the root, which is kept.
        shard_placement_fn: called once per parameter; returns ``None`` (``Shard(0)``), a ``Shard`` of any dim (a dim
            above 0 must divide evenly), or a ``ShardPlacementResult`` with a mesh of its own.
        mp_policy: mixed precision.
        offload_policy: ``CPUOffloadPolicy`` keeps shards, gradients and so optimizer states on the CPU.
        ignored_params: parameters left alone: not sharded, not moved, not reduced.
        replicate_params: parameters kept whole on every rank, with gradients averaged over all data-parallel ranks.
        dp_mesh_dims: the data-parallel axes of an n-D ``mesh`` on which the parameters are already distributed.
        comm_fusion: one collective per unit (default), or one per parameter.
        comm_fusion_zero_copy: keep the shards of a unit in one flat buffer, which then needs no copy before a gather.
            ``None``: where the backend can.
        backend: ``"torch"`` or ``"mindspore"``; by default the environment's ``HPCOMPAT_BACKEND`` or the type of
        ``module``.

    Returns:
        ``module`` itself.

    Raises:
        ValueError: no or nested wrong modules, a mesh that cannot be read without guessing, a scalar parameter, a bad
        policy value.
        UserError: applied twice or to a replicated module, an unnamed 2-D mesh (both ``ValueError`` and
            ``AssertionError``).
        TypeError: an argument of the wrong type.
        NotImplementedError: uneven ``Shard(dim > 0)``, a non-contiguous parameter.
    """
    impl, modules = _resolve(module, backend=backend, call="fully_shard")
    _check_types(impl, mp_policy, offload_policy, mesh, dp_mesh_dims)
    for name, value in (("comm_fusion", comm_fusion), ("comm_fusion_zero_copy", comm_fusion_zero_copy)):
        if not isinstance(value, bool) and (value is not None or name == "comm_fusion"):
            kind = "a bool" if name == "comm_fusion" else "a bool or None"
            raise TypeError(f"expected {name} to be {kind}, but got {value!r}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"expected shard_placement_fn to be callable, but got {shard_placement_fn!r}")
    ignored = _parameter_set(impl, "ignored_params", ignored_params)
    replicated = _parameter_set(impl, "replicate_params", replicate_params)
    if ignored & replicated:
        raise ValueError(
            f"expected ignored_params and replicate_params to be apart, but got {len(ignored & replicated)} "
            "parameters in both"
        )
    info = _mesh_info(impl, mesh, dp_mesh_dims)
    if shard_placement_fn is not None and not isinstance(info, FSDPMeshInfo):
        raise ValueError(
            f"Per-param mesh via shard_placement_fn is not supported with {type(info).__name__}; it requires "
            f"FSDPMeshInfo, that is, a mesh with a shard axis, but got {info}"
        )
    wrap(
        impl,
        modules,
        WrapOptions(
            label="FSDP",
            prefix="FSDP",
            mixin=HSDPModule,
            mesh_info=info,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored,
            replicate_params=replicated,
            fuse=comm_fusion,
            zero_copy=comm_fusion_zero_copy is not False,
        ),
    )
    return module


def replicate(
    module: Any,
    *,
    mesh: Any = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[Any] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    backend: str | None = None,
) -> Any:
    """Keep the parameters of ``module`` whole on every rank and average gradients, in place (FSDP2 ``replicate``).

    The same units, hooks and mixed precision as :func:`fully_shard`, with nothing to gather: one all-reduce per unit.
    Unlike its ``replicate_params``, which keeps some parameters of a sharded unit whole, this is for whole modules, and
    for a mesh without a shard axis. The two do not mix within one module; a replicated module may stand beside sharded
    ones.

    Args:
        module: a module, or a list of modules that form one unit.
        mesh: 1-D. Default: all ranks.
        mp_policy: mixed precision.
        offload_policy: as for ``fully_shard``.
        ignored_params: parameters left alone.
        dp_mesh_dims: the replicate axes, and no shard axes, of an n-D ``mesh``.
        backend: as for ``fully_shard``.

    Returns:
        ``module`` itself, now a :class:`ReplicateModule`.

    Raises:
        ValueError: a mesh of several axes without ``dp_mesh_dims``, or shard axes in it; and as ``fully_shard``.
        RuntimeError: ``fully_shard`` has been applied to the module.
    """
    impl, modules = _resolve(module, backend=backend, call="replicate")
    _check_types(impl, mp_policy, offload_policy, mesh, dp_mesh_dims)
    ignored = _parameter_set(impl, "ignored_params", ignored_params)
    wrap(
        impl,
        modules,
        WrapOptions(
            label="Replicate",
            prefix="Replicate",
            mixin=ReplicateModule,
            mesh_info=_replicate_info(impl, mesh, dp_mesh_dims),
            reshard_after_forward=False,
            shard_placement_fn=None,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored,
            replicate_params=frozenset(),
            fuse=True,
            zero_copy=False,
        ),
    )
    return module


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Gather around ``module.<method_name>`` as around ``forward`` (FSDP2 name; ENT-01).

    Does nothing for a module that is not wrapped.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, HSDPModule):
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(
            f"{type(module)} does not have a method {method_name}: expected one to gather around, but got "
            f"{method_name!r}; define it first"
        )
    unit = module._unit()
    original = getattr(module, method_name)
    index = unit.modules.index(module)

    @functools.wraps(original)
    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit.backend.around_forward.before(unit, index, args, kwargs)
        return unit.backend.around_forward.after(unit, index, original(*args, **kwargs))

    setattr(module, method_name, with_hooks)


def share_comm_ctx(modules: Iterable[Any]) -> None:
    """Let several roots (pipeline stages) use one set of streams and buffers. Call it before the first forward.

    Raises:
        ValueError: a member is not wrapped.
    """
    if isinstance(modules, HSDPModule) or not isinstance(modules, Iterable):
        raise TypeError(f"share_comm_ctx expects a list of FSDPModules, but got {type(modules).__name__}; pass a list")
    members = list(modules)
    for member in members:
        if not isinstance(member, HSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {type(member)}: wrap it with fully_shard first")
    for member in members[1:]:
        member._unit().set_comm_ctx(members[0]._unit().comm_ctx)


def _resolve(module: Any, *, backend: str | None, call: str) -> tuple[Backend, tuple[Any, ...]]:
    """The backend that owns ``module`` and the root modules of the list, if it is one."""
    members = list(module) if isinstance(module, list | tuple) else [module]
    if not members:
        raise ValueError(
            f"{call} expects a module or a non-empty list of modules, but got an empty {type(module).__name__}"
        )
    impl = registry.backend_for(members[0], backend=backend)
    for member in members:
        if not impl.is_module(member):
            raise TypeError(
                f"{call} expects a module or a list of modules of {impl.name}, but got {type(member).__name__}"
            )
    return impl, root_modules(impl, members) if len(members) > 1 else tuple(members)


def _check_types(impl: Backend, mp_policy: object, offload_policy: object, mesh: object, dp_mesh_dims: object) -> None:
    if mesh is not None and not impl.is_mesh(mesh):
        raise TypeError(f"expected mesh to be a DeviceMesh, but got {mesh!r}; make one with init_device_mesh")
    # By name too: a script may still import the policies of torch.distributed.fsdp.
    if not isinstance(mp_policy, MixedPrecisionPolicy) and type(mp_policy).__name__ != "MixedPrecisionPolicy":
        raise TypeError(f"expected mp_policy to be a MixedPrecisionPolicy, but got {mp_policy!r}")
    if not isinstance(offload_policy, OffloadPolicy) and not type(offload_policy).__name__.endswith("OffloadPolicy"):
        raise TypeError(f"expected offload_policy to be an OffloadPolicy, but got {offload_policy!r}")
    for name in ("cast_forward_inputs", "apply_grad_on_fp32_main_grad"):
        value = getattr(mp_policy, name, False)
        if not isinstance(value, bool):
            raise TypeError(f"expected mp_policy.{name} to be a bool, but got {value!r}; pass a bool")
    if dp_mesh_dims is not None and type(dp_mesh_dims).__name__ != "DataParallelMeshDims":
        raise TypeError(f"expected dp_mesh_dims to be a DataParallelMeshDims, but got {dp_mesh_dims!r}")


def _parameter_set(impl: Backend, name: str, values: object) -> frozenset[Any]:
    if values is None:
        return frozenset()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"expected {name} to be a set of parameters, but got {values!r}")
    members = frozenset(values)
    for member in members:
        if not impl.is_parameter(member):
            raise TypeError(f"expected {name} to hold parameters, but got a {type(member).__name__}: {member!r}")
    return members


def _mesh_info(impl: Backend, mesh: Any, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    mesh = impl.default_mesh() if mesh is None else mesh
    validate_mesh(mesh, dims)
    return mesh_info_for(impl, mesh, dims)


def _replicate_info(impl: Backend, mesh: Any, dims: DataParallelMeshDims | None) -> DDPMeshInfo:
    mesh = impl.default_mesh(("replicate",)) if mesh is None else mesh
    if dims is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"replicate expects a 1D DeviceMesh but got {mesh}; pass one axis of it, or all of them flattened"
            )
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    validate_mesh(mesh, dims)
    if dims.shard_names:
        raise ValueError(
            "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims), but got "
            f"{dims}; use fully_shard() for sharding"
        )
    info = mesh_info_for(impl, mesh, dims)
    assert isinstance(info, DDPMeshInfo)
    return info
