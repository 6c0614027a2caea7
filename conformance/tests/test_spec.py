"""The spec and the suite's own data hang together."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import hpcompat
from hpcompat_conformance import cases, expected, impl, spec
from hpcompat_conformance.case import all_cases, case
from hpcompat_conformance.impl import adapter_named, adapter_names
from hpcompat_conformance.public_reports import public_reports
from hpcompat_conformance.spec import Clause


def test_every_clause_has_a_case() -> None:
    assert {one.clause for one in all_cases()} == set(spec.clauses())


def test_case_ids_are_unique_and_every_case_runs_somewhere() -> None:
    counts = Counter(one.id for one in all_cases())
    assert [name for name, count in counts.items() if count > 1] == []
    assert all(one.procs and set(one.procs) <= {1, 2, 4} for one in all_cases())


def test_clauses_are_sentences_with_a_source() -> None:
    for clause in spec.clauses().values():
        assert re.fullmatch(r"[A-Z]{3}-\d\d", clause.id)
        assert clause.sentence.endswith(".")
        assert clause.source


def test_an_unknown_level_or_clause_is_refused() -> None:
    with pytest.raises(ValueError, match="in clause ABC-01, but got 'perhaps'"):
        Clause(id="ABC-01", group="g", level="perhaps", sentence="It is.", source="s")
    with pytest.raises(ValueError, match=rf"expected a clause of spec {spec.VERSION}, but got 'ABC-01'"):
        case("ABC-01", procs=(1,))


def test_cases_cite_public_reports_that_are_listed() -> None:
    assert {report for one in all_cases() for report in one.reports} <= set(public_reports())


def test_public_reports_are_in_order_with_a_sentence_each() -> None:
    listed = list(public_reports().values())
    assert listed == sorted(listed, key=lambda report: (report.repository.lower(), report.number))
    assert [report.id for report in listed if not re.fullmatch(r"[A-Z].*\.", report.seen)] == []


@pytest.mark.parametrize("path", sorted(expected.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_expected_gaps_name_cases_reasons_links_and_bounds(path: Path) -> None:
    gaps = expected.load_gaps(path, known_cases=[one.id for one in all_cases()])
    assert path.stem in adapter_names()
    assert json.loads(path.read_text())["implementation"] == path.stem
    for gap in gaps:
        assert gap.reason
        assert gap.saying, f"{gap.case}: another failure of it would be taken for this one"
        assert gap.versions, f"{gap.case}: without a version bound nobody will look at it again"
        assert gap.link.startswith("https://")


@pytest.mark.parametrize("path", sorted(expected.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_case_has_one_expected_gap_for_each_version(path: Path) -> None:
    """Only the first that applies is looked at."""
    gaps = [gap for gap in expected.load_gaps(path, known_cases=[one.id for one in all_cases()]) if gap.case != "*"]
    for minor in range(7, 16):
        versions = {"torch": f"2.{minor}.1", "hyper-parallel": "0.1.0", "mindspore": "2.10.0", "shims": "0"}
        for one in all_cases():
            for procs in one.procs:
                applying = [gap for gap in gaps if gap.applies(one.id, procs=procs, versions=versions)]
                assert len(applying) <= 1, f"{one.id} on {procs} with torch 2.{minor}: {applying}"


def test_cases_name_no_framework_and_no_implementation() -> None:
    for file in Path(cases.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        allowed = sys.stdlib_module_names | {"numpy", "hpcompat_conformance"}
        assert {name for name in imported if name.split(".")[0] not in allowed} == set()
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & {"implementation", "capabilities", "name", "versions"}


def test_adapters_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(
        name="mine", value="hpcompat_conformance.adapters.torch_fsdp2:ADAPTER", group=impl.ENTRY_POINT_GROUP
    )
    monkeypatch.setattr(impl, "entry_points", lambda **selection: EntryPoints([point]).select(**selection))
    names = sorted([*impl.BUILT_IN, "mine"])
    assert adapter_names() == names
    assert adapter_named("mine").load == "hpcompat_conformance.adapters.torch_fsdp2:load"
    with pytest.raises(ValueError, match=f"out of {', '.join(names)}, but got 'yours'"):
        adapter_named("yours")


def test_an_entry_point_that_is_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="mine", value="json:dumps", group=impl.ENTRY_POINT_GROUP)
    monkeypatch.setattr(impl, "entry_points", lambda **selection: EntryPoints([point]).select(**selection))
    with pytest.raises(TypeError, match="to name an Adapter"):
        adapter_named("mine")


def test_items_of_the_api_are_names_of_it() -> None:
    for clause in spec.clauses().values():
        for item in clause.api:
            name, _, argument = item.partition(".")
            owner = hpcompat if hasattr(hpcompat, name) else hpcompat.HSDPModule
            assert hasattr(owner, name), f"{clause.id}: {item}"
            if argument:
                assert argument in inspect.signature(getattr(owner, name)).parameters, f"{clause.id}: {item}"


def test_every_method_and_every_argument_of_the_api_has_a_clause() -> None:
    named = {item for clause in spec.clauses().values() for item in clause.api}
    methods = {name for name in vars(hpcompat.HSDPModule) if not name.startswith("_")}
    # What the first waits for, the end of backward has waited for; the second is another name of a method that has one.
    assert methods - named == {"hsdp_sync_stream", "set_reduce_scatter_divide_factor"}
    assert {"fully_shard", "replicate", "register_fsdp_forward_method", "share_comm_ctx", "trace"} <= named
