"""Tensors as bits."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(value: Tensor) -> Tensor:
    """The tensor as integers of its own width, flat, so that NaNs and signed zeros compare by their bits."""
    return value.contiguous().reshape(-1).view(INTEGERS[value.element_size()])
