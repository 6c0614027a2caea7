"""What the ranks run: the operations of optimizer steps, one at a time."""

from __future__ import annotations

from fractions import Fraction
from unittest import mock

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from hpcompat_mindspore import arithmetic, optim, optimizer
from hpcompat_mindspore.arithmetic import fused_multiply_add
from hpcompat_mindspore.tensors import numpy_dtype
from ms_layouts import bits


def tiny_gradient_moves_nothing() -> None:
    """A bfloat16 weight with a gradient of -1.56e-8, step 1: the update is under half a unit of its binade."""
    dtype = numpy_dtype(mindspore.bfloat16)
    weights = np.arange(0x3C80, 0x3D00, dtype=np.uint16)
    parameter = Parameter(Tensor.from_numpy(weights.copy().view(dtype)), name="lm_head.weight")
    parameter._grad = Tensor.from_numpy(np.full(weights.shape, -1.56e-8, np.float32).astype(dtype))
    optim.AdamW([parameter], lr=1e-4, weight_decay=0.0).step()
    assert np.array_equal(bits(parameter), weights)
    # Not because nothing happens: twice the rate is over half a unit.
    parameter._grad = Tensor.from_numpy(np.full(weights.shape, -1.56e-8, np.float32).astype(dtype))
    optim.AdamW([parameter], lr=2e-4, weight_decay=0.0).step()
    assert np.array_equal(bits(parameter), weights + 1)


def multiply_add_is_rounded_once() -> None:
    """Against exact fractions, with sums that float64 rounds to the middle of two float32 numbers."""
    rng = np.random.default_rng(0)
    left, right, addend = (
        (rng.integers(1 << 23, 1 << 24, 3000) * 2.0 ** rng.integers(-45, 1, 3000)).astype(np.float32) for _ in range(3)
    )
    half_unit = np.float32(2.0**-24)
    left[:4] = np.float32(1 + 2.0**-20) * half_unit
    right[:4] = [1 - 2.0**-20, 1 + 2.0**-20, -(1 - 2.0**-20), -(1 + 2.0**-20)]
    addend[:4] = 1 + 2.0**-23
    left[4:1000] *= np.float32(2.0**-80)  # denormal results
    right[4:1000] *= np.float32(2.0**-80)
    addend[4:1000] *= np.float32(2.0**-149)
    actual = fused_multiply_add(left, right, addend)
    naive = (left.astype(np.float64) * right + addend).astype(np.float32)
    assert np.count_nonzero(actual != naive) >= 2
    for a, b, c, result in zip(left.tolist(), right.tolist(), addend.tolist(), actual, strict=True):
        assert result == _nearest(Fraction(a) * Fraction(b) + Fraction(c)), (a, b, c)


def _nearest(exact: Fraction) -> np.float32:
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(end)) for end in (-np.inf, np.inf)]
    return min((guess, *around), key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.uint32)) & 1))


def no_operations_of_mindspore() -> None:
    """Which take denormals for 0 where they run on MindSpore's threads: which that are is not known beforehand."""
    refused = {name: mock.Mock(side_effect=AssertionError(name)) for name in ("astype", "copy", "__mul__", "__add__")}
    with mock.patch.multiple(Tensor, **refused):
        for dtype in (np.dtype(np.float32), numpy_dtype(mindspore.bfloat16)):
            tiny = np.full(70_001, 1e-39, np.float32).astype(dtype)
            parameter = Parameter(Tensor.from_numpy(tiny.copy()), name="weight")
            ours = optim.SGD([parameter], lr=1.0, momentum=0.5)
            parameter._grad = Tensor.from_numpy(tiny.copy())
            for expected in (1e-39, 1.5e-39):
                ours.step()
                ours.load_state_dict(ours.state_dict())
                buffer = ours.state[parameter]["momentum_buffer"].asnumpy().astype(np.float32)
                np.testing.assert_allclose(buffer, expected, rtol=0.05)
            optim.clip_grad_norm_(parameter, 1.0)
            assert np.array_equal(bits(parameter._grad), bits(tiny))


def device_operations(kind: str, dtype: str) -> None:
    """Those for Ascend, run here: the same bits as on the host but for multiply-adds, which are rounded twice."""
    options = {"weight_decay": 0.1, **({"amsgrad": True} if kind == "Adam" else {"momentum": 0.9, "nesterov": True})}
    rng = np.random.default_rng(1)
    values = [rng.normal(size=64).astype(np.float32).astype(numpy_dtype(getattr(mindspore, dtype))) for _ in range(4)]
    sides = []
    for side in ("host", "device"):
        parameter = Parameter(Tensor.from_numpy(values[0].copy()), name="weight")
        ours = getattr(optim, kind)([parameter], lr=0.1, **options)
        address = parameter.data_ptr()
        chosen = arithmetic.HOST if side == "host" else arithmetic.DEVICE
        with (
            mock.patch.object(optimizer, "arithmetic", lambda chosen=chosen: chosen),
            mock.patch.object(arithmetic, "fused_multiply_add", lambda left, right, addend: left * right + addend),
        ):
            for value in values[1:]:
                parameter._grad = Tensor.from_numpy(value.copy())
                ours.step()
        assert parameter.data_ptr() == address
        sides.append([bits(parameter), *(bits(state) for state in ours.state[parameter].values())])
    for host, device in zip(*sides, strict=True):
        assert np.array_equal(host, device)
    assert not np.array_equal(sides[0][0], bits(values[0]))
