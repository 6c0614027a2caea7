"""What users ran into elsewhere: issues and pull requests on GitHub, as data.

Cases, tests and comments cite them as ``owner/name#number``; the data has one line about each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

FILE = "public_reports.json"


@dataclass(frozen=True)
class PublicReport:
    """One of them; ``seen`` says what its author saw, in our words."""

    repository: str
    number: int
    seen: str

    @property
    def id(self) -> str:
        """As it is cited."""
        return f"{self.repository}#{self.number}"

    @property
    def url(self) -> str:
        """GitHub leads from here to a pull request too."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


@cache
def public_reports() -> Mapping[str, PublicReport]:
    """All of them by id, in the order of the file: by repository, then by number."""
    content = json.loads(resources.files("hpcompat_conformance").joinpath(FILE).read_text(encoding="utf-8"))
    found: dict[str, PublicReport] = {}
    for entry in content["reports"]:
        report = PublicReport(**entry)
        if report.id in found:
            raise ValueError(f"expected each public report once, but got {report.id} again in {FILE}")
        found[report.id] = report
    return found
