"""The table as Markdown, for docs; the spec; and the public reports."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from hpcompat_conformance import spec
from hpcompat_conformance.case import Case, all_cases
from hpcompat_conformance.document import Document
from hpcompat_conformance.public_reports import public_reports
from hpcompat_conformance.rendering import table, templating


def write(document: Document, folder: Path) -> list[Path]:
    """``conformance.md``."""
    text = _render("conformance.md.j2", document=document, groups=table.groups(document), items=table.items(document))
    return templating.save(text, folder / "conformance.md")


def write_features(document: Document, folder: Path) -> list[Path]:
    """``features.md``: the items of the API alone."""
    text = _render("features.md.j2", document=document, items=table.items(document))
    return templating.save(text, folder / "features.md")


def spec_page(version: str = spec.VERSION, *, cases: Sequence[Case] | None = None) -> str:
    """All clauses with their sources and the cases (default: those of the suite) that check them."""
    clauses = spec.clauses(version).values()
    checked_by: dict[str, list[str]] = {clause.id: [] for clause in clauses}
    for case in all_cases() if cases is None else cases:
        checked_by.setdefault(case.clause, []).append(case.id)
    groups = [(name, list(members)) for name, members in groupby(clauses, key=lambda clause: clause.group)]
    num_cases = {name: sum(len(checked_by[clause.id]) for clause in members) for name, members in groups}
    return _render(
        "spec.md.j2",
        version=version,
        groups=groups,
        checked_by=checked_by,
        num_cases=num_cases,
        levels=spec.LEVELS,
    )


def public_reports_page(version: str = spec.VERSION, *, cases: Sequence[Case] | None = None) -> str:
    """All public reports with the clauses and the cases (default: those of the suite) that are about them."""
    reports = public_reports().values()
    known = all_cases() if cases is None else cases
    guards = {report.id: [case for case in known if report.id in case.reports] for report in reports}
    checked = {report.id: {case.clause for case in guards[report.id]} for report in reports}
    clauses = {
        report.id: [
            clause
            for clause in spec.clauses(version).values()
            if clause.id in checked[report.id] or report.id in templating.cited(clause.source)
        ]
        for report in reports
    }
    groups = [(name, list(members)) for name, members in groupby(reports, key=lambda report: report.repository)]
    return _render("reports.md.j2", groups=groups, clauses=clauses, cases=guards)


def _render(template: str, **values: object) -> str:
    return templating.environment(html=False).get_template(template).render(table=table, **values)
