"""One number of many steps on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from on_mindspore.lanes import Sample
from paired.rounds import bootstrap_interval

Step = tuple[Sample, ...]
"""A sample per rank."""

Rounds = list[list[Step]]
"""`rounds[round][step]`."""


@dataclass(frozen=True)
class Row:
    """The rounds of a case's lanes, and how to make one number of many steps on several ranks."""

    rounds: dict[str, Rounds]
    num_units: int

    def summary(self) -> dict[str, Any]:
        everything = list(range(len(self.rounds["bare"])))
        times = {f"{name}_ms": self.milliseconds(name, slowest_wall) for name in self.rounds}
        return {
            **times,
            "mpi_ms": self.milliseconds("sharded", lambda step: mean(sample.mpi for sample in step)),
            "mpi_share": self.typical("sharded", lambda step: mean(sample.mpi / sample.wall for sample in step)),
            "additions_ms": self.milliseconds("sharded", lambda step: mean(sample.additions for sample in step)),
            "overhead_ms_per_unit": self.overhead("sharded", everything),
            "overhead_interval": self.interval("sharded"),
            "host_overhead_ms_per_unit": self.overhead("host", everything),
            "host_overhead_interval": self.interval("host"),
            "cpu": {
                "bare_ms": self.least("bare") * 1e3,
                "bare_process_ms": min(self.each("bare", lambda step: max(sample.process_cpu for sample in step)))
                * 1e3,
                "overhead_ms_per_unit": (self.least("sharded") - self.least("bare")) * 1e3 / self.num_units,
                "host_overhead_ms_per_unit": (self.least("host") - self.least("bare")) * 1e3 / self.num_units,
            },
        }

    def overhead(self, name: str, picked: list[int]) -> float:
        """(step - MPI - bare) / units: what the step takes outside MPI and beyond the bare model."""
        added = self.typical(name, slowest_outside_mpi, picked) - self.typical("bare", slowest_wall, picked)
        return added * 1e3 / self.num_units

    def interval(self, name: str) -> tuple[float, float]:
        return bootstrap_interval(lambda picked: self.overhead(name, picked), num_rounds=len(self.rounds["bare"]))

    def milliseconds(self, name: str, statistic: Callable[[Step], float]) -> float:
        return self.typical(name, statistic) * 1e3

    def typical(self, name: str, statistic: Callable[[Step], float], picked: list[int] | None = None) -> float:
        """The median over the steps of ``picked`` rounds, or all."""
        return median(self.each(name, statistic, picked))

    def least(self, name: str) -> float:
        """CPU seconds outside MPI in the cheapest step."""
        return min(self.each(name, lambda step: max(sample.cpu_outside_mpi for sample in step)))

    def each(self, name: str, statistic: Callable[[Step], float], picked: list[int] | None = None) -> Iterator[float]:
        rounds = self.rounds[name]
        visits = rounds if picked is None else [rounds[index] for index in picked]
        return (statistic(step) for visit in visits for step in visit)


def slowest_wall(step: Step) -> float:
    return max(sample.wall for sample in step)


def slowest_outside_mpi(step: Step) -> float:
    return max(sample.outside_mpi for sample in step)
