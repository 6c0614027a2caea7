"""Everything that this backend uses of torch although torch does not promise to keep it.

[Note: names that torch may change]
Each such name is imported here, or is in ``ATTRIBUTES`` if it is read on torch's objects elsewhere: so a torch without
one fails at import, by name and version, and not in the middle of a step. ``OPTIONAL`` are those that the backend does
without. A test finds names that are used and not here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

OLDEST = "2.7"


def _unsupported(what: object) -> ImportError:
    return ImportError(
        f"expected a torch whose insides the torch backend knows, but got {torch.__version__}: {what}; install a "
        "version that hpcompat has been tested with, see its README"
    )


if torch.__version__ < f"{OLDEST}.dev0":
    raise _unsupported(f"{OLDEST} is the oldest")

try:
    from torch.autograd.variable import Variable
    from torch.distributed import distributed_c10d
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices as devices_with_foreach
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    OutsideFunctorch = torch._C._DisableFuncTorch
    chunk_cat = torch._chunk_cat
    default_store = distributed_c10d._get_default_store
    foreach_copy_ = torch._foreach_copy_
    foreach_mul_ = torch._foreach_mul_
    foreach_norm = torch._foreach_norm
    graph_task_id = torch._C._current_graph_task_id
    is_in_functorch = torch._C._are_functorch_transforms_active
    queue_callback = Variable._execution_engine.queue_callback
    set_timeout_of_group = distributed_c10d._set_pg_timeout
except (ImportError, AttributeError) as error:
    raise _unsupported(error) from error

__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "OutsideFunctorch",
    "RegistryItem",
    "StridedShard",
    "TensorMeta",
    "chunk_cat",
    "default_store",
    "devices_with_foreach",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "graph_task_id",
    "is_in_functorch",
    "is_traceable_wrapper_subclass",
    "queue_callback",
    "set_timeout_of_group",
]

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    DTensor: ("_local_tensor", "_spec"),
    DeviceMesh: ("_flatten",),
    ProcessGroup: ("_get_backend", "_reduce_scatter_base"),
    nn.Module: ("_apply", "_parameters"),
    torch.Tensor: ("_base", "_post_accumulate_grad_hooks"),
    torch.amp.GradScaler: ("_per_optimizer_states", "_scale"),
    torch.optim.Optimizer: ("_optimizer_step_post_hooks",),
    torch.optim.Adam: ("_init_group",),
}
# Without them: no meshes made of others (dp_mesh_dims, tensor parallel), no premultiplied sums.
OPTIONAL: dict[Any, tuple[str, ...]] = {DeviceMesh: ("_concatenate",), dist: ("_make_nccl_premul_sum",)}


def _has(kind: type, name: str) -> bool:
    """Without an object, which can be expensive to make: what its class has or declares, or ``__init__`` sets."""
    return (
        hasattr(kind, name)
        or name in getattr(kind, "__annotations__", {})
        or name in getattr(kind.__init__, "__code__", _has.__code__).co_names  # type: ignore[misc]
    )


for kind, names in ATTRIBUTES.items():
    for name in names:
        if not _has(kind, name):
            raise _unsupported(f"{kind.__name__} has no {name!r}")
