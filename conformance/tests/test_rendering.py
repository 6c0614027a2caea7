"""Reports as files: that each says what came of the run. `test_page` looks at the page in a browser."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml

from hpcompat_conformance import document, rendering, spec
from hpcompat_conformance.case import all_cases
from hpcompat_conformance.document import Document
from hpcompat_conformance.public_reports import public_reports
from hpcompat_conformance.rendering import badge, markdown, page, table, templating
from hpcompat_conformance.results import Result

DOCS = Path(__file__).parents[2] / "docs"


def states(outcome: Document, implementation: str) -> dict[str, str]:
    found = {
        row.clause.id: cell
        for row in table.rows(outcome)
        for cell in row.cells
        if cell.implementation == implementation
    }
    return {identity: f"{cell.state} {cell.share}".strip() for identity, cell in found.items() if cell.results}


def test_the_table_has_every_clause_with_its_worst_result(outcome: Document) -> None:
    assert [row.clause for row in table.rows(outcome)] == list(spec.clauses().values())
    assert states(outcome, "good-one") == dict.fromkeys(("ACC-01", "ACC-02", "ACC-03", "FUS-01"), "pass")
    assert states(outcome, "bad-one") == {
        "ACC-01": "fail 1/2",
        "ACC-02": "xfail 0/1",
        "ACC-03": "pass",
        "FUS-01": "skip 0/1",
        "RED-01": "timeout 0/1",
        "RED-02": "error 0/1",
        "SCH-01": "waived 0/1",
        "SCH-02": "xpass 0/1",
    }


def test_what_needs_a_look_comes_first(outcome: Document) -> None:
    cell = table.rows(outcome)[0].cells[1]
    assert [result.result for result in cell.results] == ["pass", "fail"]
    assert [result.result for result in cell.worst_first] == ["fail", "pass"]


def test_scores_count_what_was_run(outcome: Document) -> None:
    assert table.scores(outcome, "good-one") == [table.Score("must", 3, 3), table.Score("extension", 1, 1)]
    assert table.scores(outcome, "bad-one") == [table.Score("must", 1, 7), table.Score("extension", 0, 1)]


def test_items_of_the_api(outcome: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"ACC-01": ("both",), "ACC-03": ("both", "fine"), "FUS-01": ("half", "Extra"), "ACC-02": ("half",)}
    clauses = {name: spec.Clause(name, "g", "must", "It is.", "s", api) for name, api in about.items()}
    monkeypatch.setattr(spec, "clauses", lambda version=spec.VERSION: clauses)
    found = {item.name: [cell.state for cell in item.cells] for item in table.items(outcome)}
    assert found == {
        "both": ["pass", "fail"],
        "Extra": ["pass", "missing"],
        "fine": ["pass", "pass"],
        "half": ["pass", "xfail"],
    }
    assert list(found) == ["both", "Extra", "fine", "half"]


def test_junit(outcome: Document, tmp_path: Path) -> None:
    (path,) = rendering.writer("junit")(Document(outcome.runs, ["a stale one"]), tmp_path)
    good, bad, whole = JUnitXml.fromfile(str(path))
    assert (good.name, good.tests, good.failures, good.errors, good.skipped) == ("good-one", 4, 0, 0, 0)
    assert (bad.tests, bad.failures, bad.errors, bad.skipped) == (9, 2, 2, 3)
    assert (whole.tests, whole.failures) == (1, 1)
    test = next(test for test in bad if test.name == "m.one on 2")
    assert (test.classname, test.time) == ("ACC-01", 0.2)
    assert test.result[0].message == f"fail: ACC-01: {spec.clauses()['ACC-01'].sentence}"
    assert "worst at (1, 2)" in test.result[0].text


def test_markdown(outcome: Document, tmp_path: Path) -> None:
    (path,) = rendering.writer("md")(Document(outcome.runs, ["a stale one"]), tmp_path)
    lines = path.read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| ACC-01 ")]
    assert row == f"| ACC-01 | must | {spec.clauses()['ACC-01'].sentence} | pass | fail 1/2 |"
    assert lines[lines.index(row) - 2 : lines.index(row)] == [
        "| clause | level | what it says | good-one | bad-one |",
        "|---|---|---|---|---|",
    ]
    assert "- ACC-02, bad-one, xfail: a known gap" in lines
    assert "- RED-01, bad-one, timeout: no answer \\| within 60 s" in lines
    assert "**Not as it should be:** a stale one" in lines
    assert sum(line.startswith("| ") and line.split(" |")[0][2:] in spec.clauses() for line in lines) == len(
        spec.clauses()
    )


def test_features(outcome: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clauses = {"FUS-01": spec.Clause("FUS-01", "g", "must", "It is.", "s", ("comm_fusion",))}
    monkeypatch.setattr(spec, "clauses", lambda version=spec.VERSION: clauses)
    (path,) = rendering.writer("features")(outcome, tmp_path)
    assert "| `comm_fusion` | FUS-01 | pass | missing |" in path.read_text().splitlines()


def test_the_page_needs_nothing_else_and_writes_text_as_text(outcome: Document, tmp_path: Path) -> None:
    (path,) = rendering.writer("html")(Document(outcome.runs, ["a <stale> one"]), tmp_path)
    text = path.read_text()
    for loading in ("<link", "<img", "<script src", "@import", "url(", "fetch("):
        assert loading not in text
    assert "&lt;w&gt; &amp; more" in text
    assert "a &lt;stale&gt; one" in text
    assert "/home/me" not in text
    assert "hpcompat_conformance/cases/reduce.py" in text
    for words in ("spec 2026.12", "torch 2.13.0", "2 cores", "2026-12-01T10:00Z", "hpcompat --impl bad-one", "12.5 s"):
        assert words in text


def test_badges(outcome: Document, tmp_path: Path) -> None:
    paths = rendering.writer("badge")(outcome, tmp_path)
    assert [path.name for path in paths] == ["conformance-good-one.svg", "conformance-bad-one.svg"]
    titles = [ElementTree.parse(path).getroot()[0].text for path in paths]
    assert titles == ["FSDP2 spec 2026.12: good-one 3/3", "FSDP2 spec 2026.12: bad-one 1/7"]
    assert badge.GOOD in paths[0].read_text()
    assert badge.BAD in paths[1].read_text()


@pytest.mark.parametrize(
    ("kinds", "color"),
    [("PPPPPPPPPP", badge.GOOD), ("PPPPPPPPPF", badge.MIDDLING), ("PPPPPPPPFF", badge.BAD), ("", badge.BAD)],
)
def test_the_colour_of_a_badge(outcome: Document, kinds: str, color: str) -> None:
    must = [clause.id for clause in spec.clauses().values() if clause.level == "must"]
    results = [
        Result("m.a", clause, 1, "pass" if kind == "P" else "fail", 0.0)
        for clause, kind in zip(must, kinds, strict=False)
    ]
    extension = Result("m.b", "FUS-01", 1, "pass", 0.0)
    run = replace(outcome.runs[0], results=[*results, extension])
    text = badge.render(Document([run]), implementation=run.implementation)
    assert color in text
    assert f"good-one {kinds.count('P')}/{len(kinds)}" in text


def test_json_can_be_merged(outcome: Document, tmp_path: Path) -> None:
    (path,) = rendering.writer("json")(outcome, tmp_path)
    assert [run.implementation for run in document.read(path).runs] == ["good-one", "bad-one"]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "junitparser", None)
    monkeypatch.delitem(sys.modules, "hpcompat_conformance.rendering.junit", raising=False)
    with pytest.raises(
        ValueError, match=r"expected junitparser for --report junit.*pip install 'hpcompat\[conformance\]'"
    ):
        rendering.writer("junit")


def test_paths_begin_at_the_package() -> None:
    line = '  File "/home/me/src/backends/torch/hpcompat_torch/param.py", line 3, in f'
    assert templating.shortened(line) == '  File "hpcompat_torch/param.py", line 3, in f'
    assert templating.shortened('  File "/usr/lib/python3.11/threading.py", line 3') == '  File "threading.py", line 3'


def test_reports_become_links() -> None:
    assert templating.linked_markdown("x; a/b-c#12") == "x; [a/b-c#12](https://github.com/a/b-c/issues/12)"
    assert str(templating.linked_html("<x>; a/b#1")) == '&lt;x&gt;; <a href="https://github.com/a/b/issues/1">a/b#1</a>'


def test_the_page_of_the_spec_is_up_to_date() -> None:
    assert (DOCS / "spec.md").read_text() == markdown.spec_page(), "run: hpcompat conformance --spec-page docs/spec.md"


def test_the_page_of_the_spec_has_all_clauses_and_cases() -> None:
    text = markdown.spec_page(cases=[])
    assert "Cases:" not in text
    for clause in spec.clauses().values():
        assert f"- **{clause.id}** ({clause.level}) {clause.sentence}\n" in text


def test_the_page_of_public_reports_is_up_to_date() -> None:
    assert (DOCS / "reports.md").read_text() == markdown.public_reports_page(), (
        "run: hpcompat conformance --public-reports-page docs/reports.md"
    )


def test_the_page_of_public_reports_has_all_of_them_once() -> None:
    text = markdown.public_reports_page()
    for report in public_reports().values():
        assert text.count(f"- [#{report.number}]({report.url}) {report.seen}\n") == 1


def test_the_page_of_public_reports_names_clauses_that_cite_and_cases_that_guard() -> None:
    cases = [replace(all_cases()[0], id="m.one", clause="NUM-03", reports=("pytorch/pytorch#183207",))]
    _, _, after = markdown.public_reports_page(cases=cases).partition("[#183207]")
    about = after.partition("\n- ")[0].splitlines()[1:]
    assert about == [
        "  - Clauses: [NRM-04](spec.md#norms), [NUM-03](spec.md#numerics), [OPT-01](spec.md#optimizer)",
        "  - Cases: `m.one`",
    ]


def test_the_page_of_results_names_the_reports_of_a_case(outcome: Document) -> None:
    assert page.render(outcome).count("<h3>") == 12
    run = outcome.runs[0]
    result = replace(run.results[0], id="entry.a_registered_method_trains", clause="ENT-01")
    assert ' <span class="source"><a href="https://github.com/pytorch/pytorch/issues/125394">' in page.render(
        Document([replace(run, results=[result])])
    )
