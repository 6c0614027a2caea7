"""What the backend uses of torch's insides: all of it is in one file, and a torch without it is refused by name."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

import hpcompat_torch
from hpcompat_torch import private

FOLDER = Path(hpcompat_torch.__file__).parent
ROOMS = sorted(path for path in FOLDER.glob("*.py") if path.name != "private.py")
# Of Python and of numpy: what a named tuple has.
OTHERS = {"_fields", "_replace", "_metadata"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def own_names() -> set[str]:
    """What this package defines, or sets on an object of its own."""
    found = set()
    for path in ROOMS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    listed = {name for names in (*private.ATTRIBUTES.values(), *private.OPTIONAL.values()) for name in names}
    return (found - listed) | {"__slots__"}


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if is_private(part))


@pytest.mark.parametrize("path", ROOMS, ids=lambda path: path.stem)
def test_no_room_uses_insides_that_are_not_listed(path: Path) -> None:
    # The package of torch's composable APIs has an underscore in its name and documentation of its own.
    listed = {name for names in (*private.ATTRIBUTES.values(), *private.OPTIONAL.values()) for name in names}
    allowed = listed | own_names() | OTHERS | {"_composable"}
    unlisted = [f"line {line}: {name}" for line, name in used_names(ast.parse(path.read_text())) if name not in allowed]
    assert unlisted == [], f"put them into {private.__name__}"


def load_again() -> Any:
    spec = importlib.util.spec_from_file_location("private_again", FOLDER / "private.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_can_be_loaded_twice() -> None:
    assert load_again().ATTRIBUTES.keys() == private.ATTRIBUTES.keys()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_current_graph_task_id"),
        (torch, "_chunk_cat"),
        (DeviceMesh, "_flatten"),
        (torch.optim.Adam, "_init_group"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_torch_without_a_name_is_refused(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"but got {torch.__version__.split('+')[0]}.*{name}"):
        load_again()


@pytest.mark.parametrize("version", ["2.6.0+cpu", "1.13.1"])
def test_an_old_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ImportError, match=rf"but got {version.split('+')[0]}.*2\.7 is the oldest"):
        load_again()
