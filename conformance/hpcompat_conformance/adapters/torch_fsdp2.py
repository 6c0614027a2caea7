"""Native FSDP2: ``torch.distributed.fsdp``."""

from __future__ import annotations

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities

ADAPTER = Adapter(
    name="torch-fsdp2",
    modules=("torch",),
    worker_setup="hpcompat_conformance.on_torch.worker:set_up",
    load="hpcompat_conformance.adapters.torch_fsdp2:load",
)


def load() -> Implementation:
    """Runs in a worker."""
    from torch.distributed import fsdp

    from hpcompat_conformance.on_torch.framework import TorchFramework

    framework = TorchFramework()
    return Implementation(fsdp, framework, api_capabilities(fsdp) | framework.capabilities, framework.versions())
