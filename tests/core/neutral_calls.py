"""What a script of either framework does with the neutral calls, as jobs for a pool of ranks; each rank checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hpcompat
from hpcompat.optim import AdamW

ROWS = 6


def scalars() -> None:
    rank, size = hpcompat.get_rank(), hpcompat.get_world_size()
    assert hpcompat.all_reduce_scalar(rank + 1) == size * (size + 1) // 2
    big = 2**62 // size
    assert hpcompat.all_reduce_scalar(big) == big * size, "ints are exact"
    total = 0.0
    for other in range(size):
        total += 0.1 * (other + 1)
    assert hpcompat.all_reduce_scalar(0.1 * (rank + 1)) == total, "in the order of the ranks, in float64"
    assert hpcompat.all_reduce_scalar(rank, op="max") == size - 1
    assert hpcompat.all_reduce_scalar(rank, op="min") == 0
    assert hpcompat.all_reduce_scalar(rank, op="avg") == (size - 1) / 2
    mixed = hpcompat.all_reduce_scalar(1 if rank == 0 else 0.5)
    assert mixed == 1 + 0.5 * (size - 1)
    hpcompat.barrier()


def agreement() -> None:
    rank, size = hpcompat.get_rank(), hpcompat.get_world_size()
    assert hpcompat.agree(True)
    assert not hpcompat.agree(False)
    for dissenter in range(size):
        assert not hpcompat.agree(rank != dissenter)
    assert hpcompat.agree(True)
    for value in (1, None, np.bool_(True)):
        with pytest.raises(TypeError, match="expected ok to be a bool, but got"):
            hpcompat.agree(value)  # type: ignore[arg-type]


def agreement_in_a_group() -> None:
    """On 4 ranks, as 2 by 2."""
    mesh = hpcompat.init_device_mesh(None, (2, 2), mesh_dim_names=("dp", "cp"))
    rank = hpcompat.get_rank()
    assert hpcompat.agree(rank != 3, group=mesh.get_group("cp")) is (rank < 2)
    assert hpcompat.agree(rank != 3, group=mesh.get_group("dp")) is (rank % 2 == 0)


def groups() -> None:
    """On 4 ranks, as 2 by 2."""
    mesh = hpcompat.init_device_mesh(None, (2, 2), mesh_dim_names=("dp", "cp"))
    rank = hpcompat.get_rank()
    assert [hpcompat.get_world_size(mesh.get_group(name)) for name in ("dp", "cp")] == [2, 2]
    assert [hpcompat.get_rank(mesh.get_group(name)) for name in ("dp", "cp")] == [rank // 2, rank % 2]
    assert hpcompat.all_reduce_scalar(rank, group=mesh.get_group("cp")) == 4 * (rank // 2) + 1
    assert hpcompat.all_reduce_scalar(rank, group=mesh["dp"].get_group()) == 2 * (rank % 2) + 2
    hpcompat.barrier(mesh.get_group("dp"))
    assert mesh.ndim == 2
    assert mesh.size() == 4
    assert mesh.size(0) == 2
    assert mesh.get_local_rank("cp") == rank % 2
    assert list(mesh.get_coordinate()) == [rank // 2, rank % 2]
    assert mesh["cp"].size() == 2
    assert mesh["dp", "cp"].size() == 4
    flat = mesh["dp", "cp"]._flatten("all")
    assert flat.ndim == 1
    assert flat.get_local_rank() == rank
    assert hpcompat.get_world_size(flat.get_group()) == 4
    with pytest.raises(KeyError):
        mesh["tp"]


def wrong_mesh() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        hpcompat.init_device_mesh(None, (hpcompat.get_world_size() + 1,))
    with pytest.raises(TypeError, match=r"mesh_shape to be a tuple, but got 2; for one axis: \(2,\)"):
        hpcompat.init_device_mesh(None, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"mesh_dim_names to be a tuple, but got 'dp'; for one axis: \('dp',\)"):
        hpcompat.init_device_mesh(None, (1, hpcompat.get_world_size()), mesh_dim_names="dp")
    with pytest.raises(ValueError, match="expected a name for each of the 1 axes"):
        hpcompat.init_device_mesh(None, (hpcompat.get_world_size(),), mesh_dim_names=("a", "b"))


def numpy_and_back(*, half: Any, narrow: Any) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3) / 3
    tensor = hpcompat.from_numpy(array)
    kept = hpcompat.to_numpy(tensor)
    array[0, 0] = 7
    assert kept[0, 0] == hpcompat.to_numpy(tensor)[0, 0] == 0, "copies both ways"
    assert hpcompat.to_numpy(hpcompat.from_numpy(kept, dtype=half)).dtype == np.float16
    rounded = hpcompat.to_numpy(hpcompat.from_numpy(kept, dtype=narrow))
    assert rounded.dtype == np.float32
    assert rounded[0, 1] == np.float32(0.333984375)
    assert hpcompat.to_numpy(hpcompat.from_numpy(np.int64(5))) == 5


def _batch() -> Any:
    numbers = np.random.default_rng([3, hpcompat.get_rank()])
    return hpcompat.from_numpy(numbers.normal(size=(ROWS, 4)).astype(np.float32))


def _loss_of(model: Any, x: Any) -> Any:
    return (model(x) * model(x)).mean()


def gradients(*, model: Any) -> None:
    """`model` is a function that makes the same sharded model of 4 inputs on every rank."""
    model = model()
    weights = list(hpcompat.parameters(model))
    batch = _batch()
    loss_of = partial(_loss_of, model)

    hpcompat.backward(loss_of(batch))
    once = [hpcompat.to_numpy(weight.grad) for weight in weights]
    assert all(grad.any() for grad in once if grad.size)
    hpcompat.backward(loss_of(batch))
    for weight, first in zip(weights, once, strict=True):
        assert np.array_equal(hpcompat.to_numpy(weight.grad), first + first), "backward adds"
    value, grads = hpcompat.value_and_grad(loss_of, weights)(batch)
    for weight, grad, first in zip(weights, grads, once, strict=True):
        assert grad is weight.grad
        assert np.array_equal(hpcompat.to_numpy(grad), first), "value_and_grad replaces"
        whole = hpcompat.to_numpy(hpcompat.full_tensor(weight, grad))
        assert whole.shape == hpcompat.to_numpy(hpcompat.full_tensor(weight)).shape
    run = hpcompat.value_and_grad(lambda x: (loss_of(x), model(x) * 100.0), weights, has_aux=True)
    (loss, aux), grads = run(batch)
    assert hpcompat.to_numpy(loss) == hpcompat.to_numpy(value)
    assert aux.shape[0] == ROWS
    assert all(np.array_equal(hpcompat.to_numpy(grad), first) for grad, first in zip(grads, once, strict=True))


def wrong_gradients(*, model: Any) -> None:
    """What is no list of parameters, no tensor, or has another shape is refused, and nothing is left behind."""
    model = model()
    weights = list(hpcompat.parameters(model))
    batch = _batch()
    loss_of = partial(_loss_of, model)

    for wrong in (weights[0], model, None, 7, [model], [weights[0], "weight"]):
        with pytest.raises(TypeError, match=r"expected weights to be .*, but got .*; pass list\(hpcompat.parameters"):
            hpcompat.value_and_grad(loss_of, wrong)  # type: ignore[arg-type]
    for wrong in (3.0, hpcompat.to_numpy(batch)):
        with pytest.raises(TypeError):
            hpcompat.value_and_grad(lambda x, wrong=wrong: wrong, weights)(batch)
    for wrong in (hpcompat.from_numpy(np.ones((ROWS, 1), np.float32)), hpcompat.from_numpy(np.float32(1))):
        with pytest.raises((ValueError, RuntimeError), match="shape"):
            hpcompat.backward(model(batch), wrong)
    model.reset_iter_state()
    hpcompat.backward(loss_of(batch))
    assert any(hpcompat.to_numpy(weight.grad).any() for weight in weights if hpcompat.to_numpy(weight).size)


def states_of_an_optimizer(*, model: Any) -> None:
    """Whole states by the parameters: the number of steps is not sharded."""
    model = model()
    optimizer = AdamW(hpcompat.parameters(model), lr=0.1)
    hpcompat.backward(model(_batch()).mean())
    hpcompat.optimizer_step(optimizer)
    for parameter in hpcompat.parameters(model):
        whole = hpcompat.to_numpy(hpcompat.full_tensor(parameter))
        for name, value in optimizer.state[parameter].items():
            found = hpcompat.to_numpy(hpcompat.full_tensor(parameter, value))
            assert found.shape == (() if name == "step" else whole.shape), name


def parameters(*, model: Any, names: list[str]) -> None:
    model = model()
    named = dict(hpcompat.named_parameters(model))
    assert list(named) == names
    assert [id(parameter) for parameter in hpcompat.parameters(model)] == [id(found) for found in named.values()]
    total = sum(hpcompat.to_numpy(hpcompat.full_tensor(parameter)).size for parameter in named.values())
    local = hpcompat.all_reduce_scalar(sum(hpcompat.to_numpy(parameter).size for parameter in named.values()))
    assert local == total, "to_numpy gives this rank's shard"


def no_gradients(*, model: Any) -> None:
    model = model()
    with hpcompat.no_grad():
        loss = (model(_batch())).mean()
    with pytest.raises(RuntimeError):
        hpcompat.backward(loss)


def one_backend(*, name: str) -> None:
    """Calls without an object of a framework go to the backend that was started, or to the only one there is."""
    assert hpcompat.is_initialized()
    assert hpcompat.device_type() == "cpu"
    with pytest.raises(RuntimeError, match="expected init_process_group once, but got a second call"):
        hpcompat.init_process_group(backend=name)
    hpcompat.manual_seed(3)
    with pytest.raises(TypeError, match=r"expected seed to be an int, but got 0\.5"):
        hpcompat.manual_seed(0.5)  # type: ignore[arg-type]


def seeds(*, draw: Any) -> None:
    hpcompat.manual_seed(3)
    first = draw()
    hpcompat.manual_seed(3)
    assert np.array_equal(first, draw())
    hpcompat.manual_seed(4)
    assert not np.array_equal(first, draw())


Case = tuple[Callable[..., None], dict[str, Any], tuple[int, ...]]


def cases(*, model: Callable[[], Any], draw: Callable[[], Any], half: Any, narrow: Any, name: str) -> dict[str, Case]:
    """What to run, with which arguments, on which numbers of ranks; arguments are the framework's."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    return {
        "scalars": (scalars, {}, (1, 2, 4)),
        "agreement": (agreement, {}, (1, 2, 4)),
        "agreement in a group": (agreement_in_a_group, {}, (4,)),
        "groups": (groups, {}, (4,)),
        "wrong mesh": (wrong_mesh, {}, (2,)),
        "numpy": (numpy_and_back, {"half": half, "narrow": narrow}, (1,)),
        "gradients": (gradients, {"model": model}, (1, 2, 4)),
        "wrong gradients": (wrong_gradients, {"model": model}, (2,)),
        "states of an optimizer": (states_of_an_optimizer, {"model": model}, (1, 2)),
        "parameters": (parameters, {"model": model, "names": names}, (1, 2)),
        "no gradients": (no_gradients, {"model": model}, (2,)),
        "one backend": (one_backend, {"name": name}, (2,)),
        "seeds": (seeds, {"draw": draw}, (1,)),
    }


def runs(cases: dict[str, Case]) -> list[tuple[str, int]]:
    """Each case on each of its numbers of ranks."""
    return [(name, num_ranks) for name, (_, _, several) in cases.items() for num_ranks in several]
