"""AdamW as torch's multi-tensor implementation computes it, in numpy: one rounding to the parameter's dtype after each
of its operations.

[Note: operations]
``mul, lerp, mul, addcmul, sqrt, div, add, addcdiv``, each computed in float32 from values of the dtype. A number that
whole lists of tensors are multiplied by, or that is added to them, has the dtype too: a decay of 0.999 is 1 in
bfloat16. ``lerp`` and ``addcmul`` end in one multiply-add, which rounds to float32 once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcompat_conformance.framework import Array


@dataclass
class AdamW:
    """The numbers of one parameter, all float32 arrays with values of ``dtype``, ``"float32"`` or ``"bfloat16"``."""

    value: Array
    dtype: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        self.exp_avg = np.zeros_like(self.value)
        self.exp_avg_sq = np.zeros_like(self.value)
        self.num_steps = 0

    def step(self, gradient: Array) -> None:
        """Update the value and the averages. [Note: operations]"""
        self.num_steps += 1
        first, second = self.betas
        value = self._times(self.value, 1 - self.lr * self.weight_decay)
        self.exp_avg = self._round(_multiply_add(1 - first, gradient - self.exp_avg, self.exp_avg))
        average = self._times(self.exp_avg_sq, second)
        scaled = np.float32(1 - second) * gradient
        self.exp_avg_sq = self._round(_multiply_add(scaled, gradient, average))
        correction = np.float32((1 - second**self.num_steps) ** 0.5)
        root = self._round(self._round(np.sqrt(self.exp_avg_sq)) / correction)
        divisor = self._round(root + self._number(self.eps))
        step_size = np.float32(-self.lr / (1 - first**self.num_steps))
        self.value = self._round(value + step_size * self.exp_avg / divisor)

    def _times(self, array: Array, number: float) -> Array:
        return self._round(array * self._number(number))

    def _number(self, number: float) -> Array:
        return self._round(np.array(number, dtype=np.float32))

    def _round(self, array: Array) -> Array:
        return bfloat16(array) if self.dtype == "bfloat16" else array


def wide_step(adamw: AdamW, gradient: Array) -> None:
    """The mistake to tell apart: compute all in float32 and round at the end. Not what torch does."""
    dtype, adamw.dtype = adamw.dtype, "float32"
    adamw.step(gradient)
    adamw.dtype = dtype
    if dtype == "bfloat16":
        adamw.value, adamw.exp_avg = bfloat16(adamw.value), bfloat16(adamw.exp_avg)
        adamw.exp_avg_sq = bfloat16(adamw.exp_avg_sq)


def bfloat16(array: Array) -> Array:
    """float32 values rounded to those of bfloat16, to even where they lie halfway."""
    bits = np.asarray(array, dtype=np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded


def _multiply_add(left: Array | float, right: Array, addend: Array) -> Array:
    """In float64 the product of two float32 numbers is exact, so hardly any sum is rounded twice in effect."""
    product = np.multiply(np.float32(left), right, dtype=np.float64)
    total: Array = (product + addend.astype(np.float64)).astype(np.float32)
    return total
