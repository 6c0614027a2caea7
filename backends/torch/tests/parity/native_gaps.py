"""Combinations in which native FSDP2 itself raises, with the reason."""

from __future__ import annotations

NATIVE_GAPS: dict[str, str] = {}
