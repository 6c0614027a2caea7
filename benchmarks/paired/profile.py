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
from paired.sides import SIDES, TURNS, Side, SideName, make_side
from paired.timing import synchronize

NUM_WARMUP_STEPS = 2
NUM_ROUNDS = 8

Detail = Literal["hooks", "stages"]


@dataclass
class _Visits:
    """Of one side, for each round: the time of its steps, and the time in each kind of hook."""

    side: Side
    clock: HookClock
    steps: list[KindTime] = field(default_factory=list)
    kinds: list[dict[str, KindTime]] = field(default_factory=list)

    def run(self, *, num_steps: int, device: torch.device) -> None:
        self.steps.append(_run_steps(self.side, num_steps=num_steps, device=device, clock=self.clock))
        self.kinds.append(self.clock.take())

    def summary(self, bare: _Visits, *, scale: float) -> dict[str, Any]:
        """Rows of microseconds, wall and CPU, each of them seconds times `scale`."""
        kinds = {kind: _row([visit[kind] for visit in self.kinds], scale=scale) for kind in self.clock.kinds}
        steps, bare_steps = _row(self.steps, scale=scale), _row(bare.steps, scale=scale)
        added = {unit: steps[unit] - bare_steps[unit] for unit in ("us", "cpu_us")}
        rest = {unit: added[unit] - sum(row[unit] for row in kinds.values()) for unit in added}
        num_steps = self.steps[-1].num_calls
        calls = {kind: spent.num_calls / num_steps for kind, spent in self.kinds[-1].items()}
        return {"kinds": kinds, "rest": rest, "added": added, "calls_per_step": calls, "missing": self.clock.missing}


def profile_case(
    case: Case,
    *,
    ours: str,
    mesh: DeviceMesh,
    device: torch.device,
    rank: int,
    detail: Detail,
    num_rounds: int,
    num_steps: int,
) -> dict[str, Any]:
    """Per side: us per unit and step of each kind of hook, and of the rest; all ranks call this together.

    The rest is what a step takes beyond the bare model's step and the listed functions: hook dispatch in `nn.Module`
    and in autograd, slower modules and gradients, and the two ranks disturbing each other.
    """
    implementations: dict[SideName, str] = {"ours": ours.partition("-")[0], "native": "native", "bare": "bare"}
    with contextlib.ExitStack() as stack:
        if case.noop_collectives:
            stack.enter_context(noop_collectives(CallCounter()))
        # All functions go on their clocks before any model is wrapped.
        clocks = {name: stack.enter_context(hook_clock(_targets(implementations[name], detail))) for name in SIDES}
        visits = {
            name: _Visits(make_side(case, name=name, ours=ours, mesh=mesh, device=device, rank=rank), clocks[name])
            for name in SIDES
        }
        for visit in visits.values():
            for _ in range(NUM_WARMUP_STEPS):
                visit.side.step()
        for index in range(num_rounds):
            for name in TURNS[index % len(TURNS)]:
                visits[name].run(num_steps=num_steps, device=device)
    scale = 1e6 / num_steps / case.num_units
    sharded = {name: visits[name].summary(visits["bare"], scale=scale) for name in SIDES if name != "bare"}
    return {"num_steps": num_steps * num_rounds, "num_units": case.num_units, **sharded}


def _targets(implementation: str, detail: Detail) -> tuple[tuple[str, str], ...]:
    return HOOKS.get(implementation, ()) + (STAGES.get(implementation, ()) if detail == "stages" else ())


def _run_steps(side: Side, *, num_steps: int, device: torch.device, clock: HookClock) -> KindTime:
    dist.barrier()
    side.step()
    synchronize(device)
    clock.take()  # the step that warms the caches does not count
    start, cpu_start = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        side.step()
    synchronize(device)
    return KindTime(num_steps, time.perf_counter() - start, time.thread_time() - cpu_start)


def _row(times: list[KindTime], *, scale: float) -> dict[str, float]:
    return {
        "us": median(spent.seconds for spent in times) * scale,
        "cpu_us": median(spent.cpu_seconds for spent in times) * scale,
    }
