"""Dtypes by name."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore.common.dtype import Type


def dtype_name(dtype: Any) -> str:
    """``mindspore.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).lower()


def dtype_named(name: str) -> Any:
    """``"bfloat16"`` -> ``mindspore.bfloat16``. ValueError for anything that is not a dtype of MindSpore."""
    dtype = getattr(mindspore, name, None)
    if not isinstance(dtype, Type):
        raise ValueError(f"expected the name of a MindSpore dtype, but got {name!r}")
    return dtype
