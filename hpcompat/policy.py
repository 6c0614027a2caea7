"""Mixed precision and offload policies. Dtypes are the framework's own objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Mixed precision of one ``fully_shard`` call (FSDP2 ``MixedPrecisionPolicy``).

    Args:
        param_dtype: dtype of the gather, of the unsharded parameter and so of its gradient. ``None``: the original
            dtype. The sharded parameter and the optimizer keep the original dtype.
        reduce_dtype: dtype of the gradient reduction and, with gradient sync off, of the accumulation. ``None``: the
            gradient's own dtype.
        output_dtype: dtype that floating outputs of the module are cast to. ``None``: no cast.
        cast_forward_inputs: whether floating inputs of forward are cast to ``param_dtype``.
        apply_grad_on_fp32_main_grad: keep the reduced gradient in the reduce dtype on ``param.main_grad`` and leave
            ``param.grad`` at ``None``, for optimizers that read ``main_grad`` (an extension that FSDP2 lacks).
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False


@dataclass
class OffloadPolicy:
    """No offload; the base of the policies that do."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and so optimizer states in CPU memory (FSDP2 ``CPUOffloadPolicy``).

    Args:
        pin_memory: whether to pin that memory, which lets copies overlap with computation. Needs an accelerator.
    """

    pin_memory: bool = True
