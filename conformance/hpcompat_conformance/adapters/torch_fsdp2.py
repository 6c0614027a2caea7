"""Native FSDP2: ``torch.distributed.fsdp``."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities

ADAPTER = Adapter(
    name="torch-fsdp2",
    modules=("torch",),
    worker_setup="hpcompat_conformance.on_torch.worker:set_up",
    load="hpcompat_conformance.adapters.torch_fsdp2:load",
)


# What its callers use and its documentation does not point at; the older a version, the less of it is there.
HALF_PUBLIC = {
    "FSDPMeshInfo": "torch.distributed.fsdp._fully_shard._fsdp_common",
    "ReplicateModule": "torch.distributed._composable.replicate_with_fsdp",
    "ShardPlacementResult": "torch.distributed.fsdp._fully_shard._fsdp_common",
    "replicate": "torch.distributed._composable.replicate_with_fsdp",
}


def load() -> Implementation:
    """Runs in a worker."""
    import torch
    from torch.distributed import fsdp

    from hpcompat_conformance.on_torch.framework import TorchFramework

    # What goes with FSDP2 in a training script is torch's own; a step is the optimizer's.
    torch_own = {"clip_grad_norm_": torch.nn.utils.clip_grad_norm_, "zero_grad": torch.nn.Module.zero_grad}
    api = SimpleNamespace(**{name: getattr(fsdp, name) for name in fsdp.__all__}, **_half_public(), **torch_own)
    framework = TorchFramework()
    return Implementation(api, framework, api_capabilities(api) | framework.capabilities, framework.versions())


def _half_public() -> dict[str, Any]:
    modules = {
        name: importlib.import_module(place) for name, place in HALF_PUBLIC.items() if importlib.util.find_spec(place)
    }
    return {name: getattr(module, name) for name, module in modules.items() if hasattr(module, name)}
