"""What sources and pages cite is there: clauses of the spec, public reports, pages and headings, files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hpcompat_conformance import spec
from hpcompat_conformance.public_reports import FILE as PUBLIC_REPORTS
from hpcompat_conformance.public_reports import public_reports

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = (".py", ".md", ".toml", ".json")

CLAUSE = re.compile(r"\b[A-Z]{3}-\d{2,}\b")
GROUP = re.compile(r"\b([A-Z]{3})-\*")
REPORT = re.compile(r"(?<![\w/.-])[\w.-]+/[\w.-]+#\d+\b")
REPORT_URL = re.compile(r"\bgithub\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\b")
# ``repository#12``, unless it is the text of a link, and ``issue 12``: of which repository?
NO_OWNER = re.compile(r"(?<![\w/.-])[A-Za-z][\w.-]*#\d+\b(?!\]\()|\b(?:[Ii]ssue|PR|[Pp]ull request)s? #?\d+\b")
# Numbers of sections, and of entries such as A07, in lists that are not part of the project. An A100 is a device.
NUMBERED = re.compile(r"\b[Cc]lauses?[\s#*>]+\d[\d.]*|\b[AN]\d{2,3}\b(?<!\bA100)")
LINK = re.compile(r"\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|\b(?:href|src)=\"([^\"]+)\"")
SOURCE_FILE = re.compile(r"(?<![\w./{}<-])(?:\w[\w.-]*/)+[\w.-]+\.(?:py|md)\b")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)

# Cited on purpose by tests of what cites: there is nothing of that name.
INVENTED = {"ABC-01", "XXX-01", "a/b#1", "a/b-c#12"}
# Named because it must not exist.
FORBIDDEN_FILES = {"backends/torch/__init__.py"}


def tracked(root: Path) -> list[Path]:
    """Files under version control that people write, without this one, which has wrong citations to find."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    names = [name for name in listing.split("\0") if name.endswith(SUFFIXES)]
    return [root / name for name in names if root / name != Path(__file__) and (root / name).exists()]


def leads_nowhere(path: Path, *, root: Path) -> list[str]:
    """``file:line: citation``, for each that leads nowhere."""
    text = path.read_text(encoding="utf-8")
    found = [*_unknown(text), *_missing_files(text, root)]
    if path.suffix == ".md":
        found += _broken_links(path)
    return [
        f"{path.relative_to(root)}:{text.count(chr(10), 0, place) + 1}: {' '.join(what.split())}"
        for place, what in sorted(found)
        if what not in INVENTED
    ]


def _unknown(text: str) -> Iterator[tuple[int, str]]:
    """Clauses and public reports that are not listed."""
    groups = {clause[:3] for clause in spec.clauses()}
    yield from ((one.start(), one[0]) for one in CLAUSE.finditer(text) if one[0] not in spec.clauses())
    yield from ((one.start(), one[0]) for one in GROUP.finditer(text) if one[1] not in groups)
    yield from ((one.start(), one[0]) for one in REPORT.finditer(text) if one[0] not in public_reports())
    for one in REPORT_URL.finditer(text):
        if (cited := f"{one[1]}#{one[2]}") not in public_reports():
            yield one.start(), cited
    for pattern in (NO_OWNER, NUMBERED):
        yield from ((one.start(), one[0]) for one in pattern.finditer(text))


def _missing_files(text: str, root: Path) -> Iterator[tuple[int, str]]:
    """Source files and pages named by their path from the root."""
    for one in SOURCE_FILE.finditer(text):
        is_ours = (root / one[0].partition("/")[0]).is_dir()
        if is_ours and not (root / one[0]).is_file() and one[0] not in FORBIDDEN_FILES:
            yield one.start(), one[0]


def _broken_links(page: Path) -> Iterator[tuple[int, str]]:
    """Links to files that are not there, and to headings that no page has."""
    # As many characters as before, so that places stay.
    text = FENCED.sub(lambda block: re.sub(r"\S", " ", block[0]), page.read_text(encoding="utf-8"))
    for one in LINK.finditer(text):
        target = one[1] or one[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (heading and file.suffix == ".md" and heading not in headings(file)):
            yield one.start(), target


@cache
def headings(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives the headings of a page."""
    anchors: list[str] = []
    for one in HEADING.finditer(FENCED.sub("", page.read_text(encoding="utf-8"))):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one[1]).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        num_before = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", known) is not None for known in anchors)
        anchors.append(f"{anchor}-{num_before}" if num_before else anchor)
    return frozenset(anchors)


def test_every_citation_leads_somewhere() -> None:
    files = tracked(ROOT)
    assert {path.suffix for path in files} == set(SUFFIXES)
    assert [fault for path in files for fault in leads_nowhere(path, root=ROOT)] == []


def test_every_public_report_is_cited() -> None:
    listing = {PUBLIC_REPORTS, "reports.md"}
    texts = [path.read_text(encoding="utf-8") for path in tracked(ROOT) if path.name not in listing]
    cited = {report for text in texts for report in REPORT.findall(text)}
    assert set(public_reports()) - cited == set()


@pytest.mark.parametrize(
    ("text", "citation"),
    [
        ("As ACC-99 says.", "ACC-99"),
        ("As ACC-011 says.", "ACC-011"),
        ("All of ACD-*.", "ACD-*"),
        ("See pytorch/pytorch#7.", "pytorch/pytorch#7"),
        ("https://github.com/pytorch/pytorch/pull/7", "pytorch/pytorch#7"),
        ("See torchtitan#1329.", "torchtitan#1329"),
        ("See issue 12.", "issue 12"),
        ("It waits (clause 9).", "clause 9"),
        ("It waits (FSDP2 clause\n    # 11.1).", "clause # 11.1"),
        ("Clauses 3 and 12.", "Clauses 3"),
        ("Nothing is lost (A57).", "A57"),
        ("Nothing is lost (A101, N03).", "A101 N03"),
        ("In docs/nothing.md and docs/page.md.", "docs/nothing.md"),
        ("[a page](nothing.md)", "nothing.md"),
        ("[a page](../README.md)", "../README.md"),
        ("[a heading](page.md#nothing)", "page.md#nothing"),
        ("[a heading](#nothing)", "#nothing"),
        ('<img src="nothing.png">', "nothing.png"),
    ],
)
def test_a_citation_that_leads_nowhere_is_found(tmp_path: Path, text: str, citation: str) -> None:
    page = write_pages(tmp_path, text)
    found = leads_nowhere(page, root=tmp_path)
    assert " ".join(fault.partition(": ")[2] for fault in found) == citation
    assert all(fault.startswith("docs/cites.md:3: ") for fault in found)


def test_citations_that_lead_somewhere_pass(tmp_path: Path) -> None:
    text = """ACC-03 to ACC-05, ACC-*, pytorch/pytorch#183207, https://github.com/pytorch/pytorch/issues/183207,
        #222222, an A100, UTF-8, a clause, docs/page.md, run-a/nothing.md, [torchtitan#1](https://example.org/1),
        [one](page.md), [two](page.md#a-heading-of-it), [three](page.md#a-heading-of-it-1), [four](https://example.org),
        [five](#here-too)

        ## Here, too

        ```
        [not a link](nothing.md)
        ```
    """
    page = write_pages(tmp_path, "\n".join(line.strip() for line in text.splitlines()))
    assert leads_nowhere(page, root=tmp_path) == []


def write_pages(root: Path, text: str) -> Path:
    docs = root / "docs"
    docs.mkdir()
    (docs / "page.md").write_text("# A page\n\n## A `heading` of it\n\n## A heading of it\n")
    cites = docs / "cites.md"
    cites.write_text(f"# Cites\n\n{text}\n")
    return cites
