"""JUnit XML, which CI systems show: a suite for each implementation."""

from __future__ import annotations

import re
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from hpcompat_conformance import spec
from hpcompat_conformance.document import Document
from hpcompat_conformance.results import Result, Run

# What XML 1.0 has no way to write.
UNWRITABLE = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(document: Document, folder: Path) -> list[Path]:
    """``conformance.xml``. An xfail, a waived result and a skip are skipped tests; a complaint is a failed one."""
    xml = JUnitXml("conformance")
    for run in document.runs:
        xml.add_testsuite(_suite(run, version=document.spec))
    if document.complaints:
        suite = TestSuite("run")
        suite.add_testcases([_complaint(text) for text in document.complaints])
        xml.add_testsuite(suite)
    path = folder / "conformance.xml"
    folder.mkdir(parents=True, exist_ok=True)
    xml.write(str(path), pretty=True)
    return [path]


def _suite(run: Run, *, version: str) -> TestSuite:
    suite = TestSuite(run.implementation)
    for name, value in run.versions.items():
        suite.add_property(name, value)
    if run.origin is not None:
        for name in ("spec", "seed", "machine", "command"):
            suite.add_property(name, str(getattr(run.origin, name)))
        suite.timestamp = run.origin.date
    suite.add_testcases([_case(result, version=version) for result in run.results])
    return suite


def _case(result: Result, *, version: str) -> TestCase:
    clause = spec.clauses(version)[result.clause]
    test = TestCase(f"{result.id} on {result.procs}", classname=clause.id, time=round(result.seconds, 3))
    if result.result == "pass":
        return test
    if result.result in ("skip", "xfail", "waived"):
        kind: type[Skipped | Failure | Error] = Skipped
        note = f"{result.result}: {result.reason or result.message}"
    else:
        kind = Error if result.result in ("error", "timeout") else Failure
        note = f"{result.result}: {clause.id}: {clause.sentence}"
    return _explained(test, kind=kind, note=note, text=result.message)


def _complaint(text: str) -> TestCase:
    return _explained(TestCase("complaint", classname="run"), kind=Failure, note=text, text=text)


def _explained(test: TestCase, *, kind: type[Skipped | Failure | Error], note: str, text: str) -> TestCase:
    entry = kind(UNWRITABLE.sub("?", note))
    entry.text = UNWRITABLE.sub("?", text)
    test.result = [entry]
    return test
