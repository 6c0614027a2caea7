"""Files of tensors, as :mod:`hpcompat.record` asks a backend for them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol


class Checkpoint(Protocol):
    """What the room ``checkpoint.py`` of each backend gives."""

    def write_tensors(self, path: Path, tensors: Iterable[tuple[str, Any]]) -> None:
        """One safetensors file with all of ``tensors``, which are plain ones.

        Raises:
            OSError: the file cannot be written.
        """
        ...
