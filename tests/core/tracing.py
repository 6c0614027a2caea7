"""Recording a step, and what to look for in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hpcompat
from hpcompat.core.spans import Span
from hpcompat.trace import Recording
from training import batch, train


def traced(model: Any, body: Callable[[], object] | None = None) -> Recording:
    """Of ``body``, by default one forward and backward."""
    with hpcompat.trace(model) as recording:
        train(model, batch()) if body is None else body()
    return recording


def counted(recording: Recording) -> Counter[tuple[str, str, str]]:
    return Counter((span.lane, span.name, span.unit) for span in recording.spans)


def of_unit(recording: Recording, unit: str, name: str) -> list[Span]:
    return sorted(
        (span for span in recording.spans if (span.unit, span.name) == (unit, name)), key=lambda s: s.start_ns
    )
