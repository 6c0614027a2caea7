"""Time of a training step: ours against native FSDP2, interleaved in the same processes.

    python benchmarks/step_time.py                                  # all cases, table
    python benchmarks/step_time.py --json times.json --profile      # also where the host's time goes
    python benchmarks/step_time.py --ours native                    # is the measurement fair? ratios must be 1.00
    python benchmarks/step_time.py --device cuda                    # one process on one GPU

A step is forward, backward and zero_grad (`--optimizer` adds its step). How times are taken and compared is told in
`paired/timing.py`, the no-op collectives of `tiny24-host` in `paired/noop.py`, peak bytes in `paired/memory.py`, and
the functions that `--profile` looks at in `paired/hooks.py`. Nothing here judges the numbers; README.md says how to
read them.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from paired.cases import CASES
from paired.command import make_console, positive, run_workers, write_json
from paired.machine import describe_machine
from paired.report import print_report
from paired.sides import IMPLEMENTATIONS, OPTIMIZERS, versions
from paired.worker import Settings, work


def parse_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """The settings, and the file to write the result to."""
    parser = argparse.ArgumentParser(description="Step time of hpcompat against native FSDP2.")
    parser.add_argument("--ours", choices=IMPLEMENTATIONS, default="hpcompat", help="what to compare with native")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--procs", type=positive, help="processes; default 2, on cuda 1")
    parser.add_argument("--threads", type=positive, default=1, help="threads of each process; default 1")
    parser.add_argument("--rounds", type=positive, help="rounds of every case; default: each case's own number")
    parser.add_argument("--steps", type=positive, default=3, help="timed steps of a visit; default 3")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none", help="include the optimizer in the step")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak bytes")
    parser.add_argument(
        "--profile",
        nargs="?",
        const="hooks",
        choices=("hooks", "stages"),
        help="us per unit in each hook; stages: also in what the hooks call",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args(arguments)
    names = tuple(options.cases.split(","))
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"expected cases among {', '.join(CASES)}, but got {', '.join(unknown)}")
    settings = Settings(
        ours=options.ours,
        case_names=names,
        device=options.device,
        num_procs=options.procs or (2 if options.device == "cpu" else 1),
        num_threads=options.threads,
        num_rounds=options.rounds,
        num_steps=options.steps,
        optimizer=options.optimizer,
        memory=not options.no_memory,
        profile=options.profile,
    )
    return settings, options.json


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, write the file."""
    settings, json_path = parse_arguments(arguments)
    console = make_console()
    machine = describe_machine(torch.cuda.get_device_name() if settings.device == "cuda" else None)
    measured = run_workers(
        work, settings, num_procs=settings.num_procs, num_threads=settings.num_threads, console=console
    )
    header = {"versions": versions(), "machine": machine, "settings": dataclasses.asdict(settings)}
    result = {**header, **measured}
    print_report(console, result)
    write_json(json_path, result)


if __name__ == "__main__":
    main()
