"""What a test asserts about the results of a comparison."""

from __future__ import annotations

import math
from typing import Any

from parity.combos import Combo

KINDS = {"loss", "gradient", "parameter", "exp_avg", "exp_avg_sq"}


def check_same_bits(combo: Combo, results: list[dict[str, Any]]) -> None:
    """On every rank both implementations trained, and did the same."""
    assert not failures(results), failures(results)
    check_substance(combo, results)


def failures(results: list[dict[str, Any]]) -> str:
    """What each rank found, rank by rank; empty if nothing."""
    lines = []
    for rank, result in enumerate(results):
        for key in ("ours_error", "theirs_error", "difference"):
            if result[key]:
                lines.append(f"rank {rank} {key}: {result[key]}")
    return "\n".join(lines)


def check_substance(combo: Combo, results: list[dict[str, Any]]) -> None:
    """The comparison was about something: every kind has elements on some rank, every loss is finite, and they move."""
    for kind in KINDS:
        assert sum(result["counts"].get(kind, 0) for result in results) > 0, f"nothing of kind {kind} was compared"
    for result in results:
        losses = result["losses"]
        assert len(losses) >= combo.num_steps * combo.accumulation
        assert all(math.isfinite(loss) for loss in losses), losses
        assert len(set(losses)) > combo.num_steps // 2, losses
