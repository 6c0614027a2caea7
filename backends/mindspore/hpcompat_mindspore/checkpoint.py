"""Tensors in safetensors files, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from mindspore import Tensor


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """One file with all of ``tensors``, which are plain ones; they are in memory at the same time.

    Raises:
        OSError: the file cannot be written.
        ModuleNotFoundError: safetensors is not installed.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    # The arrays of low-precision tensors have dtypes that numpy and safetensors.numpy do not know: only bits pass.
    arrays = {name: (tensor, np.ascontiguousarray(tensor.asnumpy())) for name, tensor in tensors}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).lower(),
            shape=tuple(tensor.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, (tensor, array) in arrays.items()
    }
    try:
        serialize_file(specs, path)
    except SafetensorError as error:
        raise OSError(f"expected to write {str(path)!r}, but got: {error}") from error
