"""The same collectives as native FSDP2, in the same order: kind, group, elements, dtype and operator, on every rank."""

from __future__ import annotations

from collections import Counter

import pytest

from covering import covering
from hpcompat_conformance.pool import PoolSet
from parity.combos import MESH_SHAPES, POLICIES, Combo, choices, identity, reshard_choices
from parity.features import PATTERNS

DECODER = [
    Combo("decoder", world, mesh, reshard, policy, accumulation)
    for world in (2, 4)
    for mesh in ("fsdp", "hsdp")
    for reshard in reshard_choices(MESH_SHAPES[mesh, world][-1])
    for policy in POLICIES
    for accumulation in (1, 4)
]
EVALUATED = [combo for combo in DECODER if combo.accumulation == 1]

OTHERS = [
    Combo("decoder", 1),
    Combo("decoder", 1, "hsdp", False, "bf16", 4),
    Combo("decoder", 2, "hsdp-wide"),
    Combo("decoder", 4, "hsdp-tall", True, "fp32", 4),
    Combo("decoder", 2, options=("automatic",)),
    Combo("decoder", 4, "hsdp", True, "bf16", 4, ("automatic", "no-all-reduce")),
    Combo("decoder", 4, "hsdp", True, "fp32", 4, ("sync-always",)),
    Combo("decoder", 2, "fsdp", True, "fp32", 4, ("keep-unsharded",)),
    Combo("decoder", 2, "fsdp", True, "fp32", 4, ("sync-always", "last-backward")),
    Combo("decoder", 2, options=("prefetch",)),
    Combo("decoder", 4, "hsdp", True, "bf16", 4, ("prefetch",)),
    Combo("decoder", 2, "fsdp", False, options=("no-unshard-in-backward",)),
    Combo("decoder", 2, options=("force-sum", "factor=3")),
    Combo("decoder", 2, "fsdp", False, options=("setter-reshard",)),
    Combo("decoder", 2, options=("offload",)),
    Combo("decoder", 2, options=("columns",)),
    Combo("decoder", 4, "replicate", True, "bf16", 4),
    Combo("nested", 2, "replicate"),
    *(
        Combo(model, world, mesh, reshard)
        for model in ("mlp", "tied", "uneven", "list", "nested", "rootless", "frozen", "buffers", "unused", *PATTERNS)
        for world, mesh, reshard in ((2, "fsdp", True), (4, "hsdp", False))
    ),
]

MODEL_PARALLEL = [Combo("tp", 4, "fsdp+tp"), Combo("spmd", 4, "fsdp+tp", options=("dp-dims",))]


def group_of(line: str) -> str:
    """The ranks of a collective's group."""
    return line[line.index(" over ") : line.index("]", line.index(" over "))]


def check_equal(pool: PoolSet, combo: Combo, phase: str, *, by_group: bool = False) -> list[str]:
    """Both implementations send the same in the same order, over all groups or within each; returns rank 0's list."""
    results = pool(combo.world).run("parity.collectives:collectives", combo=combo.to_dict(), phase=phase)
    for rank, lists in enumerate(results):
        ours, theirs = (sorted(lines, key=group_of) if by_group else lines for lines in lists)
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((i for i, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))
        assert ours == theirs, (
            f"rank {rank} differs from collective {first} on ({len(ours)} and {len(theirs)} in all):\n"
            f"ours   {ours[first : first + 6]}\nnative {theirs[first : first + 6]}"
        )
    return results[0][0]


@pytest.mark.parametrize("combo", covering(DECODER, choices, strength=3, id=identity))
def test_decoder_in_training_and_accumulation(pool: PoolSet, combo: Combo) -> None:
    sent = check_equal(pool, combo, "training")
    kinds = Counter(line.partition("[")[0] for line in sent)
    reductions = 2 * 3 if combo.mesh_shape[-1] > 1 else 0
    assert kinds["reduce_scatter"] == reductions, "two steps of three units, each reduced once"
    assert kinds["all_reduce"] == (2 * 3 if combo.mesh == "hsdp" else 0)
    gathers_per_microbatch = 3 if combo.reshard is False else 6
    assert kinds["all_gather"] == (2 * combo.accumulation * gathers_per_microbatch if reductions else 0)


@pytest.mark.parametrize("combo", covering(EVALUATED, choices, strength=2, id=identity))
def test_decoder_in_evaluation(pool: PoolSet, combo: Combo) -> None:
    assert check_equal(pool, combo, "evaluation")


@pytest.mark.parametrize("combo", OTHERS, ids=identity)
def test_other_models_and_settings(pool: PoolSet, combo: Combo) -> None:
    sent = check_equal(pool, combo, "training")
    assert sent or combo.world == 1


@pytest.mark.parametrize("combo", MODEL_PARALLEL, ids=identity)
def test_tensor_parallel_models(pool: PoolSet, combo: Combo) -> None:
    """Group by group: a gather of ours may start before a collective of the model that it does not depend on."""
    sent = check_equal(pool, combo, "training", by_group=True)
    assert {group_of(line) for line in sent} == {" over [0, 1", " over [0, 2"}


def test_other_groups_are_noticed(pool: PoolSet) -> None:
    """Negative control: the lists of two meshes of the same ranks differ."""
    flat, nested = (
        pool(4).run("parity.collectives:collectives", combo=combo.to_dict(), phase="training", names=("native",))
        for combo in (Combo("mlp", 4), Combo("mlp", 4, "hsdp"))
    )
    assert flat != nested
