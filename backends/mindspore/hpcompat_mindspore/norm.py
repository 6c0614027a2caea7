"""The norm of all gradients, each element counted once, and clipping by it.

[Note: whose elements]
A shard's elements are counted on the rank that has them and added over the group that shards the parameter, which its
mesh info says. Whole parameters count where they are; the replicas of an HSDP mesh hold equal shards. Every rank takes
part for each of its parameters, with a gradient or without, so that one which did not use a parameter does not leave
the others waiting.

Nothing has made the gradients of plain parameters (ignored ones) equal on all ranks. Where they differ, the largest
counts, so that all ranks scale the shards of one parameter alike.

Sums are of float64 on the CPU (float32 on Ascend) and added in the order of the ranks: every rank gets the same bits,
and the norm hardly depends on how the parameters are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, ops

from hpcompat.core.failure import naming
from hpcompat.mesh import DDPMeshInfo, FSDPMeshInfo
from hpcompat_mindspore.arithmetic import Ops, Value, arithmetic, is_host
from hpcompat_mindspore.autograd import set_gradient
from hpcompat_mindspore.optimizer import gradient_of, members_of
from hpcompat_mindspore.param import param_of
from hpcompat_mindspore.tensors import memory_of

_BLOCK = 65536


def clip_grad_norm_(
    parameters: Parameter | Iterable[Parameter],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``.

    Collective over the ranks that shard the parameters; all of them pass the same ones.

    Args:
        parameters: one or several; one that comes twice counts once.
        max_norm: of all gradients as one vector.
        norm_type: any ``p``, ``inf`` included; 0 counts the elements that are not 0.
        error_if_nonfinite: raise, and leave the gradients as they are, where the norm is not finite.

    Returns:
        The norm before clipping, a float32 scalar (float64 if a parameter is).

    Raises:
        RuntimeError: the norm is infinite or NaN, and ``error_if_nonfinite``.
    """
    members = members_of(parameters)
    order, limit = float(norm_type), float(max_norm)
    is_double = any(member.dtype == mindspore.float64 for member in members)
    number = np.float64 if is_double else np.float32
    with np.errstate(all="ignore"):
        norm = number(_total_norm(members, order))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"expected finite gradients to clip, but got {norm}: their total norm of order {order} is non-finite; pass "
            "error_if_nonfinite=False to scale them by it all the same"
        )
    with np.errstate(all="ignore"):
        coefficient = number(1) / (norm + number(1e-6)) * number(limit)  # the reciprocal first, as torch divides
    _scale(members, float(np.minimum(coefficient, number(1))))
    return Tensor(np.array(norm))


@dataclass
class _Parts:
    """What was found out about this rank's gradients, by the group that each is spread over. [Note: whose elements]"""

    sharded: dict[Any, list[float]] = field(default_factory=dict)
    whole: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


def _total_norm(parameters: list[Parameter], order: float) -> float:
    arithmetic()  # nothing queued may still change the gradients
    combine = _combination(order)
    parts = _Parts()
    groups = list(dict.fromkeys(group for parameter in parameters for group in _groups_of(parameter)))
    for parameter in parameters:
        grad = gradient_of(parameter)
        if grad is not None and grad.size > 0:
            _list_for(parts, parameter).append(_part_of(grad, order))
    sums, plain = [combine(parts.whole)], combine(parts.plain)
    for group in groups:
        # In one exchange, whatever this rank has: all ranks make the same ones.
        everyone = _everyone([combine(parts.sharded.get(group, [])), plain], group)
        sums.append(combine([shard for shard, _ in everyone]))
        plain = float((np.min if order == -math.inf else np.max)([each for _, each in everyone]))
    total = combine([*sums, plain])
    is_root = order != 0 and not math.isinf(order)
    return float(np.float64(total) ** (1.0 / order)) if is_root else total


def _groups_of(parameter: Parameter) -> list[Any]:
    """Those that share the parameter, by sharding or by replicating."""
    param = param_of(parameter)
    if param is None:
        return []
    info, groups = param.mesh_info, []
    if isinstance(info, FSDPMeshInfo) and info.shard_mesh_size > 1:
        groups.append(info.shard_process_group)
    if isinstance(info, DDPMeshInfo) and info.replicate_mesh_size > 1:
        groups.append(info.replicate_process_group)
    return groups


def _list_for(parts: _Parts, parameter: Parameter) -> list[float]:
    param = param_of(parameter)
    if param is None:
        return parts.plain
    if param.world_size == 1:
        return parts.whole
    assert isinstance(param.mesh_info, FSDPMeshInfo)
    return parts.sharded.setdefault(param.mesh_info.shard_process_group, [])


def _combination(order: float) -> Callable[[list[float]], float]:
    """How what was found out about pieces becomes that about all."""
    if math.isinf(order):
        extreme, nothing = (np.max, 0.0) if order > 0 else (np.min, math.inf)
        return lambda parts: float(extreme([nothing, *parts]))  # NaN stays
    return _sum


def _sum(parts: list[float]) -> float:
    finite = all(math.isfinite(part) for part in parts)
    return math.fsum(parts) if finite else float(np.sum(parts))


def _everyone(numbers: list[float], group: Any) -> list[list[float]]:
    """``numbers`` of every rank of ``group``."""
    memory = memory_of("CPU" if is_host() else "Ascend")
    dtype = mindspore.float64 if is_host() else mindspore.float32
    mine = memory.read(Tensor(np.array(numbers, np.float64 if is_host() else np.float32)))
    everyone = memory.empty(group.size() * len(numbers), dtype)
    with naming("an exchange of norms"):
        group.all_gather(everyone, mine).wait()
    flat = memory.tensor(everyone, (group.size(), len(numbers))).asnumpy()
    return [[float(number) for number in row] for row in flat]


def _part_of(grad: Tensor, order: float) -> float:
    return _host_part(grad, order) if is_host() else _device_part(grad, order)


def _host_part(grad: Tensor, order: float) -> float:
    flat = grad.asnumpy().reshape(-1)
    parts = []
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = np.abs(flat[start : start + _BLOCK].astype(np.float64))
            if math.isinf(order):
                parts.append(float(block.max() if order > 0 else block.min()))
            elif order == 0:
                parts.append(float(np.count_nonzero(block)))
            else:
                parts.append(float(np.sum(block * block if order == 2 else block**order)))
    return _combination(order)(parts)


def _device_part(grad: Tensor, order: float) -> float:
    """Has not run on the hardware yet."""
    size = ops.abs(grad.astype(mindspore.float32))
    if math.isinf(order):
        return float((size.max() if order > 0 else size.min()).asnumpy())
    if order == 0:
        return float((size != 0).astype(mindspore.float32).sum().asnumpy())
    return float((size * size if order == 2 else size**order).sum().asnumpy())


def _scale(parameters: list[Parameter], coefficient: float) -> None:
    run = arithmetic()
    rule = partial(_scaled, coefficient=coefficient)
    for parameter in parameters:
        grad = gradient_of(parameter)
        if grad is None:
            continue
        if param_of(parameter) is None:
            # The engine may have given one tensor to several parameters.
            grad = memory_of("CPU" if is_host() else "Ascend").copy_of(grad)
            set_gradient(parameter, grad)
        run.update([grad], [], rule)


def _scaled(run: Ops, grad: Value, *, coefficient: float) -> tuple[Value, ...]:
    return (run.scale(grad, coefficient),)
