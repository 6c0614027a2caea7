"""By what, when and with which reduction a gradient is divided on its way from the ranks to the shard.

The result is always ``scale * sum over the data-parallel ranks / divisor``, where the divisor is the user's factor or,
without one, the number of data-parallel ranks (``shard_world_size * replicate_world_size``) for ``avg`` and 1 for
``sum``. How the division is spread over the path decides the bits, so where native FSDP2 works this module picks what
it picks, and where the group has no such reduction it falls back to a sum and one division right after it, before
anyone sees the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcompat.comm import ReduceOp
from hpcompat.contract.scheduler import DividePlan


@dataclass(frozen=True)
class DivideRequest:
    """What the user and the group ask of the division."""

    factor: float | None
    shard_world_size: int
    replicate_world_size: int
    overflow_risk: bool
    force_sum: bool
    supported: frozenset[ReduceOp]

    @property
    def data_parallel_size(self) -> int:
        return self.shard_world_size * self.replicate_world_size


def divide_plan(request: DivideRequest) -> DividePlan:
    """The plan for ``request``.

    ``overflow_risk`` is true for reduce dtypes other than float32 and bfloat16: the division is then split around the
    reduction so that partial sums neither overflow nor vanish.
    """
    divisor = float(request.data_parallel_size) if request.factor is None else request.factor
    if request.overflow_risk:
        pre = _power_of_two_near_root(divisor)
        return DividePlan(pre, ReduceOp.SUM, ReduceOp.SUM, divisor / pre)
    if request.force_sum:
        return DividePlan(None, ReduceOp.SUM, ReduceOp.SUM, divisor)
    if request.factor is None:
        return _average(request)
    if request.shard_world_size == 1:
        # No reduce-scatter can carry the factor, so it goes in front of the all-reduce.
        return DividePlan(request.factor, ReduceOp.SUM, ReduceOp.SUM, None)
    if request.factor == request.shard_world_size and ReduceOp.AVG in request.supported:
        return DividePlan(None, ReduceOp.AVG, ReduceOp.SUM, None)
    if ReduceOp.PREMUL_SUM in request.supported:
        return DividePlan(None, ReduceOp.PREMUL_SUM, ReduceOp.SUM, None, premul=1 / request.factor)
    return DividePlan(None, ReduceOp.SUM, ReduceOp.SUM, None, owed=request.factor)


def _average(request: DivideRequest) -> DividePlan:
    if request.data_parallel_size == 1:
        return DividePlan(None, ReduceOp.SUM, ReduceOp.SUM, None)
    if ReduceOp.AVG in request.supported:
        return DividePlan(None, ReduceOp.AVG, ReduceOp.AVG, None)
    return DividePlan(None, ReduceOp.SUM, ReduceOp.SUM, None, owed=float(request.data_parallel_size))


def _power_of_two_near_root(divisor: float) -> float:
    """Doubled from 1 while it divides ``divisor`` and is below its square root, as native FSDP2 does."""
    pre = 1.0
    while divisor % pre == 0 and divisor / pre > pre:
        pre *= 2
    return pre
