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

from hpcompat_torch.axes import Atlas, Axis
from hpcompat_torch.local import is_distributed, settled_gradient
from hpcompat_torch.param import owner_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``.

    Accumulates in float32, or in float64 where a parameter has it. For a model that ``fully_shard`` has sharded over
    one axis, in float32, the norm has the bits of ``torch.nn.utils.clip_grad_norm_`` on DTensors.
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
    for (device, _), same in _by_kind(grad for _, grad in gradients if grad is not None).items():
        torch._foreach_mul_(same, coefficient.to(device))
    return total


def _members(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter once; in place of one that stands in for a shard, the shard, which has the gradient."""
    shards = []
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"expected parameters, but got {parameter!r}; pass module.parameters()")
        owner = owner_of(parameter)
        shards.append(parameter if owner is None else owner.sharded_param)
    return list({id(shard): shard for shard in shards}.values())


# Combining


@dataclass
class _Part:
    """Gradients whose elements are spread over the same axes."""

    axes: tuple[Axis, ...]
    is_agreed: bool  # False for plain tensors
    grads: list[torch.Tensor] = field(default_factory=list)
    value: torch.Tensor = field(init=False)


def total_norm(gradients: Sequence[tuple[torch.Tensor, torch.Tensor | None]], order: float) -> torch.Tensor:
    """The norm over the gradients of all ranks, a scalar on the device of the first. Collective. [Note: whose elements]

    Args:
        gradients: each parameter, the same on all ranks, and the local part of its gradient.
        order: any number but NaN; 0 counts the elements that are not 0.
    """
    if math.isnan(order):
        raise ValueError(f"expected norm_type to be a number, but got {order}")
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter, _ in gradients)
    dtype = torch.float64 if is_double else torch.float32
    parts, axes = _parts(gradients)
    home = next((grad.device for part in parts for grad in part.grads), torch.device("cpu"))
    for part in parts:
        part.value = _local_norm(part.grads, order, dtype=dtype).to(home)
    if len(parts) == 1 and not axes:
        return parts[0].value
    for part in parts:
        if _adds(order) and order != 0:
            part.value = part.value**order if part.grads else torch.zeros_like(part.value)
    for axis in axes:
        _exchange([part for part in parts if axis in part.axes], axis, _operation(order))
        _exchange([part for part in parts if not part.is_agreed], axis, _extreme(order))
    values = torch.stack([part.value for part in parts]) if parts else torch.zeros(1, dtype=dtype)
    if _adds(order):
        total = values.sum()
        return total ** (1.0 / order) if order != 0 else total
    return values.amax() if order > 0 else values.amin()


def _adds(order: float) -> bool:
    """Whether ``norm ** order`` of the parts is added up; else the largest or smallest norm is taken."""
    return not math.isinf(order)


def _operation(order: float) -> Any:
    return dist.ReduceOp.SUM if _adds(order) else _extreme(order)


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
        key = (placed.sharded, is_distributed(parameter))
        part = parts.get(key)
        if part is None:
            part = parts[key] = _Part(*key)
        if grad is not None:
            part.grads.append(grad)
    return list(parts.values()), list(axes)


def _exchange(parts: Sequence[_Part], axis: Axis, op: Any) -> None:
    """Combine the values of ``parts`` over the ranks of ``axis``, in one collective."""
    if not parts:
        return
    values = torch.stack([part.value for part in parts])
    home = values.device
    if op != dist.ReduceOp.SUM:
        # Comparisons lose NaN: it travels apart, as what either comparison keeps.
        kept = 1.0 if op == dist.ReduceOp.MAX else -1.0
        values = torch.cat([values.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf), values.isnan() * kept])
    values = values.to(axis.device)
    dist.all_reduce(values, op=op, group=axis.group)
    values = values.to(home)
    if op != dist.ReduceOp.SUM:
        numbers, is_nan = values.chunk(2)
        values = numbers.masked_fill(is_nan != 0, math.nan)
    for part, value in zip(parts, values, strict=True):
        part.value = value


# On this rank


def _local_norm(grads: Sequence[torch.Tensor], order: float, *, dtype: torch.dtype) -> torch.Tensor:
    """Of all elements that are here; of order 0 their number that are not 0. The steps are those of
    ``torch.nn.utils.get_total_norm``.
    """
    norms: list[torch.Tensor] = []
    for (_, _), same in _by_kind(grads).items():
        # Only where an empty tensor has a norm: it would change how the others are added up.
        tensors = same if 0 < order < math.inf else [grad for grad in same if grad.numel() > 0]
        norms.extend(torch._foreach_norm(tensors, order, dtype=dtype) if tensors else ())
    if not norms:
        return torch.tensor(math.inf if order == -math.inf else 0.0, dtype=dtype)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.sum() if order == 0 else torch.linalg.vector_norm(stacked, order)


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds
