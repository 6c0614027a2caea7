"""Which way imports may point: down, never in a circle. The library needs only the standard library, and names no
backend.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from import_circles import PACKAGES, circles, graph_of

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


# From the bottom up: what the files of a floor may import of the library.
LEAVES = {f"hpcompat.{name}" for name in ("comm", "errors", "mesh", "placement", "policy")}
FLOORS = {
    **{name.replace(".", "/") + ".py": LEAVES for name in sorted(LEAVES)},
    "hpcompat/contract/*.py": {*LEAVES, "hpcompat.contract"},
    "hpcompat/core/*.py": {*LEAVES, "hpcompat.contract", "hpcompat.core"},
}


@functools.cache
def graph() -> dict[str, set[str]]:
    return graph_of(ROOT)


def from_above(name: str, imports: dict[str, set[str]], allowed: set[str]) -> set[str]:
    """What module ``name`` imports of the library besides ``allowed`` modules and packages."""
    return {other for other in imports[name] if allowed.isdisjoint({other, other.rpartition(".")[0]})}


@pytest.mark.parametrize("pattern", FLOORS)
def test_a_floor_imports_nothing_above_it(pattern: str) -> None:
    names = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in ROOT.glob(pattern)]
    assert names
    names = [name.removesuffix(".__init__") for name in names]
    assert {name: found for name in names if (found := from_above(name, graph(), FLOORS[pattern]))} == {}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert [" -> ".join(circle) for circle in circles(graph())] == []


PLANTED = {
    "nothing": ({}, []),
    "for type checkers, over a package of three": (
        {
            "hpcompat.contract.low": "if TYPE_CHECKING:\n    from hpcompat.core.high import High",
            "hpcompat.core.high": "from hpcompat.core import middle",
            "hpcompat.core.middle": "import hpcompat.contract.low",
        },
        [["hpcompat.contract.low", "hpcompat.core.high", "hpcompat.core.middle", "hpcompat.contract.low"]],
    ),
    "in a function, relative, in a backend": (
        {
            "hpcompat_torch.a": "def f():\n    from .b import g",
            "hpcompat_torch.b": "from hpcompat_torch import a",
        },
        [["hpcompat_torch.a", "hpcompat_torch.b", "hpcompat_torch.a"]],
    ),
    "through the package": (
        {"hpcompat.__init__": "from hpcompat.core.high import f", "hpcompat.core.high": "from hpcompat import f"},
        [["hpcompat", "hpcompat.core.high", "hpcompat"]],
    ),
}


def graph_of_modules(root: Path, sources: dict[str, str]) -> dict[str, set[str]]:
    """Of modules with these names and sources, written below ``root`` where the packages are."""
    folders = {package.rpartition("/")[2]: root / package for package in PACKAGES}
    for name, source in sources.items():
        package, *parts = name.split(".")
        path = folders[package].joinpath(*parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return graph_of(root)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_circle_is_found(name: str, tmp_path: Path) -> None:
    sources, expected = PLANTED[name]
    straight = {"hpcompat.errors": "", "hpcompat.api": "from hpcompat import errors"}
    assert circles(graph_of_modules(tmp_path, {**straight, **sources})) == expected


def test_an_import_from_above_is_seen(tmp_path: Path) -> None:
    source = "from hpcompat import errors\nif TYPE_CHECKING:\n    from hpcompat.registry import Backend"
    imports = graph_of_modules(
        tmp_path, {"hpcompat.registry": "", "hpcompat.errors": "", "hpcompat.contract.low": source}
    )
    allowed = FLOORS["hpcompat/contract/*.py"]
    assert from_above("hpcompat.contract.low", imports, allowed) == {"hpcompat.registry"}


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
    assert {"__init__.py", "registry.py", "contract/backend.py"} <= names


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
