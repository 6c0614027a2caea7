"""One rank of the benchmark of the optimizer's step: three sides that step the same shards by turns.

Gradients come from one backward, so that parameters and gradients are the objects that each implementation makes. Their
values are replaced before every round, on all sides by the same new ones, so that what is stepped does not depend on
that backward, and after the last round all sides must hold the same bits.

Where in memory tensors happen to lie makes one copy some percent faster than another, for as long as the two live. So
the sides are made anew several times, in another order each time, and intervals are a bootstrap over these repeats.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import hpcompat
from paired.cases import Case, DecoderBlock
from paired.command import Outbox, process_group
from paired.rounds import Rounds, bootstrap_interval, without_collection
from paired.sides import shard
from paired.timing import slowest

SideName = Literal["plain", "native", "ours"]
SIDES: tuple[SideName, ...] = ("plain", "native", "ours")
TURNS = tuple(itertools.permutations(SIDES))
"""Each comes first, second and last equally often, and each follows each other equally often."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {4: torch.int32, 2: torch.int16}
WIDTH = 64
PARAMETERS_OF_BLOCK, PARAMETERS_OF_ROOT = 9, 4
NUM_WARMUP_ROUNDS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    ours: str
    num_parameters: int
    num_ranks: int
    num_threads: int
    dtype: str
    num_repeats: int
    num_rounds: int
    num_steps: int


@dataclass
class Side:
    """The parameters of one side, and the times of its steps on this rank."""

    name: SideName
    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    step: Callable[[], Any]
    wall: Rounds = field(default_factory=list)
    cpu: Rounds = field(default_factory=list)
    num_steps: int = 0

    def visit(self, *, num_steps: int) -> None:
        """One untimed step and `num_steps` timed ones, whose times make a round."""
        dist.barrier()
        with without_collection():
            self.step()
            times = [self._timed_step() for _ in range(num_steps)]
        self.wall.append([wall for wall, _ in times])
        self.cpu.append([cpu for _, cpu in times])
        self.num_steps += 1 + num_steps

    def _timed_step(self) -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.thread_time()
        self.step()
        return time.perf_counter() - start, time.thread_time() - cpu_start

    def tensors(self) -> dict[str, list[Tensor]]:
        """What a step changes, as local tensors: the parameters, and the states by name."""
        found = {"parameter": [local(parameter) for parameter in self.parameters]}
        for key in self.optimizer.state[self.parameters[0]]:
            found[key] = [local(self.optimizer.state[parameter][key]) for parameter in self.parameters]
        return found


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def work(rank: int, settings: Settings, store_path: str, outbox: Outbox) -> None:
    """Entry point of a spawned process."""
    warnings.filterwarnings("ignore", message=".*keeps its states in", category=UserWarning)
    torch.set_num_threads(settings.num_threads)
    with process_group(CPU, rank=rank, num_procs=settings.num_ranks, store_path=store_path):
        mesh = init_device_mesh("cpu", (settings.num_ranks,))
        generator = random.Random(0)
        repeats = []
        for index in range(settings.num_repeats):
            if rank == 0:
                outbox.put(("progress", f"repeat {index + 1} of {settings.num_repeats}"))
            repeats.append(_repeat(settings, mesh=mesh, rank=rank, generator=generator))
        if rank == 0:
            outbox.put(("result", _summary(repeats)))


@dataclass(frozen=True)
class Repeat:
    """What was found on sides that were then dropped: rounds by side, and how the bits compared."""

    wall: dict[SideName, Rounds]
    cpu: dict[SideName, Rounds]
    comparison: dict[str, Any]


def _repeat(settings: Settings, *, mesh: DeviceMesh, rank: int, generator: random.Random) -> Repeat:
    sides = make_sides(settings, mesh=mesh, rank=rank, order=generator.choice(TURNS))
    refill_gradients(sides, seed=rank)
    before = [local(parameter).clone() for parameter in sides[0].parameters]
    run_rounds(sides, settings, rank=rank, turns=_turns(settings.num_rounds, generator=generator))
    return Repeat(
        wall={side.name: slowest(side.wall, device=CPU) for side in sides},
        cpu={side.name: slowest(side.cpu, device=CPU) for side in sides},
        comparison=_comparison(sides, before),
    )


# The sides


def make_sides(settings: Settings, *, mesh: DeviceMesh, rank: int, order: Sequence[SideName]) -> list[Side]:
    """The three, as `SIDES` has them, made in another order; with gradients, and equal bits in the parameters."""
    made = {name: _make_side(name, settings, mesh=mesh, rank=rank) for name in order}
    return [made[name] for name in SIDES]


def _make_side(name: SideName, settings: Settings, *, mesh: DeviceMesh, rank: int) -> Side:
    kind = settings.ours if name == "ours" else name
    if kind == "plain":
        parameters = _plain_copies(_sharded_parameters("native", settings, mesh=mesh, rank=rank))
    else:
        parameters = _sharded_parameters(kind, settings, mesh=mesh, rank=rank)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
    step = partial(hpcompat.optimizer_step, optimizer) if kind == "hpcompat" else optimizer.step
    return Side(name, parameters, optimizer, step)


def _sharded_parameters(implementation: str, settings: Settings, *, mesh: DeviceMesh, rank: int) -> list[Tensor]:
    """The first `num_parameters` of a sharded decoder that has at least as many."""
    num_blocks = max(1, math.ceil((settings.num_parameters - PARAMETERS_OF_ROOT) / PARAMETERS_OF_BLOCK))
    case = Case(
        name="decoder",
        block=DecoderBlock,
        num_blocks=num_blocks,
        width=WIDTH,
        batch_size=1,
        seq_len=8,
        num_outputs=WIDTH,
        group="optimizer",
        num_rounds=settings.num_rounds,
    )
    dtype = DTYPES[settings.dtype]
    model = case.make_model(CPU).to(dtype)
    shard(model, implementation=implementation, mesh=mesh)
    model(case.make_input(CPU, rank=rank).to(dtype)).square().mean().backward()
    return list(model.parameters())[: settings.num_parameters]


def _plain_copies(sharded: list[Tensor]) -> list[Tensor]:
    copies: list[Tensor] = []
    for parameter in sharded:
        copy = nn.Parameter(local(parameter).clone())
        copy.grad = local(_gradient(parameter)).clone()
        copies.append(copy)
    return copies


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"expected every parameter to have a gradient, but got none for {tuple(parameter.shape)}")
    return parameter.grad


@torch.no_grad()
def refill_gradients(sides: Sequence[Side], *, seed: int) -> None:
    """The same random values into the local gradients of all sides."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*(side.parameters for side in sides), strict=True):
        gradients = [local(_gradient(parameter)) for parameter in parameters]
        values = 1e-2 * torch.randn(gradients[0].shape, generator=generator)
        for gradient in gradients:
            gradient.copy_(values)


# Rounds


def run_rounds(sides: Sequence[Side], settings: Settings, *, rank: int, turns: Sequence[tuple[SideName, ...]]) -> None:
    """Fill the sides' times on this rank; all ranks call this together."""
    by_name = {side.name: side for side in sides}
    for name in turns[0] * NUM_WARMUP_ROUNDS:
        by_name[name].visit(num_steps=0)
    for side in sides:
        side.wall.clear()
        side.cpu.clear()
    gc.collect()
    gc.freeze()
    for index, names in enumerate(turns):
        refill_gradients(sides, seed=(index + 1) * settings.num_ranks + rank)
        for name in names:
            by_name[name].visit(num_steps=settings.num_steps)
    gc.unfreeze()


def _turns(num_rounds: int, *, generator: random.Random) -> list[tuple[SideName, ...]]:
    """An order for every round, all orders equally often, shuffled: a machine may have rhythms of its own."""
    turns: list[tuple[SideName, ...]] = []
    while len(turns) < num_rounds:
        turns += generator.sample(TURNS, k=len(TURNS))
    return turns[:num_rounds]


# Results


def _summary(repeats: Sequence[Repeat]) -> dict[str, Any]:
    first = repeats[0].comparison
    # From here on a "round" is all steps of a repeat.
    wall, cpu = (
        {name: [list(itertools.chain(*rounds[name])) for rounds in found] for name in SIDES}
        for found in ([repeat.wall for repeat in repeats], [repeat.cpu for repeat in repeats])
    )
    differing = {
        side: {key: sum(repeat.comparison["differing_elements"][side][key] for repeat in repeats) for key in counts}
        for side, counts in first["differing_elements"].items()
    }
    return {
        **_times(wall, cpu),
        **first,
        "num_elements_moved": min(repeat.comparison["num_elements_moved"] for repeat in repeats),
        "differing_elements": differing,
        "bits_equal": not any(count for counts in differing.values() for count in counts.values()),
        "num_timed_steps": sum(map(len, wall["ours"])),
    }


def _times(wall: dict[SideName, Rounds], cpu: dict[SideName, Rounds]) -> dict[str, Any]:
    result: dict[str, Any] = {f"{name}_ms": _typical(rounds) * 1e3 for name, rounds in wall.items()}
    # Of each repeat the cheapest step, then the median: memory favours a side in one repeat and not in the next.
    cheapest = {name: median(map(min, rounds)) * 1e3 for name, rounds in cpu.items()}
    result["cpu_ms"] = cheapest
    for one, other in (("ours", "plain"), ("ours", "native"), ("native", "plain")):
        result[f"{one}_over_{other}"] = _ratio(wall[one], wall[other])
        result[f"{one}_over_{other}_interval"] = _ratio_interval(wall[one], wall[other])
        result[f"{one}_over_{other}_cpu"] = cheapest[one] / cheapest[other]
    return result


def _typical(rounds: Rounds) -> float:
    return median(itertools.chain(*rounds))


def _ratio(one: Rounds, other: Rounds) -> float:
    return _typical(one) / _typical(other)


def _ratio_interval(one: Rounds, other: Rounds) -> tuple[float, float]:
    def resampled(picked: list[int]) -> float:
        return _ratio([one[i] for i in picked], [other[i] for i in picked])

    return bootstrap_interval(resampled, num_rounds=len(one))


def _comparison(sides: Sequence[Side], before: Sequence[Tensor]) -> dict[str, Any]:
    """How many elements differ in their bits from those of plain tensors, over all ranks."""
    plain, *others = sides
    expected = plain.tensors()
    differing = {
        side.name: {key: _sum_over_ranks(num_differing(expected[key], found)) for key, found in side.tensors().items()}
        for side in others
    }
    return {
        "differing_elements": differing,
        "num_parameters": len(plain.parameters),
        "num_elements": _sum_over_ranks(sum(tensor.numel() for tensor in before)),
        "num_elements_moved": _sum_over_ranks(num_differing(before, expected["parameter"])),
        "num_steps": {side.name: side.num_steps for side in sides},
    }


def num_differing(expected: Sequence[Tensor], found: Sequence[Tensor]) -> int:
    """The elements of two lists of tensors whose bits are not the same."""
    pairs = zip(expected, found, strict=True)
    return sum(int((_bits(one) != _bits(other)).sum()) for one, other in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def _sum_over_ranks(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)
