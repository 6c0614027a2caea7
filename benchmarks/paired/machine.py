"""What a benchmark's numbers depend on besides the code, and numbers as JSON takes them."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any


def describe_machine(device: str | None = None) -> dict[str, Any]:
    """The device, by default the processor, and what else is going on."""
    return {
        "device": device or _processor_name(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def without_nan(value: Any) -> Any:
    """JSON has no NaN: a ratio that does not exist is null."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
