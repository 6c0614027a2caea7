"""The profile of a case: microseconds per unit and step in each part of our own code, without communication.

The table names the functions on the clock; to look closer, add rows. `paired/hooks.py` tells how time is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import hpcompat
from on_mindspore.cases import Case
from on_mindspore.lanes import make_step, shard
from on_mindspore.mpi import LoopbackComm, talking_through, world_comm
from paired.hooks import HookClock, KindTime, hook_clock
from paired.rounds import without_collection

_BACKEND = "hpcompat_mindspore"
_TENSORS = f"{_BACKEND}.group:GroupTensors"

PARTS: tuple[tuple[str, str], ...] = (
    ("pre-forward", "hpcompat.core.around:AroundForward.before"),
    ("post-forward", "hpcompat.core.around:AroundForward.after"),
    ("pre-backward", "hpcompat.core.unit:Unit.pre_backward"),
    ("post-backward", "hpcompat.core.param_group:ParamGroup.post_backward"),
    ("final callback", "hpcompat.core.iteration:Iteration.final_callback"),
    ("issue gather", f"{_TENSORS}.all_gather"),
    ("copy out", f"{_TENSORS}.copy_out"),
    ("show whole", f"{_TENSORS}.to_unsharded"),
    ("show shard", f"{_TENSORS}.to_sharded"),
    ("empty queue", f"{_BACKEND}.group:_empty_queue"),
    ("capture gradient", f"{_BACKEND}.gradients:_capture"),
    ("settle gradient", f"{_BACKEND}.gradients:_settle"),
    ("take gradients", f"{_TENSORS}.take_gradients"),
    ("issue reduction", f"{_TENSORS}.start_reduce"),
    ("complete reduction", f"{_BACKEND}.reduction:ReductionInFlight.complete"),
    ("additions", f"{_BACKEND}.mpi:MPICommunicator.add_up"),
    ("forget shapes", f"{_BACKEND}.autograd:forget_shapes"),
    ("instead of MPI", "on_mindspore.mpi:LoopbackComm.Iallgather"),
    ("instead of MPI", "on_mindspore.mpi:LoopbackComm.Ialltoall"),
)
"""(kind, "module:qualified name"). Time counts for the innermost function that is listed."""

NUM_ROUNDS = 8


def profile_case(case: Case, *, num_rounds: int | None, num_steps: int) -> dict[str, Any]:
    """us per unit and step of each part, and of the rest; all ranks call this together.

    The rest is what a step takes beyond the bare model's and the listed functions: hook dispatch in `nn.Cell` and
    autograd, and slower operators.
    """
    batch = case.make_input(rank=hpcompat.get_rank())
    bare_step = make_step(case.make_model(), batch)
    with hook_clock(PARTS) as clock, talking_through(LoopbackComm(world_comm())):
        sharded_step = make_step(shard(case.make_model()), batch)
        kinds: list[dict[str, KindTime]] = []
        steps: dict[str, list[KindTime]] = {"sharded": [], "bare": []}
        for _ in range(num_rounds or NUM_ROUNDS):
            steps["sharded"].append(_run(sharded_step, num_steps=num_steps, clock=clock))
            kinds.append(clock.take())
            steps["bare"].append(_run(bare_step, num_steps=num_steps, clock=clock))
    scale = 1e6 / num_steps / case.num_units
    rows = {kind: _row([visit[kind] for visit in kinds], scale=scale) for kind in clock.kinds}
    sharded, bare = (_row(spent, scale=scale) for spent in steps.values())
    added = {unit: sharded[unit] - bare[unit] for unit in ("us", "cpu_us")}
    rest = {unit: added[unit] - sum(row[unit] for row in rows.values()) for unit in added}
    return {"num_units": case.num_units, "kinds": rows, "rest": rest, "added": added, "missing": clock.missing}


def _run(step: Callable[[], Any], *, num_steps: int, clock: HookClock) -> KindTime:
    with without_collection():
        step()
        clock.take()  # the step that warms the caches does not count
        start, cpu_start = time.perf_counter(), time.thread_time()
        for _ in range(num_steps):
            step()
        return KindTime(num_steps, time.perf_counter() - start, time.thread_time() - cpu_start)


def _row(times: list[KindTime], *, scale: float) -> dict[str, float]:
    return {
        "us": median(spent.seconds for spent in times) * scale,
        "cpu_us": min(spent.cpu_seconds for spent in times) * scale,
        "calls": times[-1].num_calls * scale / 1e6,
    }
