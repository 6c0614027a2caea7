"""Rank side: implementations by name, and meshes."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

IMPLEMENTATIONS = {"native": "torch.distributed.fsdp", "hpcompat": "hpcompat"}


def implementation(name: str) -> ModuleType:
    """The module whose `fully_shard` is under test: both offer the same names."""
    return importlib.import_module(IMPLEMENTATIONS[name])


def half_public(source: ModuleType, name: str) -> Any:
    """A name that users of native must import from a private module, and of hpcompat from the top."""
    if hasattr(source, name):
        return getattr(source, name)
    home = "_composable.replicate_with_fsdp" if name == "replicate" else "fsdp._fully_shard._fsdp_common"
    return getattr(importlib.import_module(f"torch.distributed.{home}"), name)


@functools.cache
def named_mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    """One mesh object per kind and process: torch caches DTensor specs by mesh value, with the mesh object inside."""
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)
