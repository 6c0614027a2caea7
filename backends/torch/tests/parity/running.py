"""Types of the fixtures, importable by tests without importing the conftest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Compare = Callable[..., list[dict[str, Any]]]
"""`compare(combo, **kwargs)`: the results of `parity.compare.compare` by rank."""
