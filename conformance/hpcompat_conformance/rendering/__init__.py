"""Reports as files: a page, Markdown, JUnit, badges. Each format is imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from hpcompat_conformance import document
from hpcompat_conformance.document import Document

# Writes into a folder, which exists then, and returns the files.
Writer = Callable[[Document, Path], list[Path]]

FORMATS = {
    "json": f"{__name__}:write_json",
    "junit": f"{__name__}.junit:write",
    "html": f"{__name__}.page:write",
    "md": f"{__name__}.markdown:write",
    "features": f"{__name__}.markdown:write_features",
    "badge": f"{__name__}.badge:write",
}


def writer(name: str) -> Writer:
    """What writes that format. ValueError if a package that it needs is not installed."""
    module, _, function = FORMATS[name].partition(":")
    write: Writer = getattr(_import(module, what=f"--report {name}"), function)
    return write


def write_json(outcome: Document, folder: Path) -> list[Path]:
    """What ``--merge`` reads."""
    path = folder / "conformance.json"
    document.write(outcome, path)
    return [path]


def spec_page(version: str) -> str:
    """The spec as Markdown."""
    text: str = _import(f"{__name__}.markdown", what="--spec-page").spec_page(version)
    return text


def public_reports_page(version: str) -> str:
    """The public reports as Markdown."""
    text: str = _import(f"{__name__}.markdown", what="--public-reports-page").public_reports_page(version)
    return text


def _import(module: str, *, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"expected {error.name} for {what}, but it is not installed: pip install 'hpcompat[conformance]'"
        ) from error
