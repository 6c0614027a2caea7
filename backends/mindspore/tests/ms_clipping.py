"""What the ranks run: the norm of all gradients and clipping by it, against numpy on the whole gradients."""

from __future__ import annotations

import math
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor

import hpcompat
from hpcompat import MixedPrecisionPolicy
from hpcompat_mindspore import autograd, optim
from hpcompat_mindspore.param import full_tensor, param_of
from hpcompat_mindspore.tensors import numpy_dtype
from ms_layouts import bits, give_gradients, laid_out, random_gradients
from ms_models import Net, TiedNet, batch, initialize, loss_of, named
from ms_truth import full_gradients, num_ranks, rank, train, true_gradients, wrap

Array = np.ndarray[Any, Any]
ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf)


def true_norm(grads: dict[str, Array], order: float) -> float:
    flat = np.concatenate([np.abs(grad.astype(np.float64)).reshape(-1) for grad in grads.values()])
    if order == 0.0:
        return float(np.count_nonzero(flat))
    return float(np.linalg.norm(flat, order))


def whole_of(model: Any) -> dict[str, Array]:
    """Copies of the whole gradients, of plain parameters too."""
    found = {}
    for name, parameter in named(model).items():
        grad = autograd.get_gradient(parameter)
        if grad is not None:
            found[name] = full_tensor(parameter, grad).asnumpy().copy()
    return found


def clips(layout: str, *, hidden: int = 10, dtype: str = "float32") -> None:
    """Every order of the norm; the gradients become what numpy makes of them, to the bit."""
    for order in ORDERS:
        model = laid_out(layout, hidden=hidden, dtype=dtype)
        whole = random_gradients(model, step=0)
        give_gradients(model, whole)
        expected = true_norm(whole, order)
        limit = 0.25 * expected
        norm = optim.clip_grad_norm_(named(model).values(), limit, norm_type=order)
        assert (norm.dtype, norm.shape) == (mindspore.float32, ())
        value = np.float32(norm.asnumpy())
        assert abs(value - expected) <= 1e-6 * expected, (order, value, expected)
        coefficient = np.minimum(np.float32(1) / (value + np.float32(1e-6)) * np.float32(limit), np.float32(1))
        for name, grad in whole_of(model).items():
            scaled = (whole[name].astype(np.float32) * coefficient).astype(whole[name].dtype)
            assert np.array_equal(bits(grad), bits(scaled)), (order, name)


def norm_is_one_value(hidden: int = 10) -> None:
    """In every layout the same bits."""
    found = {}
    layouts = ["sharded", "one unit", "no flat buffer", "hsdp 2 x n", "hsdp n x 1", "hsdp 1 x n", "replicate", "mixed"]
    for layout in layouts:
        model = laid_out(layout, hidden=hidden)
        give_gradients(model, random_gradients(model, step=0))
        found[layout] = float(optim.clip_grad_norm_(named(model).values(), 1.0).asnumpy())
    assert len(set(found.values())) == 1, found


def trained_gradients(tied: bool) -> None:
    """Of a real backward, against the single process."""
    make = TiedNet if tied else Net
    model = hpcompat.fully_shard(initialize(make()))
    train(model)
    expected = true_norm(true_gradients(initialize(make())), 2.0)
    # A parameter that comes twice counts once.
    members = [*named(model).values(), *named(model).values()]
    norm = float(optim.clip_grad_norm_(members, 1e9).asnumpy())
    assert abs(norm - expected) <= 1e-6 * expected
    assert norm == float(optim.clip_grad_norm_(members, 1e9).asnumpy()), "expected no change below the limit"


def returned_gradients() -> None:
    """Those that value_and_grad returned are the same tensors, so clipping is seen by an optimizer that takes them."""
    model = wrap(initialize(Net()))
    members = list(named(model).values())
    _, grads = autograd.value_and_grad(lambda *data: loss_of(model, data), members)(*batch(rank()))
    optim.clip_grad_norm_(members, 1e-3)
    again = float(optim.clip_grad_norm_(members, 1e9).asnumpy())
    assert again == pytest.approx(1e-3, rel=1e-3)
    for parameter, grad in zip(members, grads, strict=True):
        assert grad is parameter.grad


def rank_without_gradients() -> None:
    """Rank 0 alone has gradients, and of half of the parameters: the others take part all the same."""
    model = laid_out("sharded", hidden=3)
    whole = random_gradients(model, step=0)
    names = list(named(model))
    have = set(names[::2]) if rank() == 0 else set()
    give_gradients(model, whole, absent=set(names) - have)
    parts = {}
    for name in names[::2]:
        param = param_of(named(model)[name])
        rows = param.layout.shard_shape(0)[0]
        parts[name] = whole[name][:rows]
    norm = float(optim.clip_grad_norm_(named(model).values(), 1.0).asnumpy())
    assert norm == pytest.approx(true_norm(parts, 2.0), rel=1e-6)
    assert {name for name, parameter in named(model).items() if parameter.grad is not None} == have


def plain_gradients_that_differ() -> None:
    """Nothing has reduced an ignored parameter's: the largest counts, and all ranks scale alike."""
    model = laid_out("mixed")
    whole = random_gradients(model, step=0)
    plain = whole["head.weight"].copy()
    give_gradients(model, {**whole, "head.weight": plain * np.float32(rank() + 1)})
    for order in (2.0, math.inf):
        expected = true_norm({**whole, "head.weight": plain * np.float32(num_ranks())}, order)
        norm = float(optim.clip_grad_norm_(named(model).values(), 1e9, norm_type=order).asnumpy())
        assert norm == pytest.approx(expected, rel=1e-6), order


def float64() -> None:
    parameter = Parameter(Tensor(np.ones(3)), name="weight")
    parameter._grad = Tensor(np.array([3.0, 4.0, 1e-9]))
    norm = optim.clip_grad_norm_(parameter, 1.0)
    assert norm.dtype == mindspore.float64
    assert float(norm.asnumpy()) == 5.0
    np.testing.assert_allclose(parameter._grad.asnumpy()[:2], [0.6, 0.8], rtol=1e-6)


def not_finite(value: float) -> None:
    """One element on one rank: every rank knows."""
    model = laid_out("sharded")
    whole = random_gradients(model, step=0)
    whole["head.weight"][0, 0] = value
    for order in (2.0, math.inf):
        give_gradients(model, whole)
        with pytest.raises(RuntimeError, match="finite"):
            optim.clip_grad_norm_(named(model).values(), 1.0, norm_type=order, error_if_nonfinite=True)
        for name, grad in whole_of(model).items():
            assert np.array_equal(grad, whole[name], equal_nan=True), "expected the gradients as they were"
        norm = float(optim.clip_grad_norm_(named(model).values(), 1.0, norm_type=order).asnumpy())
        assert np.array_equal(norm, value, equal_nan=True)
        found = whole_of(model)["layers.0.up.weight"]
        assert np.isnan(found).all() if math.isnan(value) else (found == 0).all()


def none_at_all() -> None:
    model = laid_out("sharded")
    assert float(optim.clip_grad_norm_(named(model).values(), 1.0).asnumpy()) == 0.0
    assert float(optim.clip_grad_norm_([], 1.0).asnumpy()) == 0.0
    with pytest.raises(TypeError, match="expected parameters"):
        optim.clip_grad_norm_(["weight"], 1.0)  # type: ignore[list-item]


def large_and_narrow(dtype: str) -> None:
    """Many elements of 16 bits, whose squares and sums have no place there."""
    rng = np.random.default_rng(0)
    array = (rng.normal(size=100_003) * 200).astype(np.float32).astype(numpy_dtype(getattr(mindspore, dtype)))
    parameter = Parameter(Tensor.from_numpy(array.copy()), name="weight")
    parameter._grad = Tensor.from_numpy(array.copy())
    norm = float(optim.clip_grad_norm_(parameter, 1.0).asnumpy())
    assert norm == pytest.approx(true_norm({"weight": array}, 2.0), rel=1e-6)


def main_grad() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=mindspore.float32, apply_grad_on_fp32_main_grad=True)
    model = wrap(initialize(Net()), mp_policy=policy)
    train(model)
    norm = float(optim.clip_grad_norm_(named(model).values(), 1e-3).asnumpy())
    assert norm == pytest.approx(true_norm(true_gradients(initialize(Net())), 2.0), rel=1e-5)
    clipped = {name: full_tensor(p, p.main_grad).asnumpy() for name, p in named(model).items()}
    assert true_norm(clipped, 2.0) == pytest.approx(1e-3, rel=2e-3)


def shared_gradient() -> None:
    """MindSpore may give one tensor to two plain parameters as their gradient: each is scaled once."""
    shared = Tensor(np.array([3.0, 4.0], np.float32))
    members = [Parameter(Tensor(np.ones(2, np.float32)), name=name) for name in "ab"]
    for member in members:
        member._grad = shared
    optim.clip_grad_norm_(members, 1.0)
    for member in members:
        np.testing.assert_allclose(member._grad.asnumpy(), shared.asnumpy() / np.sqrt(50), rtol=1e-5)
    assert shared.asnumpy().tolist() == [3.0, 4.0]


def ranks_agree() -> None:
    """To the bit, whatever the ranks hold."""
    model = laid_out("sharded", hidden=3)
    give_gradients(model, random_gradients(model, step=3))
    norm = optim.clip_grad_norm_(named(model).values(), 1.0).asnumpy().reshape(1)
    everyone = np.empty(num_ranks(), np.float32)
    from hpcompat_mindspore.job import world

    world().all_gather(everyone, norm).wait()
    assert len(set(everyone.tolist())) == 1
    assert full_gradients(model)
