"""One rank of the benchmark: times the cases, then measures memory, then profiles; rank 0 sends what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paired.cases import CASES, Case
from paired.command import Outbox, process_group
from paired.memory import measure_peaks
from paired.profile import NUM_ROUNDS, Detail, profile_case
from paired.sides import SIDES, make_side
from paired.timing import Lane, Timings, run_rounds

OFFICIAL_MEMORY_CASE = "decoder6"


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    ours: str
    case_names: tuple[str, ...]
    device: str
    num_procs: int
    num_threads: int
    num_rounds: int | None
    num_steps: int
    optimizer: str
    memory: bool
    profile: Detail | None


def work(rank: int, settings: Settings, store_path: str, outbox: Outbox) -> None:
    """Entry point of a spawned process."""
    torch.set_num_threads(settings.num_threads)
    torch.set_flush_denormal(True)
    device = torch.device(settings.device, rank) if settings.device != "cpu" else torch.device("cpu")
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    with process_group(device, rank=rank, num_procs=settings.num_procs, store_path=store_path):
        mesh = init_device_mesh(device.type, (settings.num_procs,))
        result = _Run(settings, mesh=mesh, device=device, rank=rank, outbox=outbox).run()
        if rank == 0:
            outbox.put(("result", result))


class _Run:
    def __init__(
        self, settings: Settings, *, mesh: DeviceMesh, device: torch.device, rank: int, outbox: Outbox
    ) -> None:
        self.settings = settings
        self.cases = [CASES[name] for name in settings.case_names]
        self.device = device
        self.rank = rank
        self.outbox = outbox
        self.place = {"ours": settings.ours, "mesh": mesh, "device": device, "rank": rank}

    def run(self) -> dict[str, Any]:
        rows: dict[str, dict[str, Any]] = {}
        for group in dict.fromkeys(case.group for case in self.cases):
            rows |= self._time_group([case for case in self.cases if case.group == group])
        result: dict[str, Any] = {"cases": {case.name: rows[case.name] for case in self.cases}}
        if {"tiny24", "tiny96"} <= rows.keys():
            result["growth"] = {
                side: rows["tiny96"][f"{side}_ms"] / rows["tiny24"][f"{side}_ms"] for side in ("ours", "native")
            }
        if self.settings.memory:
            result |= self._measure_memory()
        if self.settings.profile is not None:
            result["profile"] = {case.name: self._profile(case) for case in self.cases}
        return result

    def _time_group(self, cases: list[Case]) -> dict[str, dict[str, Any]]:
        lanes = [
            Lane(case, name, make_side(case, name=name, optimizer=self.settings.optimizer, **self.place))
            for case in cases
            for name in SIDES
        ]
        equal_losses = {case.name: _losses_are_equal([lane for lane in lanes if lane.case is case]) for case in cases}
        num_rounds = self.settings.num_rounds or max(case.num_rounds for case in cases)
        names = ", ".join(case.name for case in cases)
        run_rounds(
            lanes,
            num_rounds=num_rounds,
            num_steps=self.settings.num_steps,
            device=self.device,
            report=lambda index: self._progress(f"timing {names}: round {index} of {num_rounds}"),
        )
        return {
            case.name: {
                **_row(case, [lane for lane in lanes if lane.case is case]),
                "losses_equal": equal_losses[case.name],
            }
            for case in cases
        }

    def _measure_memory(self) -> dict[str, Any]:
        peaks: dict[str, dict[str, dict[str, int]]] = {}
        for case in self.cases:
            # The host case is the model of its sibling, and 96 blocks hold the peak of 24.
            if case.name in ("tiny24", OFFICIAL_MEMORY_CASE) or len(self.cases) == 1:
                self._progress(f"memory of {case.name}")
                peaks[case.name] = measure_peaks(case, **self.place)
        if not peaks:
            return {}
        official = OFFICIAL_MEMORY_CASE if OFFICIAL_MEMORY_CASE in peaks else next(iter(peaks))
        unsharded = peaks[official]["unsharded"]
        return {
            "peak_unsharded_bytes": {side: unsharded[side] for side in ("ours", "native")},
            "memory": {"peak_unsharded_bytes_of": official, "peak_bytes": peaks},
        }

    def _profile(self, case: Case) -> dict[str, Any]:
        self._progress(f"profile of {case.name}")
        detail = self.settings.profile or "hooks"
        num_rounds = self.settings.num_rounds or NUM_ROUNDS
        return profile_case(case, **self.place, detail=detail, num_rounds=num_rounds, num_steps=self.settings.num_steps)

    def _progress(self, text: str) -> None:
        if self.rank == 0:
            self.outbox.put(("progress", text))


def _losses_are_equal(lanes: list[Lane]) -> bool:
    """Whether all sides compute the same thing, to the bit; asked before collectives are replaced."""
    losses = [lane.side.step() for lane in lanes]
    return all(torch.equal(loss, losses[0]) for loss in losses)


def _row(case: Case, lanes: list[Lane]) -> dict[str, Any]:
    sides = {lane.side_name: lane for lane in lanes}
    wall = Timings(**{name: lane.wall for name, lane in sides.items()})
    cpu = Timings(**{name: lane.cpu for name, lane in sides.items()}, typical=min)
    statistic: Callable[[Timings], float] = Timings.overhead_ratio if case.ratio_of_overhead else Timings.step_ratio
    times = {f"{name}_ms": wall.seconds(lane.wall) * 1e3 for name, lane in sides.items()}
    row: dict[str, Any] = {
        **times,
        "ratio": statistic(wall),
        "ratio_interval": wall.interval(statistic),
        "ratio_of": "overhead" if case.ratio_of_overhead else "step",
        "ratio_step": wall.step_ratio(),
        "ratio_overhead": wall.overhead_ratio(),
        "ratio_cpu": statistic(cpu),
        "ours_overhead_ms": times["ours_ms"] - times["bare_ms"],
        "native_overhead_ms": times["native_ms"] - times["bare_ms"],
        "cpu_ms": {name: cpu.seconds(lane.cpu) * 1e3 for name, lane in sides.items()},
        "num_units": case.num_units,
        "num_timed_steps": sum(len(visit) for visit in wall.ours),
    }
    if case.noop_collectives:
        row["noop_calls_per_step"] = {name: _calls_per_step(sides[name]) for name in ("ours", "native")}
    return row


def _calls_per_step(lane: Lane) -> dict[str, float]:
    return {
        "gathers": lane.counter.num_gathers / lane.num_steps,
        "reductions": lane.counter.num_reductions / lane.num_steps,
    }
