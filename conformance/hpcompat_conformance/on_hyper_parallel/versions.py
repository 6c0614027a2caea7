"""What is under test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

CHECKOUT = "0+checkout"


def of_package(*, shims: Iterable[str]) -> Mapping[str, str]:
    """The version that the package's metadata says (``0+checkout`` where a checkout without metadata is on the path),
    and the names of the shims that it runs with."""
    try:
        found = version("hyper_parallel")
    except PackageNotFoundError:
        found = CHECKOUT
    return {"hyper-parallel": found, "shims": "; ".join(shims)}
