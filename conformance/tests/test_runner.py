"""The runner and its reports on a toy implementation: each kind of result once."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcompat_conformance import report, results, runner, spec
from hpcompat_conformance.case import Case, case, cases_of
from hpcompat_conformance.checks import check_array, check_equal
from hpcompat_conformance.expected import Gap, load_gaps
from hpcompat_conformance.impl import Adapter, Implementation
from hpcompat_conformance.results import Result
from hpcompat_conformance.run_context import Context
from hpcompat_conformance.waivers import Waiver

BARE = "hpcompat_conformance.bare:set_up"
LINK = "https://example.org/1"


def load_toy() -> Implementation:
    framework: Any = SimpleNamespace(name="toy")
    api: Any = SimpleNamespace(answer=42)
    return Implementation(api, framework, frozenset({"answer"}), {"toy": "1.5"})


def load_broken() -> Implementation:
    raise RuntimeError("the toy is broken")


TOY = Adapter(name="toy", modules=(), worker_setup=BARE, load=load_toy)
BROKEN = Adapter(name="broken", modules=(), worker_setup=BARE, load=load_broken)


@case("SCH-01", procs=(1, 2), requires=("answer",))
def passes(ctx: Context) -> None:
    check_equal(ctx.api.answer, 42, what="answer")  # type: ignore[attr-defined]


@case("SCH-02", procs=(1, 2))
def fails_on_the_last_rank(ctx: Context) -> None:
    check_equal(ctx.rank, min(ctx.rank, ctx.world_size - 2), what="rank")


@case("SCH-03", procs=(2,), requires=("answer", "question"))
def is_skipped(ctx: Context) -> None:
    raise AssertionError("expected not to be called")


@case("SCH-04", procs=(2,))
def hangs(ctx: Context) -> None:
    threading.Event().wait()


@case("SCH-05", procs=(2,))
def kills_a_rank(ctx: Context) -> None:
    if ctx.rank == 0:
        os._exit(5)


@case("SCH-06", procs=(2,))
def compares_arrays(ctx: Context) -> None:
    expected = np.array([1, 2], dtype=np.float32)
    check_array(np.array([1, ctx.rank], dtype=np.float32), expected, what="array")


def run_toys(*ids: str, adapter: Adapter = TOY, **options: Any) -> results.Run:
    known = {found.id.partition(".")[2]: found for found in cases_of(sys.modules[__name__])}
    plan = runner.Plan(adapter, [known[name] for name in ids], **{"procs": (2,), **options})
    return runner.run(plan)


def test_cases_are_found_in_order_with_their_ids() -> None:
    found = cases_of(sys.modules[__name__])
    names = ["passes", "fails_on_the_last_rank", "is_skipped", "hangs", "kills_a_rank", "compares_arrays"]
    assert [one.id for one in found] == [f"test_runner.{name}" for name in names]
    assert found[2] == Case("test_runner.is_skipped", "SCH-03", (2,), ("answer", "question"), (), found[2].reference)


def test_each_kind_of_result_and_that_the_run_goes_on() -> None:
    run = run_toys("fails_on_the_last_rank", "is_skipped", "kills_a_rank", "passes")
    assert [result.result for result in run.results] == ["fail", "skip", "error", "pass"]
    fail, skip, error, passed = (result.message for result in run.results)
    assert "rank 1 raised CheckFailed" in fail
    assert "rank: expected 0, but got 1" in fail
    assert skip == "no question"
    assert "rank 0 ended with exit code 5" in error
    assert passed == ""
    assert run.totals == {
        "pass": 1,
        "fail": 1,
        "xfail": 0,
        "xpass": 0,
        "skip": 1,
        "waived": 0,
        "error": 1,
        "timeout": 0,
    }
    assert run.versions == {"toy": "1.5"}
    assert not run.ok


def test_a_case_that_hangs_is_a_timeout_with_the_stacks_of_all_ranks() -> None:
    run = run_toys("hangs", timeout=1.0)
    assert [result.result for result in run.results] == ["timeout"]
    assert "no answer from ranks [0, 1] within 1 s" in run.results[0].message
    assert run.results[0].message.count("in hangs") == 2
    assert not run.ok


def test_a_case_runs_on_the_numbers_of_processes_that_both_sides_name() -> None:
    run = run_toys("passes", "is_skipped", procs=(2, 1, 4))
    assert [(result.id.partition(".")[2], result.procs) for result in run.results] == [
        ("passes", 1),
        ("passes", 2),
        ("is_skipped", 2),
    ]
    assert run.ok


def test_an_implementation_that_does_not_load_is_an_error_for_every_case() -> None:
    run = run_toys("passes", "fails_on_the_last_rank", adapter=BROKEN)
    assert [result.result for result in run.results] == ["error", "error"]
    assert all("the toy is broken" in result.message for result in run.results)


def test_nothing_run_is_not_ok() -> None:
    assert not run_toys().ok


def gap(name: str, **options: Any) -> Gap:
    return Gap(f"test_runner.{name}", reason="it is a toy", link=LINK, **options)


def test_an_expected_failure_and_an_unexpected_pass() -> None:
    gaps = [gap("fails_on_the_last_rank"), gap("kills_a_rank")]
    run = run_toys("fails_on_the_last_rank", "kills_a_rank", gaps=gaps)
    assert [result.result for result in run.results] == ["xfail", "xfail"]
    assert run.results[0].message.startswith(f"it is a toy ({LINK})\n")
    assert run.ok
    run = run_toys("passes", gaps=[gap("passes")])
    assert [result.result for result in run.results] == ["xpass"]
    assert "remove the entry" in run.results[0].message
    assert not run.ok


@pytest.mark.parametrize(
    ("options", "result"),
    [
        ({"procs": (2,)}, "xfail"),
        ({"procs": (1, 4)}, "fail"),
        ({"versions": {"toy": "<2"}}, "xfail"),
        ({"versions": {"toy": ">=2"}}, "fail"),
        ({"versions": {"toy": "<2", "other": "<2"}}, "fail"),
        ({"saying": "expected 0, but got 1"}, "xfail"),
        ({"saying": "something else"}, "fail"),
    ],
)
def test_bounds_of_an_expected_failure(options: dict[str, Any], result: str) -> None:
    run = run_toys("fails_on_the_last_rank", gaps=[gap("fails_on_the_last_rank", **options)])
    assert [one.result for one in run.results] == [result]


def test_a_gap_does_not_turn_a_skip_into_anything() -> None:
    assert [one.result for one in run_toys("is_skipped", gaps=[gap("is_skipped")]).results] == ["skip"]


def test_gaps_are_read_from_a_file(tmp_path: Path) -> None:
    entry = {"case": "a.b", "procs": [2], "versions": {"toy": "<2"}, "reason": "r", "link": LINK}
    path = tmp_path / "toy.json"
    path.write_text(json.dumps({"implementation": "toy", "gaps": [entry]}))
    assert load_gaps(path, known_cases=["a.b"]) == [Gap("a.b", "r", LINK, procs=(2,), versions={"toy": "<2"})]
    with pytest.raises(ValueError, match=r"toy\.json to name cases of the suite, but got 'a\.b': remove the entry"):
        load_gaps(path, known_cases=["a.c"])
    path.write_text(json.dumps({"gaps": [{**entry, "case": ["a.b", "a.c"], "versions": {}}]}))
    assert [one.case for one in load_gaps(path, known_cases=["a.b", "a.c"])] == ["a.b", "a.c"]
    path.write_text(json.dumps({"gaps": [{**entry, "versions": {"toy": "before 2"}}]}))
    with pytest.raises(ValueError, match=r"toy\.json to bound toy by version specifiers .* but got 'before 2'"):
        load_gaps(path, known_cases=["a.b"])


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("2.8.0+cu128", False),
        ("2.9.0.dev20250901", True),
        ("2.9.0+cu128", True),
        ("2.14.1+cu130", True),
        ("2.15.0.dev20270101+cpu", False),
        ("2.15.0", False),
    ],
)
def test_a_range_of_versions_holds_for_builds_and_previews(version: str, holds: bool) -> None:
    bounded = gap("passes", versions={"torch": ">=2.9.dev0,<2.15"})
    assert bounded.applies(bounded.case, procs=1, versions={"torch": version}) == holds
    assert not bounded.applies(bounded.case, procs=1, versions={"numpy": version})


def test_a_run_says_what_it_ran_on_and_the_headline_of_each_failure() -> None:
    run = run_toys("passes", "fails_on_the_last_rank", "is_skipped")
    assert (run.implementation, run.versions) == ("toy", {"toy": "1.5"})
    passed, failed, skipped = run.results
    assert passed == Result("test_runner.passes", "SCH-01", 2, "pass", passed.seconds)
    assert failed.headline == "CheckFailed: rank: expected 0, but got 1"
    assert skipped.message == "no question"
    assert run.seconds >= passed.seconds + failed.seconds > 0


def test_a_waiver_covers_a_failure_of_any_kind() -> None:
    waivers = [Waiver("later", clause=clause, until=date(2026, 12, 1)) for clause in ("SCH-01", "SCH-02", "SCH-05")]
    names = ("passes", "fails_on_the_last_rank", "kills_a_rank")
    run = run_toys(*names, waivers=waivers, today=date(2026, 12, 1))
    assert [result.result for result in run.results] == ["pass", "waived", "waived"]
    assert run.results[1].message.startswith("waived, with 2026-12-01: later\n")
    assert "expected 0, but got 1" in run.results[1].message
    assert run.ok
    late = run_toys(*names, waivers=waivers, today=date(2026, 12, 2))
    assert [result.result for result in late.results] == ["pass", "fail", "error"]


def test_an_expected_failure_needs_no_waiver() -> None:
    waivers = [Waiver("later", clause="SCH-02", until=date(2026, 12, 1))]
    run = run_toys(
        "fails_on_the_last_rank", gaps=[gap("fails_on_the_last_rank")], waivers=waivers, today=date(2026, 12, 1)
    )
    assert [result.result for result in run.results] == ["xfail"]


def test_the_values_of_a_failed_comparison_are_dumped(tmp_path: Path) -> None:
    run_toys("passes", "fails_on_the_last_rank", "compares_arrays", dump=tmp_path)
    names = {folder.name for folder in (tmp_path / "toy").iterdir()}
    assert names == {"test_runner.fails_on_the_last_rank-on-2", "test_runner.compares_arrays-on-2"}
    folder = runner.dump_folder(tmp_path, implementation="toy", case="test_runner.fails_on_the_last_rank", procs=2)
    assert (folder / "rank1.txt").read_text() == "rank: expected 0, but got 1\n"
    assert (folder / "rank1.actual.txt").read_text() == "1\n"
    assert "rank 1 raised CheckFailed" in (folder / "message.txt").read_text()
    assert not list(folder.glob("rank0*"))
    folder = runner.dump_folder(tmp_path, implementation="toy", case="test_runner.compares_arrays", procs=2)
    for rank in (0, 1):
        assert np.load(folder / f"rank{rank}.expected.npy").tolist() == [1.0, 2.0]
        assert np.load(folder / f"rank{rank}.actual.npy").tolist() == [1.0, float(rank)]


def test_the_listener_hears_of_every_case_in_turn() -> None:
    heard: list[str] = []

    class Ear:
        def started(self, case: Case, *, procs: int) -> None:
            heard.append(f"{case.id} on {procs}")

        def finished(self, result: Result) -> None:
            heard.append(result.result)

    plan = runner.Plan(TOY, cases_of(sys.modules[__name__])[:2], procs=(1,))
    runner.run(plan, listener=Ear())
    assert heard == ["test_runner.passes on 1", "pass", "test_runner.fails_on_the_last_rank on 1", "fail"]


def test_ctrl_c_ends_the_run_with_the_results_so_far() -> None:
    class Impatient(runner.Silence):
        def finished(self, result: Result) -> None:
            raise KeyboardInterrupt

    plan = runner.Plan(TOY, cases_of(sys.modules[__name__])[:2], procs=(1,))
    run = runner.run(plan, listener=Impatient())
    assert [result.result for result in run.results] == ["pass"]
    assert run.versions == {"toy": "1.5"}


def test_console_report_shows_clauses_counts_and_failures() -> None:
    run = results.Run(
        "toy",
        {"toy": "1.5"},
        [
            Result("m.a", "SCH-01", 1, "pass", 0.25),
            Result("m.b", "SCH-01", 1, "pass", 0.75),
            Result("m.a", "SCH-01", 2, "fail", 0.5, "list[int] is [not] markup"),
        ],
        2.5,
    )
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    with report.LiveProgress(console, total=3) as progress:
        for result in run.results:
            progress.finished(result)
    console.print(report.summary_table(run))
    console.print(report.totals_text(run))
    console.print(report.slowest_table([run]))
    text = console.export_text()
    assert "FAIL m.a on 2" in text
    assert "list[int] is [not] markup" in text
    row = next(line for line in text.splitlines() if "SCH-01" in line and "must" in line)
    assert "pass 2" in row
    assert "fail" in row
    assert "toy: 2 pass, 1 fail in 1.5 s (2.5 s with the start of processes)" in text
    slowest = text[text.index("the 3 slowest") :].split()
    assert slowest.index("0.75") < slowest.index("0.50") < slowest.index("0.25")


def test_only_the_ten_slowest_are_shown() -> None:
    run = results.Run("toy", {}, [Result(f"m.case{n}", "SCH-01", 1, "pass", n / 100) for n in range(12)])
    rows = report.slowest_table([run])
    assert rows.row_count == 10
    assert list(rows.columns[2].cells)[:2] == ["m.case11", "m.case10"]


def test_coverage_counts_clauses_and_cases() -> None:
    found = cases_of(sys.modules[__name__])
    text = report.coverage_text(found)
    assert f"{len(spec.clauses())} clauses, {len(found)} cases; 1 to 1 for a clause" in text
    assert f"{len(found) / len(spec.clauses()):.2f} on average" in text
    assert "SCH-07" in text
    assert "SCH-06" not in text
    assert text.count("-") >= len(spec.clauses()) - len(found)
