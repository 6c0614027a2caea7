"""One rank of the benchmark: times the cases, then measures memory, then profiles; rank 0 writes what it finds.

    hpcompat launch -n RANKS --backend mindspore -m on_mindspore.worker SETTINGS RESULT

is what `mindspore_step_time.py` starts. Rank 0 prints lines of progress.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

import hpcompat
from on_mindspore.cases import CASES, Case
from on_mindspore.lanes import ADDITIONS, Lane, Sample, make_lanes, run_rounds
from on_mindspore.memory import measure_bytes
from on_mindspore.mpi import Call
from on_mindspore.profile import profile_case
from on_mindspore.rows import Rounds, Row
from on_mindspore.settings import Settings
from paired.hooks import hook_clock


def main(settings: Settings, result_path: Path) -> None:
    hpcompat.init_process_group(backend="mindspore", device="cpu")
    hpcompat.enable_mindspore_backward_compat()
    cases = {name: _measure(CASES[name], settings) for name in settings.case_names}
    if hpcompat.get_rank() == 0:
        result_path.write_text(json.dumps({"cases": cases}))
    hpcompat.barrier()
    hpcompat.destroy_process_group()


def _measure(case: Case, settings: Settings) -> dict[str, Any]:
    row = _time(case, settings)
    if settings.memory:
        _progress(f"memory of {case.name}")
        row |= measure_bytes(case)
    if settings.profile:
        _progress(f"profile of {case.name}")
        row["profile"] = profile_case(case, num_rounds=settings.num_rounds, num_steps=settings.num_steps)
    return row


def _time(case: Case, settings: Settings) -> dict[str, Any]:
    num_rounds = settings.num_rounds or case.num_rounds
    with hook_clock(ADDITIONS) as additions:
        lanes = make_lanes(case, additions=additions)
        losses = [lanes[name].step() for name in ("sharded", "bare")]
        calls, replayed = run_rounds(
            lanes,
            num_rounds=num_rounds,
            num_steps=settings.num_steps,
            report=lambda index: _progress(f"timing {case.name}: round {index} of {num_rounds}"),
        )
    row = Row({name: _of_all_ranks(lane) for name, lane in lanes.items()}, num_units=case.num_units)
    return {
        **row.summary(),
        **_describe_calls(calls, replayed),
        "losses_equal": losses[0].tobytes() == losses[1].tobytes(),
        "num_units": case.num_units,
        "num_timed_steps": num_rounds * settings.num_steps,
    }


def _of_all_ranks(lane: Lane) -> Rounds:
    everyone: list[list[list[Sample]]] = MPI.COMM_WORLD.allgather(lane.rounds)
    return [[tuple(step) for step in zip(*visits, strict=True)] for visits in zip(*everyone, strict=True)]


def _describe_calls(calls: Sequence[Call], replayed: Counter[str]) -> dict[str, Any]:
    received = Counter[str]()
    for call in calls:
        received[call.kind] += call.num_received
    return {
        "calls_per_step": dict(Counter(call.kind for call in calls)),
        "replayed_calls_per_step": dict(replayed),
        "bytes_received_per_step": {kind: num for kind, num in received.items() if num},
    }


def _progress(text: str) -> None:
    if hpcompat.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])), Path(sys.argv[2]))
