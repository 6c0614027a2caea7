"""What the backend needs of MindSpore and MindSpore does not promise: private names, and how they behave.

Checked once, before the first use, so that a version that lacks something says so instead of training wrongly.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from hpcompat.errors import CapabilityError

# (module, dotted name in it)
NAMES = (
    ("mindspore._c_expression", "run_backward"),
    ("mindspore.common._grad_function", "_Function.apply"),
    ("mindspore.graph.api", "_pynative_executor.get_current_autodiff_engine_id"),
    ("mindspore.graph.api", "_pynative_executor.grad_flag"),
    ("mindspore.graph.api", "_pynative_executor.queue_backward_final_callback"),
    ("mindspore.graph.api", "_pynative_executor.requires_grad"),
    ("mindspore.graph.api", "_pynative_executor.set_grad_flag"),
    ("mindspore.graph.api", "_pynative_executor.sync"),
    ("mindspore", "_no_grad"),
    ("mindspore", "Tensor.assign_value"),
    ("mindspore", "Tensor._grad"),
    ("mindspore", "Tensor._requires_grad"),
    ("mindspore", "Tensor.data_ptr"),
    ("mindspore", "Tensor.from_numpy"),
)


def missing_names() -> list[str]:
    """The names above that this MindSpore lacks."""
    return [f"{module}.{name}" for module, name in NAMES if not _exists(module, name)]


def _exists(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def require() -> None:
    """Raise unless this MindSpore can carry the backend.

    Raises:
        CapabilityError: graph mode is on, numpy is 2 or newer, a name is missing, or a behaviour is another one.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise _lacks(
            "numpy 1", f"MindSpore {mindspore.__version__} computes with numpy 1 only, but got {np.__version__}"
        )
    if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
        raise _lacks("hooks in graph mode", "set_context(mode=PYNATIVE_MODE) before wrapping")
    missing = missing_names()
    if missing:
        raise _lacks("PyNative backward", f"MindSpore {mindspore.__version__} has no {', '.join(missing)}; use 2.10")
    failed = [name for name, holds in behaviours().items() if not holds]
    if failed:
        raise _lacks(", ".join(failed), f"MindSpore {mindspore.__version__} behaves differently; use 2.10")


def _lacks(capability: str, hint: str) -> CapabilityError:
    return CapabilityError(backend="mindspore", capability=capability, hint=hint)


def behaviours() -> dict[str, bool]:
    """What was relied on and whether it holds, found out on a 2x2 product."""
    from hpcompat_mindspore import autograd

    log: list[str] = []
    shard, whole = Tensor(np.ones((1, 2), np.float32)), Tensor(np.full((2, 2), 3, np.float32))
    weight = Parameter(Tensor(np.ones((2, 2), np.float32)), name="weight")
    source = Parameter(Tensor(np.ones((1, 2), np.float32)), name="source")
    seen: list[tuple[int, ...]] = []

    def capture(grad: Tensor) -> Tensor:
        log.append("parameter")
        seen.append(grad.shape)
        return Tensor(np.float32(0))

    def before_backward(grad: Tensor) -> None:
        log.append("output")
        weight.assign_value(whole)
        autograd.queue_final_callback(lambda: log.append("end"))

    weight.register_hook(capture)
    with autograd.recording():
        (entered,) = autograd.watch((source * 1.0,), lambda: log.append("input"))
        weight.assign_value(whole)
        output = mindspore.ops.matmul(entered, weight)
        weight.assign_value(shard)
        output.register_hook(before_backward)
        autograd.backward(output.sum())
    gradient = source._grad
    return {
        "data of another shape in a parameter": weight.shape == (2, 2),
        "hooks in torch's order": log == ["output", "parameter", "input", "end"],
        "backward with a parameter's current data": gradient is not None
        and gradient.asnumpy().tolist() == [[6.0, 6.0]],
        "a hook that replaces the gradient": seen == [(2, 2)] and weight._grad is not None and weight._grad.shape == (),
        "tensors that share numpy's memory": _shares_memory(),
    }


def _shares_memory() -> bool:
    array = np.ones(2, np.float32)
    tensor = Tensor.from_numpy(array)
    return bool(np.shares_memory(tensor.asnumpy(), array) and tensor.data_ptr() == array.ctypes.data)
