"""The product of the parity matrix: which combinations exist, and their names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WORLDS = (1, 2, 4)
MESHES = ("fsdp", "hsdp")
POLICIES = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 4)

MESH_SHAPES: dict[tuple[str, int], tuple[int, ...]] = {
    ("fsdp", 1): (1,),
    ("fsdp", 2): (2,),
    ("fsdp", 4): (4,),
    ("hsdp", 1): (1, 1),
    ("hsdp", 2): (2, 1),
    ("hsdp", 4): (2, 2),
    ("hsdp-wide", 2): (1, 2),
    ("hsdp-wide", 4): (1, 4),
    ("hsdp-tall", 4): (4, 1),
    ("replicate", 1): (1,),
    ("replicate", 2): (2,),
    ("replicate", 4): (4,),
    ("fsdp+tp", 2): (1, 2),
    ("fsdp+tp", 4): (2, 2),
    ("hsdp+tp", 4): (2, 1, 2),
    ("fsdp2+tp", 4): (1, 2, 2),
}
"""Mesh name and world size to mesh shape; HSDP is replicate x shard; `replicate` calls the function of that name."""

MESH_AXES: dict[str, tuple[str, ...]] = {
    "fsdp": ("shard",),
    "hsdp": ("replicate", "shard"),
    "hsdp-wide": ("replicate", "shard"),
    "hsdp-tall": ("replicate", "shard"),
    "replicate": ("replicate",),
    "fsdp+tp": ("shard", "tp"),
    "hsdp+tp": ("replicate", "shard", "tp"),
    "fsdp2+tp": ("shard_outer", "shard_inner", "tp"),
}


@dataclass(frozen=True)
class Combo:
    """One cell of the matrix.

    `policy`: `fp32` is no policy, `bf16` computes in bf16 and reduces in fp32, `fp16` does both in fp16.
    `accumulation` counts the microbatches of a step; all but the last run without gradient sync.
    `options` names further settings of `parity.settings`.
    """

    model: str
    world: int
    mesh: str = "fsdp"
    reshard: bool | int = True
    policy: str = "fp32"
    accumulation: int = 1
    options: tuple[str, ...] = ()
    num_steps: int = 4
    seed: int = 7

    @property
    def id(self) -> str:
        """The test id, for example `decoder-w4-hsdp-reshard2-bf16-acc4`."""
        reshard = self.reshard if not isinstance(self.reshard, bool) else str(self.reshard).lower()
        parts = [self.model, f"w{self.world}", self.mesh, f"reshard_{reshard}", self.policy, f"acc{self.accumulation}"]
        return "-".join([*parts, *self.options])

    @property
    def choices(self) -> tuple[Any, ...]:
        """Of each setting; all integers to reshard to are one choice, and so are all options together."""
        reshard = self.reshard if isinstance(self.reshard, bool) else "integer"
        return self.model, self.world, self.mesh, reshard, self.policy, self.accumulation, self.options

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return MESH_SHAPES[self.mesh, self.world]

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return MESH_AXES[self.mesh]

    def to_dict(self) -> dict[str, Any]:
        """What travels to the workers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Combo:
        return cls(**{**values, "options": tuple(values["options"])})


def identity(combo: Combo) -> str:
    """The test id of a combination."""
    return combo.id


def choices(combo: Combo) -> tuple[Any, ...]:
    """What a combination chooses of each setting, for designs."""
    return combo.choices


def reshard_choices(num_shards: int) -> tuple[bool | int, ...]:
    """True, False and one integer: a true factor of the shard axis if there is one, else all of it.

    On a shard axis of 1 the only integer is 1, which means False.
    """
    if num_shards == 1:
        return (True, False)
    return (True, False, 2)


def matrix(models: tuple[str, ...]) -> Iterator[Combo]:
    """Every combination that makes sense, worlds outermost so that one pool serves a run of tests."""
    for world in WORLDS:
        for model in models:
            for mesh in MESHES:
                for reshard in reshard_choices(MESH_SHAPES[mesh, world][-1]):
                    for policy in POLICIES:
                        for accumulation in ACCUMULATIONS:
                            yield Combo(model, world, mesh, reshard, policy, accumulation)


EXTRAS: list[Combo] = [
    Combo(model, world, mesh, reshard, policy, accumulation, tuple(options))
    for model in ("mlp", "decoder")
    for world, mesh, reshard, policy, accumulation, *options in (
        (2, "hsdp-wide", True, "fp32", 1),
        (4, "hsdp-wide", 2, "bf16", 4),
        (4, "hsdp-tall", True, "fp16", 4),
        (4, "fsdp", 4, "fp32", 1),
        (4, "fsdp", 1, "fp32", 1),
        (2, "fsdp", 1, "bf16", 4),
        (2, "fsdp", True, "bf16-both", 4),
        (2, "fsdp", True, "bf16-reduce", 4),
        (4, "hsdp", True, "bf16-reduce", 4),
        (2, "fsdp", True, "fp16-fp32", 4),
        (2, "fsdp", False, "no-cast", 1),
        (2, "fsdp", True, "bf16", 1, "automatic"),
        (4, "hsdp", True, "fp32", 4, "automatic", "evaluate"),
        (2, "fsdp", False, "fp32", 1, "evaluate"),
        (4, "fsdp", 2, "bf16", 1, "evaluate"),
        (2, "fsdp", True, "fp32", 4, "sync-always"),
        (4, "hsdp", True, "bf16", 4, "sync-always"),
        (4, "hsdp", True, "fp32", 4, "no-all-reduce"),
        (4, "hsdp", 2, "bf16", 4, "no-all-reduce"),
        (4, "hsdp", False, "fp16", 4, "no-all-reduce"),
        (2, "fsdp", True, "fp32", 4, "keep-unsharded"),
        (4, "hsdp", True, "bf16", 4, "keep-unsharded", "last-backward"),
        (2, "fsdp", True, "fp32", 4, "sync-always", "last-backward"),
        (2, "fsdp", True, "fp32", 1, "keep-grads"),
        (2, "fsdp", True, "fp32", 1, "force-sum"),
        (4, "hsdp", True, "bf16", 1, "force-sum", "factor=3"),
        (2, "fsdp", True, "fp32", 1, "factor=2"),
        (4, "hsdp", True, "fp16", 4, "factor=300"),
        (2, "fsdp", False, "fp32", 1, "no-unshard-in-backward"),
        (2, "fsdp", False, "fp32", 4, "setter-reshard"),
        (2, "fsdp", True, "bf16", 1, "prefetch"),
        (4, "hsdp", True, "fp32", 4, "prefetch"),
        (2, "fsdp", True, "fp32", 4, "offload"),
        (4, "hsdp", True, "bf16", 1, "offload"),
    )
] + [Combo("rootless", 2, reshard=True, policy="output"), Combo("rootless", 4, "hsdp", False, "output", 4)]
"""Settings outside the product: each appears here at least once, on two models."""
