"""``hpcompat compare`` on two recordings, for the tests of every framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcompat.cli import main


def compared(one: Path, other: Path, *options: str, status: int) -> dict[str, Any]:
    """What the command found, and ended with ``status``."""
    out = one.parent / "found.json"
    assert main(["compare", str(one), str(other), "--json", str(out), *options]) == status
    found: dict[str, Any] = json.loads(out.read_text())
    return found
