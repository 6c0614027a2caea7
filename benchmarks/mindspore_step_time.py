"""Time of a training step of sharded MindSpore on the CPU, divided into model, MPI and our own code.

    python benchmarks/mindspore_step_time.py                                   # all cases, table
    python benchmarks/mindspore_step_time.py --json times.json --profile       # also where our own time goes
    python benchmarks/mindspore_step_time.py --cases large4 --ranks 4

A step is forward, backward and dropping the gradients. What takes turns is told in `on_mindspore/lanes.py`, how MPI is
put on the clock, left out and replayed in `on_mindspore/mpi.py`, peak bytes in `on_mindspore/memory.py`. Nothing here
judges the numbers; README.md says how to read them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from on_mindspore.cases import CASES
from on_mindspore.report import print_report
from on_mindspore.settings import Settings
from paired.machine import describe_machine, without_nan

WIDTH_OF_FILES = 130
PACKAGES = ("mindspore", "numpy", "mpi4py", "openmpi", "hpcompat")


def parse_arguments(arguments: list[str] | None = None) -> tuple[Settings, Path | None]:
    """The settings, and the file to write the result to."""
    parser = argparse.ArgumentParser(description="Step time of sharded MindSpore training on the CPU.")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated; default: %(default)s")
    parser.add_argument("--ranks", type=_positive, default=2, help="processes; default 2")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of each process; default 1")
    parser.add_argument("--rounds", type=_positive, help="rounds of every case; default: each case's own number")
    parser.add_argument("--steps", type=_positive, default=3, help="timed steps of a visit; default 3")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak bytes")
    parser.add_argument("--profile", action="store_true", help="us per unit in each part of our own code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    options = parser.parse_args(arguments)
    names = tuple(options.cases.split(","))
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"expected cases among {', '.join(CASES)}, but got {', '.join(unknown)}")
    if options.ranks < 2:
        parser.error(f"expected at least 2 ranks to communicate, but got --ranks {options.ranks}")
    settings = Settings(
        case_names=names,
        num_ranks=options.ranks,
        num_threads=options.threads,
        num_rounds=options.rounds,
        num_steps=options.steps,
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
    """Run the ranks to their end.

    Raises:
        RuntimeError: one of them failed; with everything they printed.
    """
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        path, errors = Path(folder, "result.json"), Path(folder, "errors")
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                launch_command(settings, path),
                env=environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                status.update(line.strip())
        if process.wait() != 0:
            raise RuntimeError(f"expected the ranks to end well, but got:\n{errors.read_text(errors='replace')}")
        result: dict[str, Any] = json.loads(path.read_text())
    return result


def launch_command(settings: Settings, result: Path) -> list[str]:
    """The ranks, started as any training script is."""
    command = [sys.executable, "-m", "hpcompat.cli", "launch", "-n", str(settings.num_ranks), "--backend", "mindspore"]
    return [*command, "-m", "on_mindspore.worker", json.dumps(dataclasses.asdict(settings)), str(result)]


def environment(settings: Settings) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(settings.num_threads)}


def versions() -> dict[str, str]:
    """Package -> version, for the packages that take part and are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, write the file."""
    settings, json_path = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    machine = describe_machine()
    measured = measure(settings, console=console)
    machine["load_average_after"] = os.getloadavg()
    result = {"versions": versions(), "machine": machine, "settings": dataclasses.asdict(settings), **measured}
    print_report(console, result)
    if json_path is not None:
        json_path.write_text(json.dumps(without_nan(result), indent=2, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
