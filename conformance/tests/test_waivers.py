"""Failures to live with until a day or a version, and that this comes to an end."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from hpcompat_conformance.case import all_cases
from hpcompat_conformance.results import Result, Run
from hpcompat_conformance.waivers import Waiver, load_waivers, stale_waivers

TODAY = date(2026, 12, 1)
CASE = next(case for case in all_cases() if case.id == "reduce.factors_under_hsdp")
WAIVER = Waiver("r", case=CASE.id, until=TODAY)


def waives(waiver: Waiver, *, kind: str = "fail", case: str = CASE.id, versions: dict[str, str] | None = None) -> bool:
    result = Result(case, CASE.clause, 4, kind, 0.0)
    versions = {"toy": "1.5"} if versions is None else versions
    return waiver.applies(result, implementation="toy", versions=versions, today=TODAY)


@pytest.mark.parametrize("kind", ["fail", "error", "timeout"])
def test_bad_results_are_waived(kind: str) -> None:
    assert waives(WAIVER, kind=kind)


@pytest.mark.parametrize("kind", ["pass", "xfail", "xpass", "skip"])
def test_other_results_are_not(kind: str) -> None:
    assert not waives(WAIVER, kind=kind)


def test_bounds() -> None:
    assert waives(replace(WAIVER, case="", clause=CASE.clause), case="any.other")
    assert not waives(WAIVER, case="any.other")
    assert not waives(replace(WAIVER, until=date(2026, 11, 30)))
    assert waives(replace(WAIVER, implementations=("other", "toy")))
    assert not waives(replace(WAIVER, implementations=("other",)))
    by_version = replace(WAIVER, until=None, versions={"toy": "<2"})
    assert waives(by_version)
    assert not waives(by_version, versions={"toy": "2.0"})
    assert not waives(by_version, versions={})


def stale(waiver: Waiver, *kinds: str, **options: Any) -> list[str]:
    """With one result of each of these kinds, on as many numbers of processes as the case has if it is one."""
    results = [Result(CASE.id, CASE.clause, n, kind, 0.0) for kind in kinds for n in CASE.procs]
    run = Run("toy", {"toy": "1.5"}, results)
    return stale_waivers(
        [waiver], runs=[run], known=[CASE], implementations=["toy", "other"], **{"today": TODAY, **options}
    )


def test_a_needed_waiver_is_not_stale() -> None:
    assert stale(WAIVER, "waived") == []


@pytest.mark.parametrize(
    ("waiver", "kinds", "complaint"),
    [
        (replace(WAIVER, case="no.such"), ("fail",), "case no.such names nothing"),
        (replace(WAIVER, case="", clause="XXX-01"), ("fail",), "clause XXX-01 names nothing"),
        (replace(WAIVER, implementations=("toi",)), ("waived",), "names no implementation with 'toi'"),
        (replace(WAIVER, until=date(2026, 11, 30)), ("fail",), "has ended on 2026-11-30"),
        (replace(WAIVER, until=None, versions={"toy": "<1"}), ("fail",), "has ended with the versions of toy"),
        (WAIVER, ("pass",), "covers nothing that fails"),
        (WAIVER, ("xfail",), "covers nothing that fails"),
    ],
)
def test_stale_waivers(waiver: Waiver, kinds: tuple[str, ...], complaint: str) -> None:
    (text,) = stale(waiver, *kinds)
    assert text.startswith("expected waivers that are needed, but that of ")
    assert complaint in text


def test_nothing_is_said_about_what_was_not_run() -> None:
    assert stale(WAIVER) == []
    assert stale(replace(WAIVER, implementations=("other",)), "pass") == []
    assert stale(replace(WAIVER, until=None, versions={"a_package_of_others": "<2"}), "pass") == []
    two = replace(CASE, procs=(*CASE.procs, 64))
    assert stale(WAIVER, "pass") != []
    run = Run("toy", {}, [Result(CASE.id, CASE.clause, n, "pass", 0.0) for n in CASE.procs])
    assert stale_waivers([WAIVER], runs=[run], known=[two], implementations=["toy"], today=TODAY) == []


def test_waivers_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "waivers.json"
    entries = [
        {"case": "a.b", "reason": "r", "until": "2026-12-01"},
        {"clause": "ACC-01", "reason": "r", "versions": {"toy": "<2"}, "implementations": ["toy"], "link": "l"},
    ]
    path.write_text(json.dumps({"waivers": entries}))
    assert load_waivers(path) == [
        Waiver("r", case="a.b", until=TODAY),
        Waiver("r", clause="ACC-01", versions={"toy": "<2"}, implementations=("toy",), link="l"),
    ]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"case": "a.b", "until": "2026-12-01"}, "a reason and either a case or a clause"),
        ({"reason": "r", "until": "2026-12-01"}, "a reason and either a case or a clause"),
        ({"case": "a.b", "clause": "ACC-01", "reason": "r", "until": "2026-12-01"}, "a reason and either"),
        ({"case": "a.b", "reason": "r", "until": "2026-12-01", "till": 1}, "a reason and either"),
        ({"case": "a.b", "reason": "r"}, "an end, by 'until' or 'versions'"),
        ({"case": "a.b", "reason": "r", "until": "some day"}, "some day"),
    ],
)
def test_half_a_waiver_is_refused(entry: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps({"waivers": [entry]}))
    with pytest.raises(ValueError, match=complaint):
        load_waivers(path)
