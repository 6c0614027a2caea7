"""Byte-level text that every machine has: the sources of Python's own standard library.

Needs numpy only. The order is fixed (file names sorted, then one seeded permutation of windows per epoch), so a batch
depends on its index, the seed and the Python version, and on nothing else.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Corpus:
    """Text cut into windows of `seq_len + 1` bytes: all but the last are the inputs, all but the first the targets."""

    def __init__(self, text: bytes, *, seq_len: int, seed: int) -> None:
        num_windows = len(text) // (seq_len + 1)
        if num_windows == 0:
            raise ValueError(
                f"expected a text longer than seq_len={seq_len} bytes, but got {len(text)}; shorten seq_len"
            )
        usable = np.frombuffer(text, dtype=np.uint8)[: num_windows * (seq_len + 1)]
        self._windows = usable.reshape(num_windows, seq_len + 1)
        self._seed = seed

    def batch(self, index: int, *, batch_size: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """Batch number `index` of this rank, int64 of shape (batch_size, seq_len + 1).

        Within an epoch no two batches, of any index and any rank, share a window.
        """
        num_per_step = batch_size * world_size
        num_steps = len(self._windows) // num_per_step
        if num_steps == 0:
            raise ValueError(
                f"expected at most {len(self._windows)} windows in a batch over all ranks, but got {num_per_step}; "
                "reduce the batch size or the sequence length"
            )
        epoch, step = divmod(index, num_steps)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._windows))
        first = step * num_per_step + rank * batch_size
        return self._windows[order[first : first + batch_size]].astype(np.int64)


def standard_library_text() -> bytes:
    """The top-level modules of the running Python's standard library, about 5 MB, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    if not files:
        raise FileNotFoundError(f"expected the standard library's sources in {folder}, but got no .py file there")
    return b"\n".join(path.read_bytes() for path in files)
