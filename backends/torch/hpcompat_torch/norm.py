"""The norm of all gradients, each element counted once, and clipping by it.

[Note: whose elements]
Which ranks hold other elements of a gradient follows from its parameter's placements: the local parts are combined over
the mesh axes on which the parameter is sharded, and over no others. So replicas, of HSDP or of a whole parameter, count
once. A rank takes part for each of its parameters, with a gradient or without, so that one which did not use a
parameter does not leave the others waiting.

Plain tensors (ignored parameters) count where they are. Nothing has made their gradients equal on all ranks; where they
differ, the largest counts, so that all ranks scale the shards of one parameter alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hpcompat.core.failure import naming
from hpcompat_torch import private
from hpcompat_torch.axes import NOWHERE, Atlas, Axis
from hpcompat_torch.local import settled_gradient
from hpcompat_torch.param import owner_of, replaced_name


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``.

    Accumulates in float32, or in float64 where a parameter has it. For a float32 model that is sharded over one axis
    and whose parameters all have gradients, the norm has the bits of ``torch.nn.utils.clip_grad_norm_`` on DTensors.
    """
    members = _members(parameters)
    order = float(norm_type)
    gradients = [(parameter, settled_gradient(parameter)) for parameter in members]
    total = total_norm(gradients, order)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"expected finite gradients to clip, but got {total.item()}: their total norm of order {order} is "
            "non-finite; pass error_if_nonfinite=False to scale them by it all the same"
        )
    coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for _, same in _by_kind([grad for _, grad in gradients]):
        private.foreach_mul_(same, coefficient.to(same[0].device))
    return total


def _members(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter once; in place of one that stands in for a shard, the shard, which has the gradient."""
    shards = []
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"expected parameters, but got {parameter!r}; pass module.parameters()")
        owner = owner_of(parameter)
        name = replaced_name(parameter)
        if owner is None and name is not None:
            raise ValueError(
                f"expected sharded parameters, but got {name!r} as it was before fully_shard replaced it: it gets no "
                "gradient; pass module.parameters()"
            )
        shards.append(parameter if owner is None else owner.sharded_param)
    return list({id(shard): shard for shard in shards}.values())


# Combining


@dataclass
class _Part:
    """Gradients whose elements are spread over the same axes. ``norms`` has one number per gradient."""

    axes: tuple[Axis, ...]
    is_agreed: bool  # False for plain tensors
    grads: list[torch.Tensor | None] = field(default_factory=list)
    norms: torch.Tensor = field(init=False)


def total_norm(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]], order: float) -> torch.Tensor:
    """The norm over the gradients of all ranks, a scalar on the device of the first. Collective. [Note: whose elements]

    First the norm of each gradient, then that of these norms: the steps of torch over DTensors, for the same bits.

    Args:
        gradients: each parameter, the same on all ranks, and the local part of its gradient.
        order: any number but NaN; 0 counts the elements that are not 0.
    """
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter, _ in gradients)
    dtype = torch.float64 if is_double else torch.float32
    parts, axes = _parts(gradients)
    home = next((grad.device for _, grad in gradients if grad is not None), torch.device("cpu"))
    for part in parts:
        part.norms = _local_norms(part.grads, order, dtype=dtype, home=home)
    spread = [part for part in parts if part.axes]
    is_root = not math.isinf(order) and order != 0
    for part in spread:
        part.norms = part.norms**order if is_root else part.norms
    for axis in axes:
        _exchange([part for part in spread if axis in part.axes], axis, _operation(order))
        _exchange([part for part in parts if not part.is_agreed], axis, _extreme(order))
    for part in spread:
        part.norms = part.norms ** (1.0 / order) if is_root else part.norms
    if not parts:
        return torch.zeros((), dtype=dtype)
    norms = torch.cat([part.norms for part in parts])
    if order == 0:
        return norms.sum()
    # Not vector_norm for these two: it refuses what has no elements.
    return torch.linalg.vector_norm(norms, order) if is_root else (norms.amax() if order > 0 else norms.amin())


def _operation(order: float) -> Any:
    return _extreme(order) if math.isinf(order) else dist.ReduceOp.SUM


def _extreme(order: float) -> Any:
    return dist.ReduceOp.MIN if order == -math.inf else dist.ReduceOp.MAX


def _parts(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[list[_Part], list[Axis]]:
    """The gradients by the axes that their parameters are sharded on, and all axes of all meshes."""
    parts: dict[tuple[tuple[Axis, ...], bool], _Part] = {}
    axes: dict[Axis, None] = {}
    atlas = Atlas()
    for parameter, grad in gradients:
        placed = atlas.placed(parameter)
        axes.update(dict.fromkeys(placed.every))
        if grad is None and not parameter.requires_grad:
            continue
        key = (placed.sharded, placed is not NOWHERE)
        part = parts.get(key)
        if part is None:
            part = parts[key] = _Part(*key)
        part.grads.append(grad)
    return list(parts.values()), list(axes)


def _exchange(parts: Sequence[_Part], axis: Axis, op: Any) -> None:
    """Combine the numbers of ``parts`` over the ranks of ``axis``, in one collective."""
    if not parts:
        return
    norms = torch.cat([part.norms for part in parts])
    home = norms.device
    if op != dist.ReduceOp.SUM:
        # Comparisons lose NaN: it travels apart, as what either comparison keeps.
        kept = 1.0 if op == dist.ReduceOp.MAX else -1.0
        norms = torch.cat([norms.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf), norms.isnan() * kept])
    norms = norms.to(axis.device)
    with naming("an exchange of norms"):
        dist.all_reduce(norms, op=op, group=axis.group)
    norms = norms.to(home)
    if op != dist.ReduceOp.SUM:
        numbers, is_nan = norms.chunk(2)
        norms = numbers.masked_fill(is_nan != 0, math.nan)
    for part, own in zip(parts, norms.split([len(part.grads) for part in parts]), strict=True):
        part.norms = own


# On this rank


def _local_norms(
    grads: Sequence[torch.Tensor | None], order: float, *, dtype: torch.dtype, home: torch.device
) -> torch.Tensor:
    """One per gradient; of order 0 the number of elements that are not 0. Without elements it is what changes nothing:
    0, or infinity for an order below 0.
    """
    nothing = torch.full((), math.inf if order < 0 else 0.0, dtype=dtype, device=home)
    norms = [nothing] * len(grads)
    for numbers, tensors in _by_kind(grads):
        if tensors[0].is_complex():  # the kernels would want a complex dtype for the sum
            tensors = [torch.view_as_real(grad) if order == 2 else grad.abs() for grad in tensors]
        for number, norm in zip(numbers, private.foreach_norm(tensors, order, dtype=dtype), strict=True):
            norms[number] = norm.to(home)
    return torch.stack(norms)


def _by_kind(grads: Sequence[torch.Tensor | None]) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Those with elements, with their positions: apart by device and dtype, as the multi-tensor kernels want them."""
    kinds: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
    for number, grad in enumerate(grads):
        if grad is not None and grad.numel() > 0:
            numbers, tensors = kinds.setdefault((grad.device, grad.dtype), ([], []))
            numbers.append(number)
            tensors.append(grad)
    return list(kinds.values())
