"""The table as one HTML file that needs nothing else: styles and script are in it, and it works without a network."""

from __future__ import annotations

from pathlib import Path

from hpcompat_conformance import spec
from hpcompat_conformance.case import all_cases
from hpcompat_conformance.document import Document
from hpcompat_conformance.rendering import table, templating
from hpcompat_conformance.results import BY_SEVERITY, NOT_RUN


def write(document: Document, folder: Path) -> list[Path]:
    """``conformance.html``."""
    return templating.save(render(document), folder / "conformance.html")


def render(document: Document) -> str:
    """The page."""
    groups = table.groups(document)
    states = {cell.state for _, rows in groups for row in rows for cell in row.cells}
    template = templating.environment(html=True).get_template("conformance.html.j2")
    return template.render(
        document=document,
        groups=groups,
        items=table.items(document),
        table=table,
        states=[state for state in (*BY_SEVERITY, NOT_RUN) if state in states],
        levels=spec.LEVELS,
        reports={case.id: case.reports for case in all_cases()},
    )
