"""Scripts on several ranks, forked from one process that has torch imported: a run takes no longer than the script.

The ranks have the variables that torchrun sets. What launchers do is tested where a launcher starts the script.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HANG_SECONDS = 300
CONTEXT = multiprocessing.get_context("forkserver")
# Of the last, the main module of the process that asks, forked processes import what they do not have.
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.checkpoint.state_dict", "hpcompat_torch.backend", "pytest"]
)
LOCALHOST = "127.0.0.1"


def run(script: Path, *arguments: str, num_ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the ranks wrote to files in the folder, rank by rank, and the largest of their exit codes."""
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    environ = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [str(script), *arguments]
    files = [(folder / f"out-{rank}", folder / f"err-{rank}") for rank in range(num_ranks)]
    processes = [
        CONTEXT.Process(target=_be_rank, args=(environ, rank, command, *files[rank])) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    out, err = ("".join(path.read_text() for path in paths) for paths in zip(*files, strict=True))
    return subprocess.CompletedProcess(command, max(abs(process.exitcode or 0) for process in processes), out, err)


def _be_rank(environ: dict[str, str], rank: int, command: list[str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    torch.set_num_threads(1)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")
