"""The profile of a case: microseconds per unit and step in each kind of hook, for both implementations."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paired.cases import Case
from paired.hooks import HOOKS, STAGES, HookClock, KindTime, hook_clock
from paired.noop import CallCounter, noop_collectives
from paired.sides import Side, SideName, make_side
from paired.timing import synchronize

NUM_WARMUP_STEPS = 3
NUM_ROUNDS = 8

Detail = Literal["hooks", "stages"]


@dataclass
class _Visits:
    """Of one side, a value for each round: seconds a step, and seconds a step in each kind of hook."""

    implementation: str
    side: Side
    clock: HookClock
    step_seconds: list[float] = field(default_factory=list)
    kinds: list[dict[str, KindTime]] = field(default_factory=list)

    def run(self, *, num_steps: int, device: torch.device) -> None:
        self.step_seconds.append(_seconds_per_step(self.side, num_steps=num_steps, device=device, clock=self.clock))
        self.kinds.append(self.clock.take())

    def summary(self, *, num_steps: int, num_units: int, bare_seconds: float) -> dict[str, Any]:
        """Microseconds per unit and step."""
        scale = 1e6 / num_units
        kinds = {
            kind: {
                "us_per_unit": median(visit[kind].seconds for visit in self.kinds) / num_steps * scale,
                "calls_per_step": self.kinds[-1][kind].num_calls / num_steps,
            }
            for kind in self.clock.kinds
        }
        added = (median(self.step_seconds) - bare_seconds) * scale
        return {
            "implementation": self.implementation,
            "kinds": kinds,
            "rest_us_per_unit": added - sum(kind["us_per_unit"] for kind in kinds.values()),
            "added_us_per_unit": added,
            "missing": self.clock.missing,
        }


def profile_case(
    case: Case, *, ours: str, mesh: DeviceMesh, device: torch.device, rank: int, detail: Detail, num_steps: int
) -> dict[str, Any]:
    """Per side: us per unit and calls per step of each kind of hook, and the rest; all ranks call this together.

    The rest is what a step takes beyond the bare model's step and the listed functions: hook dispatch in `nn.Module`
    and in autograd, slower modules and gradients, and the two ranks disturbing each other.
    """
    sharded: tuple[tuple[SideName, str], ...] = (("ours", ours), ("native", "native"))
    bare = make_side(case, name="bare", ours=ours, mesh=mesh, device=device, rank=rank)
    bare_seconds: list[float] = []
    visits: dict[str, _Visits] = {}
    with contextlib.ExitStack() as stack:
        if case.noop_collectives:
            stack.enter_context(noop_collectives(CallCounter()))
        clocks = {name: stack.enter_context(hook_clock(_targets(impl, detail=detail))) for name, impl in sharded}
        for name, implementation in sharded:
            side = make_side(case, name=name, ours=ours, mesh=mesh, device=device, rank=rank)
            visits[name] = _Visits(implementation, side, clocks[name])
            for _ in range(NUM_WARMUP_STEPS):
                side.step()
        for index in range(NUM_ROUNDS):
            bare_seconds.append(_seconds_per_step(bare, num_steps=num_steps, device=device))
            for visit in visits.values() if index % 2 == 0 else reversed(visits.values()):
                visit.run(num_steps=num_steps, device=device)
    sizes = {"num_steps": num_steps, "num_units": case.num_units}
    return {
        **sizes,
        **{name: visit.summary(**sizes, bare_seconds=median(bare_seconds)) for name, visit in visits.items()},
    }


def _targets(implementation: str, *, detail: Detail) -> tuple[tuple[str, str], ...]:
    return HOOKS.get(implementation, ()) + (STAGES.get(implementation, ()) if detail == "stages" else ())


def _seconds_per_step(side: Side, *, num_steps: int, device: torch.device, clock: HookClock | None = None) -> float:
    dist.barrier()
    side.step()
    synchronize(device)
    if clock is not None:
        clock.take()  # the step that warms the caches does not count
    start = time.perf_counter()
    for _ in range(num_steps):
        side.step()
    synchronize(device)
    return (time.perf_counter() - start) / num_steps
