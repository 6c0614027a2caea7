"""The same weights and gradients, to the bit, for an optimizer of torch and for ours, and what both make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mindspore
import numpy as np
import torch
from mindspore import Parameter, Tensor

from hpcompat_mindspore import arithmetic
from hpcompat_mindspore.optimizer import Optimizer
from hpcompat_mindspore.tensors import numpy_dtype

Array = np.ndarray[Any, Any]

DTYPES = {
    "bfloat16": (torch.bfloat16, mindspore.bfloat16),
    "float16": (torch.float16, mindspore.float16),
    "float32": (torch.float32, mindspore.float32),
}
DECODER = [(97, 64), *[(64, 64)] * 4, (256, 64), (256, 64), (64, 256), (64,), (64,), (97, 64)]
ODD_ONES = [(8192,), (70001,), (), (1,), (5,), (33,), (63,), (3, 0), (3, 11, 7)]
SHAPES = [*DECODER, *ODD_ONES]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, kind: str) -> Array:
    """Random numbers of ``dtype`` as unsigned integers. Gradients are of all magnitudes that training meets, and of
    those that it should not: zeros, denormals, and now and then an infinity."""
    values = rng.standard_normal(shape) * (1.0 if kind == "gradient" else 0.02)
    if kind == "gradient":
        scale = rng.choice([1.0, 1e-3, 1e-8, 1e-8, 1e-20, 1e-39, 0.0], size=shape)
        values = np.where(rng.random(shape) < 2e-5, np.copysign(np.inf, values), values * scale)
    with np.errstate(all="ignore"):
        rounded = torch.tensor(np.asarray(values, np.float32)).to(DTYPES[dtype][0])
    return bits_of(rounded)


def bits_of(tensor: Any) -> Array:
    """Of a tensor of either framework, as unsigned integers."""
    if isinstance(tensor, torch.Tensor):
        integers = torch.int16 if tensor.element_size() == 2 else torch.int32
        array = tensor.detach().contiguous().view(integers).numpy()
    else:
        array = tensor.asnumpy()
    return array.view(f"u{array.itemsize}").copy()


def num_differing(left: Any, right: Any) -> int:
    """Elements whose bits differ. One NaN is as good as another: in 16 bits torch gives two kinds."""
    a, b = bits_of(left), bits_of(right)
    assert a.shape == b.shape, (a.shape, b.shape)
    return int(np.count_nonzero((a != b) & ~(_is_nan(left) & _is_nan(right))))


def _is_nan(tensor: Any) -> Array:
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().isnan().numpy()
    return np.isnan(tensor.asnumpy().astype(np.float32))


def torch_tensor(bits: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"i{bits.itemsize}").copy()).view(DTYPES[dtype][0])


def mindspore_tensor(bits: Array, dtype: str) -> Tensor:
    return Tensor.from_numpy(bits.copy().view(numpy_dtype(DTYPES[dtype][1])))


class TorchSide:
    """A torch optimizer over its own copies of the weights."""

    def __init__(self, weights: list[Array], dtype: str, make: Callable[[list[torch.Tensor]], Any]) -> None:
        self.dtype = dtype
        self.params = [torch.nn.Parameter(torch_tensor(bits, dtype)) for bits in weights]
        self.optimizer = make(self.params)

    def step(self, grads: list[Array], *, lr: float, absent: Sequence[int] = ()) -> None:
        for index, (param, bits) in enumerate(zip(self.params, grads, strict=True)):
            param.grad = None if index in absent else torch_tensor(bits, self.dtype)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


class OurSide:
    """An optimizer of ours."""

    def __init__(self, weights: list[Array], dtype: str, make: Callable[[list[Parameter]], Optimizer]) -> None:
        self.dtype = dtype
        self.params = [
            Parameter(mindspore_tensor(bits, dtype), name=f"weight{index}") for index, bits in enumerate(weights)
        ]
        self.optimizer = make(self.params)

    def step(self, grads: list[Array], *, lr: float, absent: Sequence[int] = ()) -> None:
        for index, (param, bits) in enumerate(zip(self.params, grads, strict=True)):
            param._grad = None if index in absent else mindspore_tensor(bits, self.dtype)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


def differences(ours: OurSide, theirs: TorchSide) -> dict[str, int]:
    """Number of differing elements, of the parameters and of each kind of state."""
    found: dict[str, int] = {"param": 0}
    for param, other in zip(ours.params, theirs.params, strict=True):
        found["param"] += num_differing(param, other)
        state, expected = ours.optimizer.state[param], theirs.optimizer.state[other]
        assert set(state) == set(expected)
        for name, value in expected.items():
            found[name] = found.get(name, 0) + num_differing(state[name], value)
    return found


def train(ours: Any, theirs: Any, *, dtype: str, shapes: list[tuple[int, ...]], num_steps: int, seed: int) -> None:
    """Both sides take the same steps, with a learning rate that changes."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        grads = [random_bits(rng, shape, dtype, kind="gradient") for shape in shapes]
        for side in (ours, theirs):
            side.step(grads, lr=1e-3 * (1.0 - step / (2 * num_steps)))


# torch's square root of float32


def correctly_rounded_sqrt(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Through float64, whose rounding to float32 no error of float64's can change for a square root."""
    return [tensor.double().sqrt().to(tensor.dtype) for tensor in tensors]


def torch_rounds_sqrt_correctly() -> bool:
    """Every mantissa with both parities of the exponent."""
    numbers = (np.arange(1 << 24, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    return bool(np.array_equal(torch.from_numpy(numbers).sqrt().numpy(), np.sqrt(numbers)))


@contextmanager
def torch_with_a_correct_sqrt() -> Iterator[None]:
    with mock.patch.object(torch, "_foreach_sqrt", correctly_rounded_sqrt):
        yield


@contextmanager
def ours_with_the_sqrt_of_torch() -> Iterator[None]:
    def sqrt(self: Any, x: Array) -> Array:
        return torch.from_numpy(x).sqrt().numpy()

    with mock.patch.object(arithmetic.HostOps, "sqrt", sqrt):
        yield
