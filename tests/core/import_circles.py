"""Finds modules that import each other in a circle, in all packages of the repository, and prints them:

    python tests/core/import_circles.py [ROOT]

Every import counts: those for type checkers only, and those inside functions.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = (
    "hpcompat",
    "backends/torch/hpcompat_torch",
    "backends/mindspore/hpcompat_mindspore",
    "conformance/hpcompat_conformance",
)
Graph = dict[str, set[str]]


def graph_of(root: Path) -> Graph:
    """Which modules of the packages below ``root`` each of them imports."""
    files = {
        _name_of(path, folder.parent): path for folder in map(root.joinpath, PACKAGES) for path in folder.rglob("*.py")
    }
    return {
        name: set(_imports(path.read_text(), _package_of(name, path), known=files)) - {name}
        for name, path in files.items()
    }


def _name_of(path: Path, parent: Path) -> str:
    parts = path.relative_to(parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package_of(name: str, path: Path) -> str:
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def _imports(source: str, package: str, *, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *base.split(".")] if base else above)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in known:
                    yield submodule
                elif base in known:
                    yield base


def circles(graph: Graph) -> list[list[str]]:
    """A shortest circle of every set of modules that reach each other, beginning and ending with the same module."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for name in sorted(graph):
        if name in seen:
            continue
        path = _path_back(graph, name)
        if path:
            seen |= {other for other in _reachable(graph, name) if name in _reachable(graph, other)}
            found.append(path)
    return found


def _path_back(graph: Graph, name: str) -> list[str]:
    queue = deque([[name]])
    seen: set[str] = set()
    while queue:
        path = queue.popleft()
        for imported in sorted(graph[path[-1]]):
            if imported == name:
                return [*path, name]
            if imported not in seen:
                seen.add(imported)
                queue.append([*path, imported])
    return []


def _reachable(graph: Graph, name: str) -> set[str]:
    seen: set[str] = set()
    pending = [name]
    while pending:
        for imported in graph[pending.pop()] - seen:
            seen.add(imported)
            pending.append(imported)
    return seen


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    graph = graph_of(root)
    found = circles(graph)
    entangled = sum(name in _reachable(graph, name) for name in graph)
    lines = [f"{len(graph)} modules, {len(found)} circles, {entangled} modules in them"]
    lines += ["  " + " -> ".join(circle) for circle in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
