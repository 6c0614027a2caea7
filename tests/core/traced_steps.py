"""Two traced steps on two ranks: the same bits as without the trace, the whole schedule, files that the command reads.

The model of either framework has two layers that are units, in a root that is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hpcompat
from hpcompat.cli import main
from hpcompat.core.events import Event

Spans = Counter[tuple[str, str, str]]
Result = tuple[list[Event], Spans]
# On two ranks: the shape of the mesh, and the collective that reduces.
SHAPES: list[tuple[tuple[int, ...], str]] = [((2,), "reduce-scatter"), ((2, 1), "all-reduce")]


def run(make: Callable[[], Any], train: Callable[[Any], list[bytes]], *, out: Path) -> Result:
    """On a rank. ``train`` gives the losses, gradients and parameters of two steps; the rank's file is written."""
    untraced = train(make())
    model = make()
    with hpcompat.record_events() as events, hpcompat.trace(model) as recording:
        traced = train(model)
    assert len(traced) > 20
    assert traced == untraced
    assert recording.events == events
    assert not [span for span in recording.spans if span.note or span.end_ns < span.start_ns]
    recording.to_chrome(out / f"rank{recording.rank}.json")
    return recording.events, Counter((span.lane, span.name, span.unit) for span in recording.spans)


def check(results: list[Result], *, layers: tuple[str, str], shape: tuple[int, ...], reduced: str) -> None:
    """What the ranks returned from :func:`run`."""
    (events, spans), (others_events, others_spans) = results
    assert events == others_events
    assert spans == others_spans
    gathered = "all-gather" if len(shape) == 1 else "copy"
    for unit, num_gathers in zip(("", *layers), (1, 2, 2), strict=True):
        # In each of two steps; the root stays unsharded until its gradients are reduced.
        assert spans["gather", gathered, unit] == spans["memory", "unsharded", unit] == 2 * num_gathers
        assert spans["compute", "forward", unit] == spans["compute", "backward", unit] == 2
        assert sum(spans[lane, reduced, unit] for lane in ("reduce", "all-reduce")) == 2
        assert spans["blocked", f"finish {reduced}", unit] == 2


def check_command(files: list[str], *, backend: str, layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "view", *files, "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in (f"rank 0 of 2  {backend}", f"rank 1 of 2  {backend}", "(root)", layer))
