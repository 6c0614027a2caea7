"""The recipes of trainers, on the fake backend."""

from __future__ import annotations

from typing import Any

import pytest

import hpcompat
from hpcompat import recipes
from hpcompat.errors import CapabilityError
from hpcompat_conformance import numpy_reference as ref

pytestmark = pytest.mark.usefixtures("rank")


class Decoder(ref.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = ref.Linear(4, 4)
        self.blocks = ref.ModuleList([ref.Linear(4, 4) for _ in range(2)])
        self.norm = ref.Linear(4, 4)
        self.head = ref.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrapped(**options: Any) -> Any:
    model = Decoder()
    parts = {"blocks": model.blocks, "embedding": model.embedding, "head": (model.norm, model.head)}
    return recipes.apply_fsdp_to_decoder(model, mesh=ref.init_device_mesh((2,)), **{**parts, **options})


def resharded(model: Any) -> dict[str, bool]:
    """Which of the decoder's parts are freed after forward."""
    parts = {"embedding": model.embedding, "block": model.blocks[0], "head": model.norm}
    return {name: part._unit().groups[0].post_forward_mesh_info is not None for name, part in parts.items()}


@pytest.mark.parametrize(
    ("policy", "pp_enabled", "expected"),
    [
        ("always", False, True),
        ("always", True, True),
        ("never", False, False),
        ("default", False, True),
        ("default", True, False),
    ],
)
def test_policy(policy: str, pp_enabled: bool, expected: bool) -> None:
    assert recipes.get_fsdp_reshard_after_forward_policy(policy, pp_enabled) is expected


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"expected reshard_after_forward_policy to be one of .*, but got 'sometimes'"):
        recipes.get_fsdp_reshard_after_forward_policy("sometimes", False)


def test_units_of_a_decoder() -> None:
    model = wrapped()
    modules = [[type(module) for module in unit.modules] for unit in model._units(recurse=True)]
    assert modules.count([type(model.norm), type(model.head)]) == 1
    assert len(modules) == 5, "root, embedding, two blocks, norm and head"
    assert model._unit().groups == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("default", {"embedding": True, "block": True, "head": False}),
        ("always", {"embedding": True, "block": True, "head": True}),
        ("never", {"embedding": False, "block": False, "head": False}),
    ],
)
def test_head_is_kept_unless_all_are_freed(policy: str, expected: dict[str, bool]) -> None:
    assert resharded(wrapped(reshard_after_forward_policy=policy)) == expected


def test_stage_of_a_pipeline() -> None:
    model = wrapped(embedding=None, pp_enabled=True)
    assert not isinstance(model.embedding, hpcompat.HSDPModule)
    assert model.blocks[0]._unit().groups[0].post_forward_mesh_info is None


def test_tied_embedding_and_head_are_one_unit() -> None:
    model = wrapped(is_tied=True)
    assert model.embedding._unit() is model.head._unit()
    with pytest.raises(ValueError, match="expected an embedding and a head with is_tied=True, but got embedding=None"):
        wrapped(is_tied=True, embedding=None)


def test_no_division_anywhere() -> None:
    model = wrapped()
    recipes.disable_fsdp_gradient_division(model)
    factors = [group.division.factor for unit in model._units(recurse=True) for group in unit.groups]
    assert factors == [1.0] * 4


def test_symmetric_memory_is_refused_by_name() -> None:
    with pytest.raises(CapabilityError, match="symm"):
        recipes.enable_fsdp_symm_mem(wrapped())


@pytest.mark.parametrize("recipe", [recipes.disable_fsdp_gradient_division, recipes.enable_fsdp_symm_mem])
def test_recipes_want_a_wrapped_model(recipe: Any) -> None:
    with pytest.raises(ValueError, match="expected wrapped modules at or below the model, but got none in Decoder"):
        recipe(Decoder())
