"""What the scripts' command lines have in common: numbers as arguments, a console, worker processes, the file."""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console

from hpcompat_torch.distributed import destroy_process_group
from paired.machine import without_nan

WIDTH_OF_FILES = 130


class Outbox(Protocol):
    """Where rank 0 puts messages for the parent process: ("progress", text) and, last, ("result", dict)."""

    def put(self, message: tuple[str, Any], /) -> None: ...


def positive(text: str) -> int:
    """The type of an argument of argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, but got {text}")
    return number


def make_console() -> Console:
    """Wide enough for the tables where the output goes to a file."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    return console


def run_workers(
    work: Callable[..., None], settings: Any, *, num_procs: int, num_threads: int, console: Console
) -> dict[str, Any]:
    """Run `work(rank, settings, store_path, outbox)` in processes, to their end, and return rank 0's result.

    A failure of one is raised here with its traceback.
    """
    # Read by the workers when they import torch, and when gloo looks for an interface: all ranks are on this machine.
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    outbox: Any = multiprocessing.get_context("spawn").Queue()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        arguments = (settings, str(Path(folder, "store")), outbox)
        workers = multiprocessing.spawn(work, args=arguments, nprocs=num_procs, join=False)
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


@contextmanager
def process_group(device: torch.device, *, rank: int, num_procs: int, store_path: str) -> Iterator[None]:
    """A worker's default process group."""
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=num_procs,
    )
    try:
        yield
    finally:
        destroy_process_group()


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(without_nan(result), indent=2, allow_nan=False) + "\n")
