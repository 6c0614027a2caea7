"""The ways to train: how the model is wrapped, on what mesh, and what a step is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import hpcompat
from fault_matrix.kit import UNITS, Kit
from fault_matrix.points import SCRIPT, Point


class Microbatch(NamedTuple):
    """What the setters are told before it; not ``is_last`` means also that parameters stay gathered after it."""

    sync: bool = True
    all_reduce: bool = True
    is_last: bool = True


@dataclass(frozen=True)
class Style:
    """The microbatches of a step, and in which of them the trap is set."""

    id: str
    microbatches: tuple[Microbatch, ...] = (Microbatch(),)
    fails_in: int = 0
    calls_backward: bool = True
    # Whether each forward comes after one without gradients.
    evaluates: bool = False
    # Whether the last layer leaves parameters out in every other step.
    leaves_out: bool = False


PLAIN = Style("one batch")
NO_SYNC = Style("sync off", (Microbatch(sync=False), Microbatch(sync=False), Microbatch()), 1)
SYNC = Style("sync on", (Microbatch(), Microbatch()), 0)
NO_ALL_REDUCE = Style("all-reduce off", (Microbatch(all_reduce=False), Microbatch(all_reduce=False), Microbatch()), 1)
PIPELINE = Style("as a pipeline", (Microbatch(False, False, False), Microbatch(False, False, False), Microbatch()), 1)
LEAVING_OUT = Style("leaving out", leaves_out=True)
VALUE_AND_GRAD = Style("value_and_grad", calls_backward=False)


@dataclass(frozen=True)
class Setting:
    """``wrapper`` is one of ``fully_shard``, ``replicate`` and ``list``."""

    mesh: tuple[int, ...]
    wrapper: str = "fully_shard"
    style: Style = PLAIN
    reshard: bool | int = True
    is_mixed: bool = False
    label: str = ""
    units: tuple[str, ...] = UNITS
    # Reductions in flight at once.
    num_buffers: int = 1
    # Whether units have a second group, of replicated parameters; hpcompat's own.
    replicates_biases: bool = False
    # As with HPCOMPAT_DEBUG=1; hpcompat's own.
    debugs: bool = False

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh)

    @property
    def id(self) -> str:
        name = self.label or {"fully_shard": "FSDP", "replicate": "replicate", "list": "list"}[self.wrapper]
        reshard = "" if self.wrapper == "replicate" else f" reshard={self.reshard}"
        return f"{name}{reshard}, {self.style.id}"

    @property
    def has(self) -> frozenset[str]:
        """What of :attr:`Point.needs` is there."""
        facts = {
            "shards": self.wrapper != "replicate",
            "reshards": self.reshard is not False,
            "microbatches": len(self.style.microbatches) > 1,
            "calls backward": self.style.calls_backward,
            "one group": not self.replicates_biases,
        }
        return frozenset(fact for fact, holds in facts.items() if holds)

    def has_point(self, point: Point, unit: str) -> bool:
        if point.id in SCRIPT:
            return unit == "root" and point.needs <= self.has
        return unit in self.units and unit in point.units and point.needs <= self.has

    def wrap(self, kit: Kit, model: Any) -> Any:
        first, middle, last = model.layers
        for unit in ([first, middle], last, model) if self.wrapper == "list" else (first, middle, last, model):
            self._wrap_unit(kit, unit, mesh=_mesh(self.mesh))
        if self.num_buffers > 1:
            model.set_reduce_scatter_max_input_buffers(self.num_buffers)
        # So that gathers are in flight wherever the trap springs.
        first.set_modules_to_forward_prefetch([last] if self.wrapper == "list" else [middle, last])
        return model

    def _wrap_unit(self, kit: Kit, unit: Any, *, mesh: Any) -> None:
        if self.wrapper == "replicate":
            kit.replicate(unit, mesh=mesh)
            return
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.reshard}
        if self.is_mixed:
            options["mp_policy"] = kit.mixed_policy()
        if self.replicates_biases:
            own = unit.head if hasattr(unit, "head") else unit
            options["replicate_params"] = {
                parameter for name, parameter in hpcompat.named_parameters(own) if name.endswith("bias")
            }
        kit.fully_shard(unit, **options)


@cache
def _mesh(shape: tuple[int, ...]) -> Any:
    """One of each shape per process: groups are not free."""
    return hpcompat.init_device_mesh(None, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


_ONE_UNIT = ("middle",)

# What the product is made of: every way to wrap, and every unit where one is resharded after forward.
WRAPPERS = [
    Setting((2,), reshard=True),
    Setting((2,), reshard=False),
    Setting((2, 2), reshard=True, label="HSDP"),
    Setting((2, 2), reshard=False, label="HSDP", units=_ONE_UNIT),
    Setting((2,), "replicate"),
    Setting((2,), "list", reshard=True),
    Setting((2,), "list", reshard=False, units=_ONE_UNIT),
]
# Gradients that wait: unsharded, in another dtype, on shards, for the replicas. And other ways through the code.
STYLES = [
    Setting((2,), style=NO_SYNC, reshard=True, units=_ONE_UNIT),
    Setting((2,), style=NO_SYNC, reshard=False, units=_ONE_UNIT),
    Setting((2,), style=NO_SYNC, is_mixed=True, label="float16", units=_ONE_UNIT),
    Setting((2,), style=SYNC, units=_ONE_UNIT),
    Setting((2, 2), style=NO_SYNC, label="HSDP", units=_ONE_UNIT),
    Setting((2, 2), style=NO_ALL_REDUCE, label="HSDP", units=_ONE_UNIT),
    Setting((2,), "replicate", style=NO_SYNC, units=_ONE_UNIT),
    Setting((2,), "list", style=NO_SYNC, units=_ONE_UNIT),
    Setting((4,), reshard=2, units=_ONE_UNIT),
    Setting((2, 2), label="HSDP, 3 buffers", num_buffers=3, units=_ONE_UNIT),
    Setting((2,), style=VALUE_AND_GRAD, units=_ONE_UNIT),
    Setting((2,), style=PIPELINE, units=_ONE_UNIT),
    Setting((2,), style=LEAVING_OUT, units=_ONE_UNIT),
    Setting((2, 2), label="HSDP, debugging", style=LEAVING_OUT, debugs=True, units=_ONE_UNIT),
    Setting((2,), label="replicate_params", replicates_biases=True, style=NO_SYNC, units=_ONE_UNIT),
]
# Microbatches in the ways to wrap that are left; nothing but the places of the script, between them among others.
MICROBATCHES = [
    *(
        Setting(mesh, "list" if label == "list" else "fully_shard", style, reshard, label=label, units=())
        for style in (NO_SYNC, SYNC)
        for mesh, label in (((2,), ""), ((2, 2), "HSDP"), ((2,), "list"))
        for reshard in (True, False)
    ),
    Setting((2,), "replicate", style=SYNC, units=()),
]
_DONE = {setting.id for setting in STYLES}
SETTINGS = [*WRAPPERS, *STYLES, *(setting for setting in MICROBATCHES if setting.id not in _DONE)]
# Those in which the trap is also laid at each of the scheduler's events, in any microbatch.
EVENT_BY_EVENT = [
    Setting((2,)),
    Setting((2,), "list"),
    Setting((2,), style=Style("sync off, then on", (Microbatch(sync=False), Microbatch()))),
    Setting((2,), style=Style("with evaluations", evaluates=True)),
    Setting((2, 2), label="HSDP", style=Style("all-reduce off, then on", (Microbatch(all_reduce=False), Microbatch()))),
]
BY_ID = {setting.id: setting for setting in (*SETTINGS, *EVENT_BY_EVENT)}
