"""Tensors in safetensors files, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """One file with all of ``tensors``, which are plain ones; they are in memory at the same time.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: safetensors is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors}, path)
    except SafetensorError as error:
        raise OSError(f"expected to write {str(path)!r}, but got: {error}") from error
