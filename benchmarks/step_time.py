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
import json
import os
import queue
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from rich.console import Console

from paired.cases import CASES
from paired.machine import describe_machine, without_nan
from paired.report import print_report
from paired.sides import IMPLEMENTATIONS, OPTIMIZERS, versions
from paired.worker import Settings, work

WIDTH_OF_FILES = 130


def parse_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """The settings, and the file to write the result to."""
    parser = argparse.ArgumentParser(description="Step time of hpcompat against native FSDP2.")
    parser.add_argument("--ours", choices=IMPLEMENTATIONS, default="hpcompat", help="what to compare with native")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--procs", type=_positive, help="processes; default 2, on cuda 1")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of each process; default 1")
    parser.add_argument("--rounds", type=_positive, help="rounds of every case; default: each case's own number")
    parser.add_argument("--steps", type=_positive, default=3, help="timed steps of a visit; default 3")
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, but got {text}")
    return number


def measure(settings: Settings, *, console: Console) -> dict[str, Any]:
    """Run the workers to their end; a failure of one is raised here with its traceback."""
    # Read by the workers when they import torch, and when gloo looks for an interface: all ranks are on this machine.
    os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    outbox: Any = multiprocessing.get_context("spawn").Queue()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        arguments = (settings, str(Path(folder, "store")), outbox)
        workers = multiprocessing.spawn(work, args=arguments, nprocs=settings.num_procs, join=False)
        finished = False
        while not finished:
            finished = workers.join(timeout=0.2)
            for kind, content in _drain(outbox):
                if kind == "result":
                    result = content
                else:
                    status.update(content)
    return result


def _drain(outbox: Any) -> list[tuple[str, Any]]:
    messages = []
    try:
        while True:
            messages.append(outbox.get_nowait())
    except queue.Empty:
        return messages


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, write the file."""
    settings, json_path = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    machine = describe_machine(torch.cuda.get_device_name() if settings.device == "cuda" else None)
    measured = measure(settings, console=console)
    header = {"versions": versions(), "machine": machine, "settings": dataclasses.asdict(settings)}
    result = {**header, **measured}
    print_report(console, result)
    if json_path is not None:
        json_path.write_text(json.dumps(without_nan(result), indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
