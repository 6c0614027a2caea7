"""hpcompat on its torch backend."""

from __future__ import annotations

from importlib.metadata import version

from hpcompat_conformance.impl import Adapter, Implementation, api_capabilities

ADAPTER = Adapter(
    name="hpcompat-torch",
    modules=("hpcompat", "hpcompat_torch", "torch"),
    worker_setup="hpcompat_conformance.on_torch.worker:set_up",
    load="hpcompat_conformance.adapters.hpcompat_torch:load",
)


def load() -> Implementation:
    """Runs in a worker."""
    import hpcompat
    from hpcompat_conformance.on_torch.framework import TorchFramework

    framework = TorchFramework()
    versions = {"hpcompat": version("hpcompat"), **framework.versions()}
    return Implementation(hpcompat, framework, api_capabilities(hpcompat) | framework.capabilities, versions)
