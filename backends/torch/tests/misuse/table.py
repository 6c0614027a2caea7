"""All rows."""

from __future__ import annotations

import torch

from misuse import arguments, either, meshes, modules, replicated, settings, silent, training
from misuse.row import Misuse

_HAS_ACCELERATOR = torch.accelerator.is_available()

ROWS: list[Misuse] = [
    *either.ROWS,
    *meshes.ROWS,
    *modules.ROWS,
    *arguments.ROWS,
    *([] if _HAS_ACCELERATOR else [arguments.PINNED_ROW]),
    *settings.ROWS,
    *training.ROWS,
    *silent.ROWS,
    *replicated.ROWS,
]
BY_ID: dict[str, Misuse] = {row.id: row for row in ROWS}
