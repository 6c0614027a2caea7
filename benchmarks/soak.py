"""A long training of a small decoder: does anything grow from step to step?

    hpcompat launch -n 2 --backend torch benchmarks/soak.py --steps 1000
    hpcompat launch -n 2 --backend mindspore benchmarks/soak.py --steps 1000 --json soak.json

The decoder and the training step are those of `examples/train_decoder.py`. After a warm-up, in which caches fill,
handles, threads and live objects must stay the same in number and resident memory within an allowance: see README.md.
`--leak` plants a leak, to see that it is found; `--unsharded` shows what the framework keeps by itself. The exit code
is 1 if anything grew on any rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from rich.console import Console
from rich.table import Table

import hpcompat

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_decoder
from corpus import Corpus, standard_library_text
from framework import load_framework
from options import Options
from paired.machine import describe_machine

# Less than the smallest buffer of a unit here, a rank's half of a block: one kept in each step is found.
ALLOWED_BYTES_PER_STEP = 2048
# Allocators keep more for a while after the warm-up too, the less the longer it lasts.
ALLOWED_BYTES = 2 << 20
RESIDENT = "resident memory, KiB"
LEAK_BYTES = 1 << 16
WIDTH_OF_FILES = 100

Counts = dict[str, int]


# What is counted


def count(backend: str) -> tuple[Counts, Counter[str]]:
    """Of this process; and how many objects of each of hpcompat's classes are alive."""
    resident = resident_kib()  # first: the list of all objects takes some megabytes itself
    if backend == "torch":
        from hpcompat_torch.distributed import let_gloo_threads_rest

        let_gloo_threads_rest()  # a thread of gloo may still hold the last tensor
    gc.collect()
    objects = gc.get_objects()
    # By type(), not isinstance: weak proxies among the objects may be dead.
    ours = Counter(kind for kind in map(_name_of_type, objects) if kind.startswith("hpcompat"))
    tensor = tensor_class(backend)
    counts = {
        RESIDENT: resident,
        "file handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects of hpcompat": sum(ours.values()),
        "tensors": sum(issubclass(type(value), tensor) for value in objects),
        "all objects": len(objects),
        **count_transport(backend),
    }
    return counts, ours


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _name_of_type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def tensor_class(backend: str) -> type:
    if backend == "torch":
        import torch

        return torch.Tensor
    import mindspore

    return mindspore.Tensor


def count_transport(backend: str) -> Counts:
    if backend == "torch":
        import torch.distributed as dist

        return {"process groups": len(dist.distributed_c10d._world.pg_map)}
    from hpcompat_mindspore import job, mpi

    groups = job.groups()
    seconds = sum(getattr(group, "_second", None) is not None for group in groups)
    return {"communicators": len(groups) + seconds, "requests in flight": len(mpi._in_flight)}


# What may be planted

_kept: list[Any] = []
LEAKS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: np.ones(LEAK_BYTES, np.uint8).tobytes(),
    "object": lambda: hpcompat.MixedPrecisionPolicy(),
    "handle": lambda: os.dup(0),
    "thread": lambda: _start_thread(),
}


def _start_thread() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


# The run


def train(options: Options, arguments: argparse.Namespace) -> dict[int, tuple[Counts, Counter[str]]]:
    """What was counted after the first step, the warm-up and the last step."""
    framework = load_framework(options.backend)
    job = train_decoder.Job(options, framework, Corpus(standard_library_text(), seq_len=options.seq_len, seed=0))
    model = framework.build_model(options)
    step_model = step_unsharded if arguments.unsharded else train_decoder.train_step
    if not arguments.unsharded:
        train_decoder.shard_model(job, model)
    optimizer = hpcompat.optim.AdamW(hpcompat.parameters(model), lr=options.lr)
    looks = {}
    count(options.backend)  # what counting itself takes for good
    for step in range(1, arguments.steps + 1):
        step_model(job, model, optimizer, step=step)
        _kept.extend(LEAKS[leak]() for leak in arguments.leak)
        if step in (1, arguments.warm_up, arguments.steps):
            looks[step] = count(options.backend)
    return looks


def step_unsharded(job: train_decoder.Job, model: Any, optimizer: Any, *, step: int) -> None:
    hpcompat.zero_grad(optimizer)
    inputs, targets = train_decoder.load_batch(job, step)
    hpcompat.backward(job.framework.cross_entropy(model(inputs), targets))
    hpcompat.clip_grad_norm_(hpcompat.parameters(model), job.options.clip)
    hpcompat.optimizer_step(optimizer)


def judge(looks: dict[int, tuple[Counts, Counter[str]]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per quantity, of this rank; `allowed` is None where growth is only shown."""
    (first, _), (warm, warm_kinds), (last, last_kinds) = (
        looks[step] for step in (1, arguments.warm_up, arguments.steps)
    )
    num_steps = arguments.steps - arguments.warm_up
    allowed: dict[str, int | None] = dict.fromkeys(warm, 0)
    # MindSpore 2.10 keeps some native memory with every operator that it runs, in one process without sharding too.
    keeps_memory = hpcompat.get_backend_name() == "mindspore"
    allowed[RESIDENT] = None if keeps_memory else (ALLOWED_BYTES + num_steps * ALLOWED_BYTES_PER_STEP) // 1024
    allowed["all objects"] = None
    rows = []
    for name, limit in allowed.items():
        grown = last[name] - warm[name]
        row = {"quantity": name, "first": first[name], "warm": warm[name], "last": last[name], "allowed": limit}
        rows.append({**row, "grew": limit is not None and grown > limit})
    kinds = last_kinds - warm_kinds
    if kinds:
        rows[list(allowed).index("objects of hpcompat")]["kinds"] = dict(kinds)
    return rows


def of_all_ranks(value: int) -> list[int]:
    rank, size = hpcompat.get_rank(), hpcompat.get_world_size()
    return [int(hpcompat.all_reduce_scalar(value if other == rank else 0)) for other in range(size)]


def tabulate(rows: list[dict[str, Any]], arguments: argparse.Namespace, *, title: str) -> Table:
    table = Table(title=title)
    table.add_column("of each rank")
    for heading in ("step 1", f"step {arguments.warm_up}", f"step {arguments.steps}", "growth", "allowed", ""):
        table.add_column(heading, justify="right")
    for row in rows:
        growth = [last - warm for warm, last in zip(row["warm"], row["last"], strict=True)]
        cells = [" ".join(map(str, values)) for values in (row["first"], row["warm"], row["last"], growth)]
        limit = "-" if row["allowed"] is None else str(row["allowed"])
        table.add_row(row["quantity"], *cells, limit, "[bold red]GREW[/]" if row["grew"] else "")
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small decoder for long and see whether anything grows.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, help="steps before the first look; default: a fifth")
    parser.add_argument("--leak", choices=LEAKS, nargs="+", default=[], help="plant leaks in every step")
    parser.add_argument("--unsharded", action="store_true", help="each rank trains the whole model by itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    arguments = parser.parse_args()
    if arguments.warm_up is None:
        arguments.warm_up = arguments.steps // 5
    if not 1 < arguments.warm_up < arguments.steps:
        parser.error(f"expected 1 < --warm-up < --steps, but got {arguments.warm_up} and {arguments.steps}")
    return arguments


def main() -> NoReturn:
    arguments = parse()
    hpcompat.init_process_group()
    backend = hpcompat.get_backend_name()
    options = Options(backend=backend, layers=2, width=16, heads=2, kv_heads=1, seq_len=16, batch=2)
    machine = describe_machine()
    rows = judge(train(options, arguments), arguments)
    for row in rows:
        for key in ("first", "warm", "last", "grew"):
            row[key] = of_all_ranks(row[key])
        row["grew"] = any(row["grew"])
    num_ranks = hpcompat.get_world_size()
    if hpcompat.get_rank() == 0:
        kind = "an unsharded" if arguments.unsharded else "a"
        title = f"{arguments.steps} steps of {kind} decoder in {backend}, {num_ranks} ranks"
        console = Console()
        if not console.is_terminal or console.is_dumb_terminal:
            console.width = WIDTH_OF_FILES
        console.print(tabulate(rows, arguments, title=title))
        for row in rows:
            if "kinds" in row:
                console.print("more of:", row["kinds"])
        if arguments.json is not None:
            result = {"backend": backend, "num_ranks": num_ranks, "machine": machine, "steps": arguments.steps}
            result |= {"warm_up": arguments.warm_up, "rows": rows}
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    hpcompat.barrier()
    hpcompat.destroy_process_group()
    load_framework(backend).end_process(int(any(row["grew"] for row in rows)))


if __name__ == "__main__":
    main()
