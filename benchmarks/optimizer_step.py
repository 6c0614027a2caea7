"""Time of AdamW's step over shards: `hpcompat.optimizer_step` against native DTensors and against plain tensors.

    python benchmarks/optimizer_step.py                             # two ranks, 300 parameters, table
    python benchmarks/optimizer_step.py --json step.json --dtype bf16
    python benchmarks/optimizer_step.py --ours plain                # is the measurement fair? ours / plain must be 1.00

All three run the multi-tensor (foreach) kernels over shards of the same shapes, values and gradients, in the same
processes by turns. What is stepped and how the bits are compared is told in `paired/optimizers.py`. Nothing here judges
the numbers; README.md says how to read them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from paired.command import make_console, positive, run_workers, write_json
from paired.machine import describe_machine
from paired.optimizers import DTYPES, Settings, work
from paired.report import print_optimizer_report
from paired.sides import versions


def parse_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """The settings, and the file to write the result to."""
    parser = argparse.ArgumentParser(description="Time of AdamW's step over shards: ours, native, plain tensors.")
    parser.add_argument("--ours", choices=("hpcompat", "plain"), default="hpcompat", help="what to compare with")
    parser.add_argument("--parameters", type=positive, default=300, help="parameters of the decoder; default 300")
    parser.add_argument("--ranks", type=positive, default=2, help="processes; default 2")
    parser.add_argument("--threads", type=positive, default=1, help="threads of each process; default 1")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters, gradients and states")
    parser.add_argument("--repeats", type=positive, default=10, help="times that all is made anew; default 10")
    parser.add_argument("--rounds", type=positive, default=6, help="visits to each side in a repeat; default 6")
    parser.add_argument("--steps", type=positive, default=5, help="timed steps of a visit; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args(arguments)
    settings = Settings(
        ours=options.ours,
        num_parameters=options.parameters,
        num_ranks=options.ranks,
        num_threads=options.threads,
        dtype=options.dtype,
        num_repeats=options.repeats,
        num_rounds=options.rounds,
        num_steps=options.steps,
    )
    return settings, options.json


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write the file."""
    settings, json_path = parse_arguments(arguments)
    console = make_console()
    machine = describe_machine()
    measured = run_workers(
        work, settings, num_procs=settings.num_ranks, num_threads=settings.num_threads, console=console
    )
    machine["load_average_after"] = os.getloadavg()
    header = {"versions": versions(), "machine": machine, "settings": dataclasses.asdict(settings)}
    result = {**measured, **header}
    print_optimizer_report(console, result)
    write_json(json_path, result)


if __name__ == "__main__":
    main()
