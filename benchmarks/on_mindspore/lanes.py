"""What takes turns on the clock. All lanes of a case live in the same processes, on every rank.

`bare`: the model without sharding, every rank on a batch of its own.
`sharded`: each block a unit and the rest of the model the root unit, its MPI calls on a clock of their own.
`host`: the same sharded model, its MPI calls replaced by copies in memory: what the host does, waiting for nobody.
`raw`: the MPI calls of the latest sharded step, made again without MindSpore.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hpcompat
from on_mindspore.cases import Case
from on_mindspore.mpi import (
    Call,
    ClockedComm,
    LoopbackComm,
    MpiClock,
    make_buffers,
    replay,
    talking_through,
    world_comm,
)
from paired.hooks import HookClock
from paired.rounds import without_collection

ADDITIONS = (("additions", "hpcompat_mindspore.mpi:MPICommunicator.add_up"),)
TURNS = (("sharded", "raw", "host", "bare"), ("host", "sharded", "raw", "bare"))
"""Orders of alternate rounds; a replay follows what it replays."""


class Sample(NamedTuple):
    """One step on one rank, in seconds. `cpu` is that of the thread that runs the step, `process_cpu` of all."""

    wall: float
    cpu: float
    process_cpu: float
    mpi: float = 0.0
    mpi_cpu: float = 0.0
    additions: float = 0.0

    @property
    def outside_mpi(self) -> float:
        return self.wall - self.mpi

    @property
    def cpu_outside_mpi(self) -> float:
        return self.cpu - self.mpi_cpu


@dataclass
class Lane:
    """A step, and its samples: `rounds[round][step]`."""

    step: Callable[[], Any]
    comm: Any = None
    clock: MpiClock = field(default_factory=MpiClock)
    additions: HookClock = field(default_factory=HookClock)
    rounds: list[list[Sample]] = field(default_factory=list)

    def visit(self, *, num_steps: int) -> None:
        """One untimed step and `num_steps` timed ones, whose samples make a round."""
        hpcompat.barrier()
        with without_collection(), talking_through(self.comm or world_comm()):
            self.step()
            self.rounds.append([self._timed_step() for _ in range(num_steps)])

    def _timed_step(self) -> Sample:
        self.clock.start()
        self.additions.take()
        clocks = (time.perf_counter, time.thread_time, time.process_time)
        starts = [clock() for clock in clocks]
        self.step()
        wall, cpu, process_cpu = (clock() - start for clock, start in zip(clocks, starts, strict=True))
        additions = sum(spent.seconds for spent in self.additions.take().values())
        return Sample(wall, cpu, process_cpu, self.clock.seconds, self.clock.cpu_seconds, additions)


def make_lanes(case: Case, *, additions: HookClock) -> dict[str, Lane]:
    """The lanes of a case by name; all ranks call this together."""
    rank = hpcompat.get_rank()
    batch, comm = case.make_input(rank=rank), world_comm()
    sharded_step = make_step(shard(case.make_model()), batch)
    clocks = {"sharded": MpiClock(), "host": MpiClock()}
    latest = clocks["sharded"]
    buffers = make_buffers()
    return {
        "bare": Lane(make_step(case.make_model(), batch)),
        "sharded": Lane(sharded_step, ClockedComm(comm, latest), latest, additions),
        "host": Lane(sharded_step, ClockedComm(LoopbackComm(comm), clocks["host"]), clocks["host"], additions),
        "raw": Lane(lambda: replay(latest.calls, comm, buffers)),
    }


def shard(model: Any) -> Any:
    """Each block a unit, the rest of the model the root unit; in place."""
    for block in model.blocks:
        hpcompat.fully_shard(block)
    return hpcompat.fully_shard(model)


def make_step(model: Any, batch: Any) -> Callable[[], Any]:
    """Forward, backward and dropping the gradients. The step returns the loss."""
    parameters = list(hpcompat.parameters(model))

    def step() -> Any:
        loss = (model(batch) ** 2).mean()
        hpcompat.backward(loss)
        for parameter in parameters:
            parameter.grad = None
        return hpcompat.to_numpy(loss)

    return step


def run_rounds(
    lanes: dict[str, Lane], *, num_rounds: int, num_steps: int, report: Callable[[int], None]
) -> tuple[list[Call], Counter[str]]:
    """Fill the lanes; all ranks call this together. Returns the calls of the latest step, and what was replayed."""
    for name in (*TURNS[0], *TURNS[1]):
        lanes[name].visit(num_steps=1)
    for lane in lanes.values():
        lane.rounds.clear()
    for index in range(num_rounds):
        for name in TURNS[index % len(TURNS)]:
            lanes[name].visit(num_steps=num_steps)
        report(index + 1)
    return lanes["sharded"].clock.calls, lanes["raw"].step()
