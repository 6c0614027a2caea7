"""The values of a comparison that failed, as files."""

from __future__ import annotations

import pprint
from pathlib import Path

import numpy as np

from hpcompat_conformance.checks import CheckFailed


def write(failure: CheckFailed, *, folder: Path, rank: int) -> None:
    """``rank<N>.txt`` with the text; ``rank<N>.expected.npy`` and ``rank<N>.actual.npy`` if arrays were compared,
    ``.txt`` if something else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.txt").write_text(f"{failure}\n", encoding="utf-8")
    for role, value in failure.values.items():
        stem = f"rank{rank}.{role}"
        if isinstance(value, np.ndarray):
            np.save(folder / f"{stem}.npy", value)
        else:
            (folder / f"{stem}.txt").write_text(f"{pprint.pformat(value)}\n", encoding="utf-8")
