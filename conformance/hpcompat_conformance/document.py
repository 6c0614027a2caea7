"""Runs of several implementations as one JSON file, which is what all reports are made of.

    {"format": 1, "complaints": [TEXT], "runs": [{"implementation", "versions": {package: version}, "seconds",
     "origin": {"spec", "seed", "procs", "date", "machine", "command"}, "totals": {kind: n},
     "cases": [{"id", "clause", "procs", "result", "seconds", "message", "headline", "reason", "link"}]}]}

Implementations that need different environments run one by one, and `merge` joins their files.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcompat_conformance import spec
from hpcompat_conformance.results import Origin, Result, Run

FORMAT = 1


@dataclass(frozen=True)
class Document:
    """``complaints`` are about the runs as such, a sentence each: one was interrupted, a waiver is not needed."""

    runs: Sequence[Run]
    complaints: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether everything went as expected, and every implementation was checked."""
        return bool(self.runs) and all(run.ok for run in self.runs) and not self.complaints

    @property
    def spec(self) -> str:
        """The version of the spec."""
        versions = [run.origin.spec for run in self.runs if run.origin is not None]
        return versions[0] if versions else spec.VERSION


def machine() -> str:
    """This machine, in words."""
    cores = os.cpu_count() or 1
    return f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"


def write(document: Document, path: Path) -> None:
    """Write it as JSON; parent folders are made."""
    content = {"format": FORMAT, "complaints": list(document.complaints)}
    content["runs"] = [_plain(run) for run in document.runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Document:
    """What `write` wrote. ValueError for a file of another kind."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"expected {path} to be results of this suite in format {FORMAT}, but got something else")
    return Document([_run(entry) for entry in content["runs"]], content["complaints"])


def merge(documents: Sequence[Document]) -> Document:
    """All runs side by side. ValueError for an implementation that is there twice, and for results that are not of one
    spec, the one that is here."""
    runs = [run for document in documents for run in document.runs]
    names = [run.implementation for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"expected each implementation once, but got {', '.join(names)}")
    versions = sorted({document.spec for document in documents})
    if len(versions) > 1:
        raise ValueError(f"expected results for one version of the spec, but got {', '.join(versions)}")
    strangers = {result.clause for run in runs for result in run.results} - set(spec.clauses(versions[0]))
    if strangers:
        names = sorted(strangers)
        raise ValueError(f"expected results for spec {versions[0]} as it is here, but got {', '.join(names)}")
    return Document(runs, [text for document in documents for text in document.complaints])


def _plain(run: Run) -> dict[str, Any]:
    return {
        "implementation": run.implementation,
        "versions": dict(run.versions),
        "seconds": run.seconds,
        "origin": None if run.origin is None else asdict(run.origin),
        "totals": run.totals,
        "cases": [asdict(result) for result in run.results],
    }


def _run(entry: dict[str, Any]) -> Run:
    origin = entry["origin"]
    return Run(
        entry["implementation"],
        entry["versions"],
        [Result(**case) for case in entry["cases"]],
        entry["seconds"],
        None if origin is None else Origin(**{**origin, "procs": tuple(origin["procs"])}),
    )
