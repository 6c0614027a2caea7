"""A badge for each implementation: how many of the clauses that it must keep pass."""

from __future__ import annotations

from pathlib import Path

from hpcompat_conformance.document import Document
from hpcompat_conformance.rendering import table, templating

# In pixels, of an 11 px sans-serif: on average, with some to spare.
CHARACTER_WIDTH = 6.6
PADDING = 12
GOOD, MIDDLING, BAD = "#2e7d32", "#a15c00", "#b3261e"
MIDDLING_SHARE = 0.9


def write(document: Document, folder: Path) -> list[Path]:
    """``conformance-<implementation>.svg``."""
    written = []
    for run in document.runs:
        name = f"conformance-{run.implementation}.svg"
        written += templating.save(render(document, implementation=run.implementation), folder / name)
    return written


def render(document: Document, *, implementation: str) -> str:
    """The SVG."""
    must = [score for score in table.scores(document, implementation) if score.level == "must"]
    passed, total = (must[0].passed, must[0].total) if must else (0, 0)
    share = passed / total if total else 0.0
    color = GOOD if share == 1 else MIDDLING if share >= MIDDLING_SHARE else BAD
    label, value = f"FSDP2 spec {document.spec}", f"{implementation} {passed}/{total}"
    widths = [round(len(text) * CHARACTER_WIDTH) + PADDING for text in (label, value)]
    template = templating.environment(html=True).get_template("badge.svg.j2")
    return template.render(label=label, value=value, left=widths[0], right=widths[1], color=color)
