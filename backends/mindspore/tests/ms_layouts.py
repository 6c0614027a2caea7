"""One model in all layouts of its parameters, and gradients given by hand: every rank its part of the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

import hpcompat
from hpcompat import Shard
from hpcompat_mindspore.param import param_of
from hpcompat_mindspore.tensors import numpy_dtype
from ms_models import Net, initialize, named
from ms_truth import mesh_of, num_ranks, wrap

Array = np.ndarray[Any, Any]


def unwrapped(*, dtype: str = "float32", hidden: int = 10, half_head: bool = False) -> Any:
    model = Net(hidden=hidden)
    for name, parameter in named(model).items():
        parameter.set_dtype(mindspore.float16 if half_head and "head" in name else getattr(mindspore, dtype))
    return initialize(model)


def laid_out(layout: str, *, dtype: str = "float32", hidden: int = 10) -> Any:
    model = unwrapped(dtype=dtype, hidden=hidden)
    return _LAYOUTS[layout](model)


def _shard_dim_1(model: Any) -> Any:
    def place(parameter: Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % num_ranks() == 0 else None

    return wrap(model, shard_placement_fn=place)


def _mixed(model: Any) -> Any:
    """Sharded, replicated and ignored ones together."""
    ignored = {model.head.weight}
    for layer in model.layers:
        hpcompat.fully_shard(layer, replicate_params={layer.up.bias, layer.down.weight})
    return hpcompat.fully_shard(model, ignored_params=ignored)


def _replicate(model: Any) -> Any:
    for layer in model.layers:
        hpcompat.replicate(layer)
    return hpcompat.replicate(model)


def _two_meshes(model: Any) -> Any:
    hpcompat.fully_shard(model.layers[0], mesh=mesh_of((2, num_ranks() // 2)))
    return hpcompat.fully_shard(model)


def _inside_plain(model: Any) -> Any:
    hpcompat.fully_shard(model.layers[1])
    return model


_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "sharded": wrap,
    "one unit": hpcompat.fully_shard,
    "one unit per parameter": lambda model: wrap(model, comm_fusion=False),
    "no flat buffer": lambda model: wrap(model, comm_fusion_zero_copy=False),
    "shard dim 1": _shard_dim_1,
    "hsdp 2 x n": lambda model: wrap(model, mesh=mesh_of((2, num_ranks() // 2))),
    "hsdp n x 1": lambda model: wrap(model, mesh=mesh_of((num_ranks(), 1))),
    "hsdp 1 x n": lambda model: wrap(model, mesh=mesh_of((1, num_ranks()))),
    "replicate": _replicate,
    "mixed": _mixed,
    "two meshes": _two_meshes,
    "inside a plain one": _inside_plain,
}


def random_gradients(model: nn.Cell, *, step: int) -> dict[str, Array]:
    """Whole gradients, the same on every rank."""
    rng = np.random.default_rng([step, 11])
    found = {}
    for name, parameter in named(model).items():
        param = param_of(parameter)
        shape = tuple(parameter.shape) if param is None else param.layout.shape
        scale = rng.choice([1.0, 1e-8, 0.0], p=[0.8, 0.1, 0.1], size=shape)
        found[name] = (rng.normal(size=shape) * scale).astype(np.float32).astype(numpy_dtype(parameter.dtype))
    return found


def give_gradients(model: nn.Cell, whole: Mapping[str, Array], *, absent: Collection[str] = ()) -> None:
    """Each parameter its shard of ``whole``, as backward would."""
    for name, parameter in named(model).items():
        param = param_of(parameter)
        value = None if name in absent else whole[name]
        if param is None:
            parameter._grad = None if value is None else Tensor.from_numpy(value.copy())
        else:
            parameter.grad = None if value is None else Tensor.from_numpy(np.array(param.cut(value), order="C"))


def bits(value: Any) -> Array:
    array = value if isinstance(value, np.ndarray) else value.asnumpy()
    return array.view(f"u{array.itemsize}").copy() if array.size else np.zeros(array.shape, np.uint8)


def same_bits(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> list[str]:
    """The names that differ."""
    assert actual.keys() == expected.keys()
    return [name for name in actual if not np.array_equal(bits(actual[name]), bits(expected[name]))]
