"""Over which ranks one param group reduces, and by what its gradients are divided on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcompat.comm import ReduceOp
from hpcompat.core.divide import DivideRequest, divide_plan
from hpcompat.mesh import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, replicate_world_size, shard_world_size

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend
    from hpcompat.contract.scheduler import DividePlan


class Division:
    """The settings of one group, and the plans that follow from them."""

    def __init__(self, mesh_info: DataParallelMeshInfo, *, backend: Backend) -> None:
        self._mesh_info = mesh_info
        self._backend = backend
        # Change them with ``set``.
        self.factor: float | None = None
        self.op_type = "avg"
        self.forces_sum = False
        # By whether the reduce dtype may overflow.
        self._plans: dict[bool, DividePlan] = {}

    def set(self, *, factor: float | None = None, op_type: str | None = None, force_sum: bool | None = None) -> None:
        """Change what gradients are divided by; ``None`` leaves a setting as it is."""
        if factor is not None:
            self.factor = factor
        if op_type is not None:
            self.op_type = op_type
        if force_sum is not None:
            self.forces_sum = force_sum
        self._plans.clear()

    @property
    def scatter_group(self) -> Any:
        """Of the reduce-scatter; ``None`` where the mesh has no axis to shard over."""
        info = self._mesh_info
        if not isinstance(info, FSDPMeshInfo):
            return None
        return info.reduce_scatter_process_group or info.shard_process_group

    @property
    def all_reduce_group(self) -> Any:
        info = self._mesh_info
        return info.replicate_process_group if isinstance(info, DDPMeshInfo) else None

    def plan(self, overflow_risk: bool) -> DividePlan:
        plan = self._plans.get(overflow_risk)
        if plan is None:
            info = self._mesh_info
            factor = 1.0 if self.factor is None and self.op_type == "sum" else self.factor
            plan = self._plans[overflow_risk] = divide_plan(
                DivideRequest(
                    factor=factor,
                    shard_world_size=shard_world_size(info),
                    replicate_world_size=replicate_world_size(info),
                    overflow_risk=overflow_risk,
                    force_sum=self.forces_sum or (factor == 1.0 and self.factor is None),
                    supported=self._supported_reductions(),
                )
            )
        return plan

    def _supported_reductions(self) -> frozenset[ReduceOp]:
        """What all collectives of a reduction compute; over a shard axis of 1 there is no reduce-scatter."""
        info = self._mesh_info
        device = self._backend.device_of(info.mesh)
        scatter_group = self.scatter_group if shard_world_size(info) > 1 else None
        supported = frozenset(ReduceOp)
        for collective, group in (("reduce_scatter", scatter_group), ("all_reduce", self.all_reduce_group)):
            if group is not None:
                supported &= self._backend.supported_reductions(group, collective=collective, device=device)
        return supported
