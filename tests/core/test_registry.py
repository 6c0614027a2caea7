"""How a backend is found and chosen, with made-up frameworks in place of installed ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from hpcompat import registry


class Thing:
    """An object of a made-up framework."""

    def __init__(self, framework: str) -> None:
        self.framework = framework


class FakeBackend:
    """Owns the things of one framework and counts how often it was made."""

    name: str
    num_made: int

    def __init__(self) -> None:
        type(self).num_made += 1

    def owns(self, module: object) -> bool:
        return isinstance(module, Thing) and module.framework == self.name

    def probe(self) -> dict[str, object]:
        return {"versions": {self.name: "1"}, "devices": ["cpu"], "capabilities": {"reduce_avg": True}}


class World:
    """Declares backends, installs and imports frameworks, and keeps the backend classes that were declared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._findable: set[str] = set()
        self.backends: dict[str, type[FakeBackend]] = {}
        self.points: list[EntryPoint] = []
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: self._points(group))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in self._findable else None)

    def declare(self, name: str, *, installed: bool = True, imported: bool = False) -> type[FakeBackend]:
        backend = type(f"{name}Backend", (FakeBackend,), {"name": name, "num_made": 0})
        self.backends[name] = backend
        house = types.ModuleType(f"house_of_{name}")
        house.__dict__["Backend"] = backend
        self._monkeypatch.setitem(sys.modules, house.__name__, house)
        self.points.append(EntryPoint(name, f"{house.__name__}:Backend", registry.ENTRY_POINT_GROUP))
        if installed:
            self._findable.add(name)
        if imported:
            self._monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        else:
            self._monkeypatch.delitem(sys.modules, name, raising=False)
        return backend

    def _points(self, group: str) -> list[EntryPoint]:
        return [point for point in self.points if point.group == group]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.delenv(registry.ENV_VAR, raising=False)
    monkeypatch.setattr(registry, "_declared", registry._declared.__wrapped__)
    monkeypatch.setattr(registry, "_instances", {})
    return World(monkeypatch)


def test_available_backends_lists_every_declared_one_by_name(world: World) -> None:
    world.declare("torch")
    world.declare("mindspore", installed=False)
    assert list(registry.available_backends()) == ["mindspore", "torch"]
    assert registry.available_backends()["torch"].value == "house_of_torch:Backend"
    assert registry.installed_backends() == ["torch"]


def test_changing_the_answer_of_available_backends_changes_nothing_here(world: World) -> None:
    world.declare("torch")
    registry.available_backends().clear()
    assert list(registry.available_backends()) == ["torch"]


def test_explicit_name_wins_over_environment_and_type(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.declare("torch", imported=True)
    world.declare("mindspore", imported=True)
    monkeypatch.setenv(registry.ENV_VAR, "torch")
    assert registry.backend_for(Thing("mindspore"), backend="mindspore").name == "mindspore"
    assert registry.get_backend("mindspore").name == "mindspore"


def test_environment_wins_over_type(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.declare("torch", imported=True)
    world.declare("mindspore", imported=True)
    monkeypatch.setenv(registry.ENV_VAR, "mindspore")
    assert registry.get_backend().name == "mindspore"
    with pytest.raises(TypeError, match=r"expected an object of mindspore, as HPCOMPAT_BACKEND='mindspore' asks"):
        registry.backend_for(Thing("torch"))


def test_empty_environment_variable_counts_as_unset(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.declare("torch", imported=True)
    monkeypatch.setenv(registry.ENV_VAR, "")
    assert registry.backend_for(Thing("torch")).name == "torch"


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_type_of_the_module_decides_otherwise(world: World, framework: str) -> None:
    world.declare("torch", imported=True)
    world.declare("mindspore", imported=True)
    assert registry.backend_for(Thing(framework)).name == framework


@pytest.mark.parametrize(
    ("alias", "name"),
    [("pytorch", "torch"), ("pt", "torch"), ("PyTorch", "torch"), (" torch ", "torch"), ("ms", "mindspore")],
)
def test_aliases(world: World, monkeypatch: pytest.MonkeyPatch, alias: str, name: str) -> None:
    world.declare("torch")
    world.declare("mindspore")
    assert registry.get_backend(alias).name == name
    monkeypatch.setenv(registry.ENV_VAR, alias)
    assert registry.get_backend().name == name


def test_detection_leaves_a_framework_that_is_not_imported_alone(world: World) -> None:
    world.declare("torch", imported=True)
    asleep = world.declare("mindspore")
    with pytest.raises(TypeError, match="expected an object of an installed backend's framework"):
        registry.backend_for(Thing("mindspore"))
    assert asleep.num_made == 0
    assert "mindspore" not in sys.modules


def test_a_framework_blocked_in_sys_modules_counts_as_absent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.declare("torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert registry.installed_backends() == []
    with pytest.raises(TypeError, match=r"installed backends: none; without their framework: torch"):
        registry.backend_for(Thing("torch"))


def test_a_backend_is_made_once(world: World) -> None:
    backend = world.declare("torch", imported=True)
    first = registry.backend_for(Thing("torch"))
    assert registry.get_backend("pt") is first
    assert registry.backend_for(Thing("torch"), backend="torch") is first
    assert backend.num_made == 1


def test_unknown_name_lists_what_is_installed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.declare("torch")
    world.declare("mindspore", installed=False)
    message = (
        r"expected backend to name an installed backend, but got 'jax'; "
        r"installed backends: torch; without their framework: mindspore; choose one with backend= or HPCOMPAT_BACKEND"
    )
    with pytest.raises(ValueError, match=message):
        registry.get_backend("jax")
    with pytest.raises(ValueError, match=message):
        registry.backend_for(Thing("torch"), backend="jax")
    monkeypatch.setenv(registry.ENV_VAR, "jax")
    with pytest.raises(ValueError, match=r"expected HPCOMPAT_BACKEND to name an installed backend, but got 'jax'"):
        registry.backend_for(Thing("torch"))


def test_an_empty_explicit_name_is_unknown_not_unset(world: World) -> None:
    world.declare("torch")
    with pytest.raises(ValueError, match=r"but got ''"):
        registry.get_backend("")


def test_a_name_that_is_no_string_is_a_type_error(world: World) -> None:
    world.declare("torch", imported=True)
    with pytest.raises(TypeError, match=r"expected the backend's name as a string, but got 3"):
        registry.backend_for(Thing("torch"), backend=3)  # type: ignore[arg-type]


def test_known_backend_without_its_framework_says_what_to_install(world: World) -> None:
    world.declare("mindspore", installed=False)
    with pytest.raises(ImportError, match=r"pip install 'hpcompat\[mindspore\]'"):
        registry.get_backend("mindspore")


def test_explicit_backend_that_does_not_own_the_module(world: World) -> None:
    world.declare("torch", imported=True)
    with pytest.raises(TypeError, match=r"expected an object of torch, as backend='pt' asks, but got an object"):
        registry.backend_for(Thing("mindspore"), backend="pt")


def test_an_object_of_no_framework_names_its_type(world: World) -> None:
    world.declare("torch", imported=True)
    with pytest.raises(TypeError, match=r"but got an object of type builtins\.dict; installed backends: torch"):
        registry.backend_for({})


def test_no_name_prefers_the_framework_already_imported(world: World) -> None:
    world.declare("torch")
    world.declare("mindspore", imported=True)
    assert registry.get_backend().name == "mindspore"


def test_no_name_takes_the_only_installed_one(world: World) -> None:
    world.declare("torch")
    world.declare("mindspore", installed=False)
    assert registry.get_backend().name == "torch"


@pytest.mark.parametrize("installed", [True, False])
def test_no_name_and_no_single_candidate_is_refused(world: World, installed: bool) -> None:
    world.declare("torch", installed=installed)
    world.declare("mindspore", installed=installed)
    candidates = r"\['mindspore', 'torch'\]" if installed else r"\[\]"
    with pytest.raises(ValueError, match=rf"expected one backend to choose, but got {candidates}"):
        registry.get_backend()


def test_this_distribution_declares_torch() -> None:
    point = registry.available_backends()["torch"]
    assert point.value == "hpcompat_torch.backend:TorchBackend"
