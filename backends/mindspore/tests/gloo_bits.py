"""Writes ``gloo_bits.json``: what torch's gloo reductions give, bit for bit, for the inputs of :func:`values`.

    torchrun --nproc-per-node N backends/mindspore/tests/gloo_bits.py    (for N = 2, 3, 4)

The tests read the file, so that they need no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("gloo_bits.json")
SIZES = (1, 3, 17)
DTYPES = ("float32", "float16", "bfloat16")


def values(rank: int, size: int) -> np.ndarray[Any, Any]:
    """The float32 values that a rank adds, before they are rounded to the dtype."""
    return (np.random.default_rng([rank, size]).normal(size=size) * 3).astype(np.float32)


def main() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, list[list[int]]] = {}
    for size in SIZES:
        for name in DTYPES:
            dtype = getattr(torch, name)
            scattered = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(
                scattered, torch.tensor(values(rank, size * num_ranks)).to(dtype), op=dist.ReduceOp.AVG
            )
            reduced = torch.tensor(values(rank, size)).to(dtype)
            dist.all_reduce(reduced)
            for kind, tensor in (("reduce_scatter", scattered), ("all_reduce", reduced)):
                bits = tensor.view(torch.int32 if name == "float32" else torch.int16).tolist()
                everyone: list[Any] = [None] * num_ranks
                dist.all_gather_object(everyone, bits)
                found[f"{kind} {name} {size}"] = everyone
    if rank == 0:
        known = json.loads(PATH.read_text()) if PATH.exists() else {}
        known[str(num_ranks)] = found
        lines = [f'"{num}": {json.dumps(known[num])}' for num in sorted(known)]
        PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
