"""Timing of several models by turns, in the processes that hold them all.

A machine's speed drifts by more than the differences looked for, so nothing is timed first and compared later. A round
visits every lane (one side of one case) once, the next round with ours and native swapped (A B bare, B A bare, ...); a
visit is a step that warms the caches, not timed, and a few timed ones. A step's time is that of its slowest rank.
Garbage collection runs between visits, never inside. Medians are over all timed steps; the interval of a ratio is a
bootstrap over the rounds.

Next to the time on the clock, the CPU time of the thread that runs the step is kept: of the cheapest step, since
whatever disturbs a thread only adds to it. On an idle machine both agree wherever nothing waits for another rank; on a
busy one only CPU time says something about the code.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from statistics import median

import torch
import torch.distributed as dist

from paired.cases import Case
from paired.noop import CallCounter, noop_collectives, sequence_number
from paired.rounds import Rounds, bootstrap_interval, without_collection
from paired.sides import TURNS, Side, SideName

NUM_WARMUP_ROUNDS = 2


@dataclass
class Lane:
    """One side of one case, and the times of its steps on this rank."""

    case: Case
    side_name: SideName
    side: Side
    wall: Rounds = field(default_factory=list)
    cpu: Rounds = field(default_factory=list)
    counter: CallCounter = field(default_factory=CallCounter)
    num_steps: int = 0

    def visit(self, *, num_steps: int, device: torch.device) -> None:
        """One untimed step and `num_steps` timed ones, whose times make a round."""
        context = noop_collectives(self.counter) if self.case.noop_collectives else contextlib.nullcontext()
        dist.barrier()
        before = sequence_number(dist.distributed_c10d._get_default_group())
        with without_collection(), context:
            self.side.step()
            times = [self._timed_step(device) for _ in range(num_steps)]
        self.wall.append([wall for wall, _ in times])
        self.cpu.append([cpu for _, cpu in times])
        self.num_steps += 1 + num_steps
        if self.case.noop_collectives:
            self._check_silence(before)

    def _timed_step(self, device: torch.device) -> tuple[float, float]:
        synchronize(device)
        start, cpu_start = time.perf_counter(), time.thread_time()
        self.side.step()
        if not self.case.noop_collectives:
            # Without communication the question is how long the host is busy, not the device.
            synchronize(device)
        return time.perf_counter() - start, time.thread_time() - cpu_start

    def _check_silence(self, sequence_before: int) -> None:
        num_real = sequence_number(dist.distributed_c10d._get_default_group()) - sequence_before
        if num_real:
            raise RuntimeError(
                f"{self.case.name} ({self.side_name}): expected no collective, but got {num_real} real ones"
            )
        if self.side_name != "bare" and dist.get_world_size() > 1 and not self.counter.num_gathers:
            raise RuntimeError(
                f"{self.case.name} ({self.side_name}): expected gathers through torch.distributed, got none"
            )


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; the CPU has none."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def run_rounds(
    lanes: Sequence[Lane], *, num_rounds: int, num_steps: int, device: torch.device, report: Callable[[int], None]
) -> None:
    """Fill the lanes' times, with the slowest rank's for every step; all ranks call this together."""
    case_names = list(dict.fromkeys(lane.case.name for lane in lanes))
    for _ in range(NUM_WARMUP_ROUNDS):
        for lane in lanes:
            lane.visit(num_steps=0, device=device)
    for lane in lanes:
        lane.wall.clear()
        lane.cpu.clear()
    gc.collect()
    gc.freeze()
    for index in range(num_rounds):
        turns = TURNS[index % len(TURNS)]
        for lane in sorted(lanes, key=lambda lane: (case_names.index(lane.case.name), turns.index(lane.side_name))):
            lane.visit(num_steps=num_steps, device=device)
        report(index + 1)
    gc.unfreeze()
    for lane in lanes:
        lane.wall = slowest(lane.wall, device=device)
        lane.cpu = slowest(lane.cpu, device=device)


def slowest(rounds: Rounds, *, device: torch.device) -> Rounds:
    """For every step the time of the rank that took longest; all ranks call this together."""
    longest = torch.tensor(rounds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()


@dataclass(frozen=True)
class Timings:
    """The rounds of the three sides of a case, and how to make one number of many steps."""

    ours: Rounds
    native: Rounds
    bare: Rounds
    typical: Callable[[Iterable[float]], float] = median

    def step_ratio(self) -> float:
        return self.seconds(self.ours) / self.seconds(self.native)

    def overhead_ratio(self) -> float:
        """How the two compare in what they add to the bare model's step; NaN if native adds nothing."""
        bare = self.seconds(self.bare)
        added = self.seconds(self.native) - bare
        return (self.seconds(self.ours) - bare) / added if added > 0 else nan

    def seconds(self, rounds: Rounds) -> float:
        """The typical step of a side."""
        return self.typical(step for visit in rounds for step in visit)

    def interval(self, statistic: Callable[[Timings], float]) -> tuple[float, float]:
        """5th and 95th percentile of a statistic over resampled rounds."""
        return bootstrap_interval(lambda picked: statistic(self._pick(picked)), num_rounds=len(self.ours))

    def _pick(self, picked: list[int]) -> Timings:
        return replace(
            self,
            ours=[self.ours[i] for i in picked],
            native=[self.native[i] for i in picked],
            bare=[self.bare[i] for i in picked],
        )
