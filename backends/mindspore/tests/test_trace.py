"""Tracing a real model on two ranks: the same bits, the whole schedule, files that the command reads."""

from __future__ import annotations

from pathlib import Path

import pytest

import ms_traced
from hpcompat.cli import main
from hpcompat_conformance.pytest_plugin import Ranks


@pytest.mark.parametrize(("shape", "reduced"), [((2,), "reduce-scatter"), ((2, 1), "all-reduce")])
def test_a_traced_step_is_the_same_step(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[int, ...], reduced: str
) -> None:
    results = ranks(2).run(ms_traced.run, shape=shape, out=tmp_path)
    (events, spans), (others_events, others_spans) = results
    assert events == others_events
    assert spans == others_spans
    gathered = "all-gather" if len(shape) == 1 else "copy"
    for unit, num_gathers in (("", 1), ("layers.0", 2), ("layers.2", 2)):
        # In each of two steps; the root stays unsharded until its gradients are reduced.
        assert spans["gather", gathered, unit] == spans["memory", "unsharded", unit] == 2 * num_gathers
        assert spans["compute", "forward", unit] == spans["compute", "backward", unit] == 2
        assert sum(spans[lane, reduced, unit] for lane in ("reduce", "all-reduce")) == 2
        assert spans["blocked", f"finish {reduced}", unit] == 2
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]
    assert main(["trace", "view", *files, "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("rank 0 of 2  mindspore", "rank 1 of 2  mindspore", "(root)", "layers.2"))
