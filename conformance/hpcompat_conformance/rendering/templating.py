"""What the templates have in common."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

# ``owner/name#number``, as the sources of clauses cite public reports.
REPORT = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)")
# Up to the folder that holds packages: where that lies is of no interest to a reader.
INSTALLED = re.compile(r'(?<=File ")[^"\n]*/(?:site-packages|conformance|backends/\w+|lib/python[\d.]+)/(?=\w)')


def environment(*, html: bool) -> Environment:
    """Templates of this package, with the filters ``linked`` and ``shortened``."""
    loader = PackageLoader("hpcompat_conformance.rendering")
    made = Environment(loader=loader, autoescape=html, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"linked": linked_html if html else linked_markdown, "shortened": shortened, "cell": markdown_cell}
    return made


def save(text: str, path: Path) -> list[Path]:
    """Write a report; parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return [path]


def linked_html(text: str) -> Markup:
    """With a link for each public report."""
    return Markup(REPORT.sub(r'<a href="https://github.com/\1/issues/\2">\1#\2</a>', str(escape(text))))


def linked_markdown(text: str) -> str:
    """With a link for each public report."""
    return REPORT.sub(r"[\1#\2](https://github.com/\1/issues/\2)", text)


def cited(text: str) -> list[str]:
    """The public reports that a text cites."""
    return [match[0] for match in REPORT.finditer(text)]


def shortened(text: str) -> str:
    """A traceback whose file names begin at the package."""
    return INSTALLED.sub("", text)


def markdown_cell(text: str) -> str:
    """The first line of a text, so that it stays in its cell of a table."""
    line = text.strip().partition("\n")[0]
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
