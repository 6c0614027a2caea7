"""Which of torch's optimizers update element by element, and which of its implementations an update runs.

[Note: the choice of kernels]
With ``foreach=None`` torch takes the multi-tensor kernels where the device has them and the type of every parameter is
on a list, which DTensor is and other libraries' distributed tensors are not; else a loop over the tensors. An update of
local tensors is to have the bits of an update of DTensors, so the device alone decides. ``foreach`` and ``fused`` that
the user has set stand.

On the CPU torch takes the loop. The two differ there: in bfloat16 and float16 the multi-tensor kernels round a scalar
factor to the dtype before they multiply (AdamW with ``betas=(0.9, 0.95)``, SGD with momentum), and some classes order
their operations differently. In float32 and float64 the others give the same bits, and the multi-tensor kernels in less
time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import Optimizer

from hpcompat_torch import private

# In full precision their multi-tensor kernels give the bits of the loop, on the CPU.
SAME_IN_FULL_PRECISION: tuple[type[Optimizer], ...] = (
    optim.AdamW,
    optim.Adam,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.Rprop,
)
ELEMENT_WISE: tuple[type[Optimizer], ...] = (*SAME_IN_FULL_PRECISION, optim.NAdam, optim.RAdam, optim.ASGD)
_FULL_PRECISION = frozenset({torch.float32, torch.float64})


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether a step on local tensors does what a step on distributed ones would.

    True for torch's own classes and for subclasses that leave ``step`` alone; never with ``differentiable=True``, whose
    step autograd records.
    """
    return _base_of(type(optimizer)) is not None and not any(
        group.get("differentiable") for group in optimizer.param_groups
    )


@functools.cache
def _base_of(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The class of torch's whose update ``kind`` runs."""
    base: Any = next((base for base in kind.__mro__ if base in ELEMENT_WISE), None)
    if base is None or kind._init_group is not base._init_group:  # type: ignore[attr-defined]
        return None
    # Torch wraps step for its hooks, anew for each class.
    return base if inspect.unwrap(kind.step) is inspect.unwrap(base.step) else None


def takes_foreach(optimizer: Optimizer, group: dict[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether to run the multi-tensor kernels over ``tensors`` although ``group`` does not say so. [Note: the choice of
    kernels]
    """
    if group.get("foreach", False) is not None or group.get("fused") or not tensors:
        return False
    # The kernels refuse tensors for options, except in a capturable step.
    if not group.get("capturable") and any(_holds_tensor(value) for key, value in group.items() if key != "params"):
        return False
    devices = {tensor.device.type for tensor in tensors}
    if devices <= set(private.devices_with_foreach()):
        return True
    return (
        devices == {"cpu"}
        and _base_of(type(optimizer)) in SAME_IN_FULL_PRECISION
        and all(tensor.dtype in _FULL_PRECISION for tensor in tensors)
    )


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(map(_holds_tensor, value)))
