"""Optimizer steps of ours and of torch's multi-tensor optimizers, from the same bits: not one element may differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from both_optimizers import (
    DTYPES,
    SHAPES,
    OurSide,
    TorchSide,
    correctly_rounded_sqrt,
    differences,
    num_differing,
    ours_with_the_sqrt_of_torch,
    random_bits,
    torch_rounds_sqrt_correctly,
    torch_tensor,
    torch_with_a_correct_sqrt,
    train,
)
from hpcompat_mindspore import arithmetic, optim
from hpcompat_mindspore.tensors import numpy_dtype

NUM_STEPS = 20
ADAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW, strong decay": ("AdamW", {"weight_decay": 0.3}),
    "AdamW, amsgrad": ("AdamW", {"amsgrad": True}),
    "AdamW, maximize": ("AdamW", {"maximize": True}),
    "AdamW, other betas and eps": ("AdamW", {"betas": (0.3, 0.95), "eps": 1e-4}),
    "AdamW, no decay, eps 0": ("AdamW", {"weight_decay": 0.0, "eps": 0.0}),
    "Adam": ("Adam", {}),
    "Adam, decay": ("Adam", {"weight_decay": 0.02}),
    "Adam, everything": ("Adam", {"weight_decay": 0.02, "amsgrad": True, "maximize": True}),
    "Adam, decoupled decay": ("Adam", {"weight_decay": 0.02, "decoupled_weight_decay": True}),
}
SGDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD, decay": ("SGD", {"weight_decay": 0.02}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, dampening": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02}),
    "SGD, nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "SGD, nesterov and decay": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "SGD, maximize": ("SGD", {"momentum": 0.9, "maximize": True, "weight_decay": 0.02}),
}
ALL = {**ADAMS, **SGDS}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's bits of a 16-bit addition depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sides(name: str, dtype: str, **torch_options: Any) -> tuple[OurSide, TorchSide]:
    kind, options = ALL[name]
    rng = np.random.default_rng(0)
    weights = [random_bits(rng, shape, dtype, kind="weight") for shape in SHAPES]
    ours = OurSide(weights, dtype, lambda params: getattr(optim, kind)(params, **options))
    choice = torch_options or {"foreach": True}
    return ours, TorchSide(weights, dtype, lambda params: getattr(torch.optim, kind)(params, **options, **choice))


def run(name: str, dtype: str, **torch_options: Any) -> dict[str, int]:
    ours, theirs = sides(name, dtype, **torch_options)
    train(ours, theirs, dtype=dtype, shapes=SHAPES, num_steps=NUM_STEPS, seed=1)
    finite = torch.cat([param.detach().reshape(-1).isfinite() for param in theirs.params])
    assert finite.float().mean() > 0.05, "expected numbers to compare"  # float16 with an eps of 0 has many NaNs
    return differences(ours, theirs)


def assert_none(found: dict[str, int]) -> None:
    assert sum(found.values()) == 0, f"differing elements: {found}"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(name: str, dtype: str) -> None:
    assert_none(run(name, dtype))


@pytest.mark.parametrize("name", SGDS)
def test_float32_sgd(name: str) -> None:
    assert_none(run(name, "float32"))


@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("exchange", [torch_with_a_correct_sqrt, ours_with_the_sqrt_of_torch])
def test_float32_but_for_the_square_root(name: str, exchange: Any) -> None:
    """Everything is the same once both sides have one square root, whichever of the two it is."""
    with exchange():
        assert_none(run(name, "float32"))


def test_float32_differs_only_where_torch_rounds_the_square_root_wrongly() -> None:
    found = run("AdamW", "float32")
    assert found["exp_avg"] == found["exp_avg_sq"] == 0
    assert (found["param"] == 0) == torch_rounds_sqrt_correctly()


@pytest.mark.parametrize("name", ["AdamW", "SGD, dampening", "SGD, nesterov"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_come_and_go(name: str, dtype: str) -> None:
    """Parameters without a gradient are passed over, and those that get their first one later start then."""
    with torch_with_a_correct_sqrt() if dtype == "float32" else nullcontext():
        ours, theirs = sides(name, dtype)
        rng = np.random.default_rng(2)
        for step in range(8):
            grads = [random_bits(rng, shape, dtype, kind="gradient") for shape in SHAPES]
            absent = [index for index in range(len(SHAPES)) if (index + step) % 3 == 0 or index > 2 * step + 2]
            for side in (ours, theirs):
                side.step(grads, lr=1e-3, absent=absent)
        assert_none(differences(ours, theirs))


def test_one_tensor_at_a_time_differs() -> None:
    """So the multi-tensor step is another one, which the report says too."""
    assert run("AdamW, other betas and eps", "bfloat16", foreach=False)["param"] > 0


# Negative controls


def test_fused_differs() -> None:
    found = run("AdamW", "bfloat16", fused=True)
    assert found["param"] > 0, found


class _Float32ThenCast(TorchSide):
    """What the 16-bit step must not be: all of it in float32, cast at the end."""

    def step(self, grads: list[np.ndarray[Any, Any]], *, lr: float) -> None:
        for param, bits in zip(self.params, grads, strict=True):
            wide = torch.nn.Parameter(param.detach().float())
            wide.grad = torch_tensor(bits, self.dtype).float()
            optimizer = torch.optim.AdamW([wide], lr=lr, foreach=True)
            state = self.optimizer.state[param]
            optimizer.state[wide] = {key: value.float() for key, value in state.items()}
            optimizer.step()
            param.detach().copy_(wide)
            state.update(optimizer.state[wide])
            state.update({key: value.to(param.dtype) for key, value in state.items() if key != "step"})


def test_float32_then_cast_differs() -> None:
    ours, _ = sides("AdamW", "bfloat16")
    rng = np.random.default_rng(0)
    weights = [random_bits(rng, shape, "bfloat16", kind="weight") for shape in SHAPES]
    other = _Float32ThenCast(weights, "bfloat16", lambda params: torch.optim.AdamW(params, foreach=True))
    train(ours, other, dtype="bfloat16", shapes=SHAPES, num_steps=3, seed=1)
    found = differences(ours, other)
    assert found["param"] > 0, found
    assert found["exp_avg_sq"] > 0, found


# The element of the report that this room answers


def test_tiny_gradient_moves_what_torch_moves() -> None:
    """Every bfloat16 weight of the binade whose unit is 0.000122, with a gradient of -1.56e-8, at step 1."""
    weights = [np.arange(0x3C80, 0x3D00, dtype=np.uint16)]
    grads = [np.full(128, bits_of_bfloat16(-1.56e-8), np.uint16)]
    ours = OurSide(weights, "bfloat16", lambda params: optim.AdamW(params, weight_decay=0.0))
    theirs = TorchSide(weights, "bfloat16", lambda params: torch.optim.AdamW(params, weight_decay=0.0, foreach=True))
    for side in (ours, theirs):
        side.step(grads, lr=1e-4)
    assert_none(differences(ours, theirs))
    assert num_differing(ours.params[0], torch_tensor(weights[0], "bfloat16")) == 0, "expected no weight to move"


def bits_of_bfloat16(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.bfloat16).view(torch.int16).item()) & 0xFFFF


# Structure


def test_state_dict_has_the_structure_of_torch() -> None:
    for name in ("AdamW, amsgrad", "SGD, momentum"):
        ours, theirs = sides(name, "float32")
        train(ours, theirs, dtype="float32", shapes=SHAPES, num_steps=1, seed=3)
        left, right = ours.optimizer.state_dict(), theirs.optimizer.state_dict()
        assert {index: set(state) for index, state in left["state"].items()} == {
            index: set(state) for index, state in right["state"].items()
        }
        expected = [{**group, "foreach": None} for group in right["param_groups"]]
        assert left["param_groups"] == expected


def test_states_of_torch_can_be_loaded() -> None:
    """And go on with the same bits."""
    ours, theirs = sides("AdamW", "bfloat16")
    fresh, _ = sides("AdamW", "bfloat16")
    train(ours, theirs, dtype="bfloat16", shapes=SHAPES, num_steps=2, seed=3)
    saved = theirs.optimizer.state_dict()
    saved["state"] = {
        index: {name: value.float().numpy() for name, value in state.items()} for index, state in saved["state"].items()
    }
    fresh.optimizer.load_state_dict(saved)
    for param, other in zip(fresh.params, ours.params, strict=True):
        param.asnumpy()[...] = other.asnumpy()
    train(fresh, theirs, dtype="bfloat16", shapes=SHAPES, num_steps=2, seed=4)
    assert_none(differences(fresh, theirs))


# Single operations on any bits

NUMBERS = st.floats(-2.0, 2.0, width=32, allow_subnormal=False)
CALLS: dict[str, tuple[int, Any, Any]] = {
    "lerp": (2, lambda ops, v, x, y: ops.lerp(x, y, weight=v), lambda v, x, y: torch._foreach_lerp_([x], [y], v)),
    "addcmul": (
        3,
        lambda ops, v, x, y, z: ops.addcmul(x, y, z, value=v),
        lambda v, x, y, z: torch._foreach_addcmul_([x], [y], [z], v),
    ),
    "addcdiv": (
        3,
        lambda ops, v, x, y, z: ops.addcdiv(x, y, z, value=v),
        lambda v, x, y, z: torch._foreach_addcdiv_([x], [y], [z], [v]),
    ),
    "add": (2, lambda ops, v, x, y: ops.add(x, y, alpha=v), lambda v, x, y: torch._foreach_add_([x], [y], alpha=v)),
    "add_number": (1, lambda ops, v, x: ops.add_number(x, v), lambda v, x: torch._foreach_add_([x], v)),
    "scale": (
        1,
        lambda ops, v, x: ops.scale(x, v),
        lambda v, x: torch._foreach_mul_([x], torch.tensor(v)),
    ),
    "multiply": (1, lambda ops, v, x: ops.multiply(x, v), lambda v, x: torch._foreach_mul_([x], v)),
    "divide": (1, lambda ops, v, x: ops.divide(x, v), lambda v, x: torch._foreach_div_([x], [v])),
    "sqrt": (1, lambda ops, v, x: ops.sqrt(x), lambda v, x: torch._foreach_sqrt_([x])),
    "maximum": (2, lambda ops, v, x, y: ops.maximum(x, y), lambda v, x, y: torch._foreach_maximum_([x], [y])),
    "negate": (1, lambda ops, v, x: ops.negate(x), lambda v, x: torch._foreach_neg_([x])),
}
# The arrays are longer than a block of the vectorized loops, and not a multiple of one.
NUM_ELEMENTS = 75


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS)
@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(data=st.data())
def test_operation(call: str, dtype: str, data: st.DataObject) -> None:
    num_arguments, ours, theirs = CALLS[call]
    number = data.draw(NUMBERS.filter(bool))
    integers = np.uint32 if dtype == "float32" else np.uint16
    arguments = [data.draw(hnp.arrays(integers, NUM_ELEMENTS)) for _ in range(num_arguments)]
    operands = [torch_tensor(bits, dtype) for bits in arguments]
    expected = operands[0]
    if call == "sqrt" and dtype == "float32":
        (expected,) = correctly_rounded_sqrt(operands)
    else:
        theirs(number, *operands)
    native = [bits.view(numpy_dtype(DTYPES[dtype][1])) for bits in arguments]
    kind = arithmetic._float_of(native[0].dtype)
    host_ops = arithmetic.HostOps(kind, num_vectorized=NUM_ELEMENTS // 32 * 32)
    result = np.empty(NUM_ELEMENTS, native[0].dtype)
    with np.errstate(all="ignore"):
        kind.store(result, ours(host_ops, number, *(kind.load(array) for array in native)))
    actual = torch_tensor(result.view(integers), dtype)
    assert num_differing(actual, expected) == 0, (actual, expected)
