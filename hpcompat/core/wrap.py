"""What ``fully_shard`` and ``replicate`` do, in order: check, collect, group, shard, hook, rename."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcompat.contract.backend import WrapSpec
from hpcompat.core.param_group import ParamGroup
from hpcompat.core.unit import UNIT_KEY, Unit, unit_of
from hpcompat.errors import UserError, shared_parameter
from hpcompat.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    check_reshard_after_forward,
    replicate_world_size,
    shard_world_size,
)
from hpcompat.placement import ShardPlacementResult, is_shard

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend
    from hpcompat.policy import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class WrapOptions:
    """The validated arguments of one call. ``label`` names the call in messages, ``prefix`` the new class."""

    label: str
    prefix: str
    mixin: type
    mesh_info: DataParallelMeshInfo
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[Any], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: frozenset[Any]
    replicate_params: frozenset[Any]
    fuse: bool
    zero_copy: bool


def wrap(backend: Backend, modules: tuple[Any, ...], options: WrapOptions) -> Unit:
    """Turn ``modules`` into one unit, in place.

    Raises:
        UserError, ValueError, TypeError, NotImplementedError: see ``fully_shard``.
    """
    for module in modules:
        _check_module(backend, module, options.label)
    device = backend.device_of(options.mesh_info.mesh)
    _check_dtypes(backend, options.mp_policy)
    backend.check_offload(options.offload_policy, device)
    managed = managed_modules(backend, modules, options.ignored_params)
    parameters = _managed_parameters(backend, managed, options)
    buffers = _unique(buffer for module in managed for buffer in backend.buffers(module))
    specs = _group_specs(backend, parameters, modules, device, options)

    backend.place(parameters, buffers, device)
    unit = Unit(
        modules,
        backend=backend,
        device=device,
        mp_policy=options.mp_policy,
        auto_reshard_after_forward=options.reshard_after_forward is None,
        label=options.label,
    )
    # All are made, and so checked, before any changes the modules.
    tensors = [backend.make_group(spec) for spec in specs]
    for spec, group_tensors in zip(specs, tensors, strict=True):
        group_tensors.shard()
        unit.add_group(
            ParamGroup(
                group_tensors,
                backend=backend,
                mesh_info=spec.mesh_info,
                post_forward_mesh_info=spec.post_forward_mesh_info,
            )
        )
    backend.install_hooks(unit)
    backend_mixin = backend.module_mixin if options.label == "FSDP" else backend.replicate_mixin
    for module in modules:
        module.__dict__[UNIT_KEY] = unit
        module.__class__ = _mixed_class(type(module), options.prefix, options.mixin, backend_mixin)
    return unit


# Modules and parameters


def root_modules(backend: Backend, modules: Iterable[Any]) -> tuple[Any, ...]:
    """Those of ``modules`` that are not inside another of them, each once."""
    unique = _unique(modules)
    inner: set[Any] = set()
    for module in unique:
        inner.update(member for name, member in backend.named_modules(module) if member is not module)
    return tuple(module for module in unique if module not in inner)


def _check_module(backend: Backend, module: Any, label: str) -> None:
    unit = unit_of(module)
    if unit is not None:
        if unit.label != label:
            # The classes are FSDP2's.
            kind = RuntimeError if label == "Replicate" else UserError
            raise kind(
                f"Cannot apply `{_call_of(label)}()` on a Module already managed by `{_call_of(unit.label)}`, but got "
                f"{type(module).__name__}; wrap it with one of the two"
            )
        raise UserError(
            f"Each distinct composable distributed API can only be applied to a module once. {_call_of(label)} expects "
            f"modules that have no unit yet, but got {type(module).__name__}; wrap bottom-up, each module in one call"
        )
    if backend.is_bare_container(module):
        raise ValueError(
            f"{_call_of(label)} does not support containers that do not implement forward, but got "
            f"{type(module).__name__}; wrap its members, or pass them as a list"
        )


def _check_dtypes(backend: Backend, mp_policy: MixedPrecisionPolicy) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is None:
            continue
        if not backend.is_dtype(dtype):
            raise TypeError(f"expected mp_policy.{name} to be a {backend.name}.dtype, but got {dtype!r}")
        if not backend.is_floating(dtype):
            raise ValueError(f"expected mp_policy.{name} to be a floating dtype, but got {dtype}")


def _call_of(label: str) -> str:
    return "fully_shard" if label == "FSDP" else "replicate"


def managed_modules(backend: Backend, roots: tuple[Any, ...], ignored_params: frozenset[Any]) -> list[Any]:
    """The modules whose parameters this call takes: depth first, without those that have a unit already.

    A module whose parameters are all ignored, whose children are all such, and which has no buffers is left out.
    """
    found: list[Any] = []
    visited: set[Any] = set()

    def visit(module: Any) -> None:
        visited.add(module)
        for child in backend.children(module):
            if child not in visited and unit_of(child) is None:
                visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    if not ignored_params:
        return found
    decided: dict[Any, bool] = {}
    return [module for module in found if not _is_ignored(backend, module, ignored_params, decided)]


def _is_ignored(backend: Backend, module: Any, ignored: frozenset[Any], decided: dict[Any, bool]) -> bool:
    if module not in decided:
        decided[module] = (
            not any(True for _ in backend.buffers(module))
            and all(parameter in ignored for _, parameter in backend.named_parameters(module, recurse=False))
            and all(_is_ignored(backend, child, ignored, decided) for child in backend.children(module))
        )
    return decided[module]


def _managed_parameters(backend: Backend, managed: list[Any], options: WrapOptions) -> list[Any]:
    parameters: list[Any] = []
    seen: set[Any] = set()
    for module in managed:
        for name, parameter in backend.named_parameters(module, recurse=False):
            if parameter in seen or parameter in options.ignored_params:
                continue
            _check_not_managed(backend, f"{type(module).__name__}.{name}", parameter)
            if backend.is_scalar(parameter):
                raise ValueError(
                    f"{_call_of(options.label)} doesn't support scalar parameters. Change {name} to a 1D tensor with "
                    f"numel equal to 1. Expected at least one dim, but got {name} of shape ()"
                )
            seen.add(parameter)
            parameters.append(parameter)
    strangers = options.replicate_params - seen
    if strangers:
        raise ValueError(
            f"expected replicate_params to be parameters that this call manages, but got {len(strangers)} that are "
            "not in the wrapped modules, are ignored, or belong to a unit already"
        )
    return parameters


def _check_not_managed(backend: Backend, name: str, parameter: Any) -> None:
    if backend.managed_name(parameter) is None:
        return
    gc.collect()  # the other unit may be gone, but for circles
    other = backend.managed_name(parameter)
    if other is not None:
        raise shared_parameter(name, other)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


# Groups


def _group_specs(
    backend: Backend, parameters: list[Any], modules: tuple[Any, ...], device: Any, options: WrapOptions
) -> list[WrapSpec]:
    """One spec per mesh info, in order of first appearance; one per parameter without communication fusion."""
    groups: dict[Any, tuple[DataParallelMeshInfo, list[Any], list[Any]]] = {}
    replicate_info = _replicate_info(backend, options) if options.replicate_params else None
    for parameter in parameters:
        info: DataParallelMeshInfo
        if replicate_info is not None and parameter in options.replicate_params:
            info, placement = replicate_info, None
        else:
            info, placement = _resolve_placement(parameter, options)
        key = _group_key(info, groups)
        if not options.fuse:
            key = (key, len(groups))
        members = groups.setdefault(key, (info, [], []))
        if options.fuse:
            _check_same_mesh_info(members[0], info, options.mesh_info)
        members[1].append(parameter)
        members[2].append(placement)
    return [
        WrapSpec(
            parameters=members,
            modules=modules,
            mesh_info=info,
            post_forward_mesh_info=post_forward_mesh_info(backend, info, options.reshard_after_forward),
            device=device,
            placements=placements,
            mp_policy=options.mp_policy,
            offload_policy=options.offload_policy,
            fuse=options.fuse,
            zero_copy=options.zero_copy,
        )
        for info, members, placements in groups.values()
    ]


def _group_key(info: DataParallelMeshInfo, groups: dict[Any, Any]) -> tuple[Any, ...]:
    """What parameters must agree on to share a group: the process groups they communicate over.

    On one rank every axis has the same process group; there the meshes themselves tell the groups apart.
    """
    if shard_world_size(info) * replicate_world_size(info) == 1:
        infos = [members[0] for members in groups.values()]
        alike = (index for index, known in enumerate(infos) if known.mesh == info.mesh and type(known) is type(info))
        return (next(alike, len(infos)),)
    shard_group = info.shard_process_group if isinstance(info, FSDPMeshInfo) else None
    replicate_group = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
    return shard_group, replicate_group


def _check_same_mesh_info(
    first: DataParallelMeshInfo, other: DataParallelMeshInfo, default: DataParallelMeshInfo
) -> None:
    # The default one is made inside fully_shard, where the caller cannot name it: it may stand beside the caller's own.
    if first is not other and first is not default and other is not default:
        raise ValueError(
            "Params sharing the same process group must use the same FSDPMeshInfo object, but got different objects: "
            f"{first} vs {other}; make one and return it for all of them"
        )


def _replicate_info(backend: Backend, options: WrapOptions) -> DDPMeshInfo:
    """Parameters of ``replicate_params`` average over every data-parallel rank, whatever the mesh of the others."""
    info = options.mesh_info
    mesh = backend.flatten(info.mesh) if isinstance(info, HSDPMeshInfo) else info.mesh
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def _resolve_placement(parameter: Any, options: WrapOptions) -> tuple[DataParallelMeshInfo, Any]:
    if options.shard_placement_fn is None:
        return options.mesh_info, None
    result = options.shard_placement_fn(parameter)
    if result is None:
        return options.mesh_info, None
    if isinstance(result, ShardPlacementResult):
        if not isinstance(result.mesh_info, FSDPMeshInfo):
            raise TypeError(
                "expected mesh_info of a ShardPlacementResult to be an FSDPMeshInfo, but got "
                f"{type(result.mesh_info).__name__}; make one: FSDPMeshInfo(mesh, shard_mesh_dim=0)"
            )
        return result.mesh_info, result.placement
    if is_shard(result):
        return options.mesh_info, result
    raise ValueError(
        f"Invalid shard_placement_fn result: {result}. Expected None, a Shard or a ShardPlacementResult, but got "
        f"{result!r}"
    )


def post_forward_mesh_info(
    backend: Backend, info: DataParallelMeshInfo, reshard_after_forward: bool | int | None
) -> FSDPMeshInfo | None:
    """The mesh that parameters are resharded to after forward; ``None`` keeps them unsharded.

    Raises:
        ValueError: see ``check_reshard_after_forward``.
        NotImplementedError: an int on a mesh picked by ``dp_mesh_dims``.
    """
    if not isinstance(info, FSDPMeshInfo):
        return None
    wanted = True if reshard_after_forward is None else reshard_after_forward
    if info.is_spmd_mesh and isinstance(wanted, int) and not isinstance(wanted, bool):
        raise NotImplementedError(
            f"reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims), but got {wanted!r}; "
            "pass a bool"
        )
    size = check_reshard_after_forward(wanted, info.shard_mesh_size)
    if size is False:
        return None
    if size is True:
        return info
    return HSDPMeshInfo(backend.post_forward_mesh(info, size), shard_mesh_dim=1, replicate_mesh_dim=0)


def mesh_info_for(backend: Backend, mesh: Any, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    """The mesh info of a validated mesh."""
    if dims is None:
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    dp_mesh = backend.submesh(mesh, dims)
    if not dims.shard_names:
        return DDPMeshInfo(dp_mesh, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    if not dims.replicate_names:
        return FSDPMeshInfo(dp_mesh, shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
    return HSDPMeshInfo(dp_mesh, shard_mesh_dim=1, replicate_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)


# Classes

_mixed_classes: dict[tuple[type, str], type] = {}


def _mixed_class(original: type, prefix: str, mixin: type, backend_mixin: type) -> type:
    """``FSDP<Original>`` with bases (mixin, the backend's mixin, Original), made once per original class."""
    key = (original, prefix)
    if key not in _mixed_classes:
        _mixed_classes[key] = type(f"{prefix}{original.__name__}", (mixin, backend_mixin, original), {})
    return _mixed_classes[key]
