"""Native FSDP2: ``torch.distributed.fsdp``."""

from __future__ import annotations

from types import SimpleNamespace

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities

ADAPTER = Adapter(
    name="torch-fsdp2",
    modules=("torch",),
    worker_setup="hpcompat_conformance.on_torch.worker:set_up",
    load="hpcompat_conformance.adapters.torch_fsdp2:load",
)


def load() -> Implementation:
    """Runs in a worker."""
    import torch
    from torch.distributed import fsdp
    from torch.distributed._composable import replicate_with_fsdp
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    from hpcompat_conformance.on_torch.framework import TorchFramework

    # Some of what its callers use is not where its documentation points.
    half_public = {
        "FSDPMeshInfo": _fsdp_common.FSDPMeshInfo,
        "ShardPlacementResult": _fsdp_common.ShardPlacementResult,
        "ReplicateModule": replicate_with_fsdp.ReplicateModule,
        "replicate": replicate_with_fsdp.replicate,
    }
    # What goes with FSDP2 in a training script is torch's own; a step is the optimizer's.
    torch_own = {"clip_grad_norm_": torch.nn.utils.clip_grad_norm_, "zero_grad": torch.nn.Module.zero_grad}
    api = SimpleNamespace(**{name: getattr(fsdp, name) for name in fsdp.__all__}, **half_public, **torch_own)
    framework = TorchFramework()
    return Implementation(api, framework, api_capabilities(api) | framework.capabilities, framework.versions())
