"""Which way imports may point: the library needs nothing but the standard library, and names no backend."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "hpcompat"
CLI = LIBRARY / "cli"
# What the extras `cli` and `trace` declare in pyproject.toml.
CLI_PACKAGES = {"jinja2", "matplotlib", "numpy", "rich", "safetensors"}
BACKEND_MODULE = re.compile(r"\bhpcompat_(?:torch|mindspore)\b")
DYNAMIC_IMPORTS = {"import_module", "__import__"}


def library_files() -> list[Path]:
    return sorted(path for path in LIBRARY.rglob("*.py") if CLI not in path.parents)


def cli_files() -> list[Path]:
    return sorted(CLI.rglob("*.py"))


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names of the modules that ``source`` imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def breaches(source: str, *, allowed: frozenset[str] = frozenset(), dynamic: bool = False) -> list[str]:
    """What ``source`` imports besides the standard library, the library outside its command line, and ``allowed``."""
    found = [module for module in imported_modules(source) if not _may_import(module, allowed)]
    if not dynamic:
        found += [f"{name}()" for name in _dynamic_imports(source)]
    return found + BACKEND_MODULE.findall(source)


def _may_import(module: str, allowed: frozenset[str]) -> bool:
    if module.startswith("hpcompat.cli"):
        return "hpcompat.cli" in allowed
    top = module.partition(".")[0]
    return top == "hpcompat" or top in sys.stdlib_module_names or top in allowed


def _dynamic_imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in DYNAMIC_IMPORTS:
                yield name


@pytest.mark.parametrize("path", library_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_library_imports_only_itself_and_the_standard_library(path: Path) -> None:
    assert breaches(path.read_text()) == []


@pytest.mark.parametrize("path", cli_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_command_line_imports_only_what_its_extra_declares(path: Path) -> None:
    allowed = frozenset({*CLI_PACKAGES, "hpcompat.cli"})
    assert breaches(path.read_text(), allowed=allowed, dynamic=True) == []


@pytest.mark.parametrize("path", sorted((LIBRARY / "core").glob("*.py")), ids=lambda path: path.name)
def test_the_scheduler_does_not_import_the_api(path: Path) -> None:
    above = {"hpcompat.api", "hpcompat.module", "hpcompat.registry", "hpcompat.recipes", "hpcompat"}
    assert above.intersection(imported_modules(path.read_text())) == set()


@pytest.mark.parametrize(
    ("source", "breach"),
    [
        ("import numpy as np", "numpy"),
        ("def f():\n    from torch.distributed import fsdp", "torch.distributed"),
        ("if TYPE_CHECKING:\n    import mindspore", "mindspore"),
        ("from . import api", "."),
        ("from hpcompat.cli import main", "hpcompat.cli"),
        ("import rich", "rich"),
        ("importlib.import_module('torch')", "import_module()"),
        ("__import__('torch')", "__import__()"),
        ("name = 'hpcompat_torch.backend'", "hpcompat_torch"),
        ("import hpcompat_conformance", "hpcompat_conformance"),
    ],
)
def test_a_breach_is_seen(source: str, breach: str) -> None:
    assert breach in breaches(source)


def test_plain_imports_are_no_breach() -> None:
    assert breaches("import os.path\nfrom hpcompat.core import layout\nimport hpcompat.errors") == []


def test_there_is_a_library_to_check() -> None:
    names = {path.relative_to(LIBRARY).as_posix() for path in library_files()}
    assert {"__init__.py", "registry.py", "backend.py"} <= names


IMPORT_EVERYTHING = """
import json, pkgutil, sys
before = set(sys.modules)
import hpcompat
for module in pkgutil.walk_packages(hpcompat.__path__, "hpcompat."):
    if not module.name.startswith("hpcompat.cli"):
        __import__(module.name)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def test_importing_every_module_of_the_library_loads_nothing_else() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout))
    assert "hpcompat" in loaded
    assert loaded - sys.stdlib_module_names - {"hpcompat"} == set()


def test_import_works_where_the_frameworks_are_absent() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'mindspore', 'rich'])); import hpcompat"
    result = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", ["backends", "backends/torch", "backends/mindspore", "conformance"])
def test_folders_of_packages_are_no_packages(folder: str) -> None:
    # `backends/torch/__init__.py` would shadow the framework for anything that runs in `backends/`.
    assert not (ROOT / folder / "__init__.py").exists()
