"""Making the reference known to the registry for a while; for good, it would be one more framework to choose from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from unittest import mock

from hpcompat import registry
from hpcompat_conformance.numpy_reference.backend import NumpyBackend


@contextmanager
def registered(backend: NumpyBackend | None = None) -> Iterator[NumpyBackend]:
    """Inside it, ``fully_shard`` hands modules of the reference to ``backend``, for all threads."""
    instance = backend or NumpyBackend()
    point = EntryPoint(
        instance.name, f"{NumpyBackend.__module__}:{NumpyBackend.__qualname__}", registry.ENTRY_POINT_GROUP
    )
    declared = {**registry.available_backends(), instance.name: point}
    with (
        mock.patch.object(registry, "_declared", return_value=declared),
        mock.patch.dict(registry._instances, {instance.name: instance}),
    ):
        yield instance
