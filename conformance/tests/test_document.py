"""Results as a file, and files of several environments put together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpcompat_conformance import document
from hpcompat_conformance.document import Document
from hpcompat_conformance.results import KINDS, Result, worst


def test_what_is_written_is_read(outcome: Document, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    unsound = replace(outcome, complaints=["a waiver"])
    document.write(unsound, path)
    again = document.read(path)
    assert [replace(run, results=list(run.results)) for run in again.runs] == [
        replace(run, results=list(run.results)) for run in unsound.runs
    ]
    assert again.complaints == ["a waiver"]
    totals = json.loads(path.read_text())["runs"][1]["totals"]
    assert totals == {**dict.fromkeys(KINDS, 1), "pass": 2}
    assert list(totals) == list(KINDS)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for content in ({"format": 0, "runs": []}, {"impl": "x"}, []):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"results\.json to be results of this suite in format 1"):
            document.read(path)


def test_merging(outcome: Document) -> None:
    good, bad = (Document([run], [run.implementation]) for run in outcome.runs)
    merged = document.merge([bad, good])
    assert [run.implementation for run in merged.runs] == ["bad-one", "good-one"]
    assert merged.complaints == ["bad-one", "good-one"]
    with pytest.raises(ValueError, match="each implementation once, but got bad-one, good-one, bad-one"):
        document.merge([merged, bad])
    (run,) = good.runs
    gone = replace(run, results=[Result("m.a", "XXX-01", 1, "pass", 0.0)])
    with pytest.raises(ValueError, match="as it is here, but got XXX-01"):
        document.merge([Document([gone])])
    assert run.origin is not None
    other = Document([replace(run, origin=replace(run.origin, spec="2027.01"))])
    with pytest.raises(ValueError, match=r"one version of the spec, but got 2026\.12, 2027\.01"):
        document.merge([bad, other])


def test_what_is_ok(outcome: Document) -> None:
    good, bad = outcome.runs
    assert Document([good]).ok
    assert not Document([good, bad]).ok
    assert not Document([good], complaints=["a waiver"]).ok
    assert not Document([good, replace(good, results=[])]).ok
    assert not Document([]).ok


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (("pass", "pass"), "pass"),
        (("pass", "skip"), "skip"),
        (("xfail", "skip", "pass"), "xfail"),
        (("waived", "xfail"), "waived"),
        (("xpass", "waived"), "xpass"),
        (("fail", "xpass"), "fail"),
        (("error", "fail"), "error"),
        (("timeout", "error"), "timeout"),
        ((), "not run"),
    ],
)
def test_the_worst_of_several(kinds: tuple[str, ...], state: str) -> None:
    assert worst(Result("m.a", "ACC-01", 1, kind, 0.0) for kind in kinds) == state
