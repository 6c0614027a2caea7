"""hpcompat against a single-process unsharded run, where native FSDP2 raises or gives wrong numbers.

Every test here is a case in which "the same as native" is not the answer.
"""

from __future__ import annotations

import pytest

from covering import covering
from hpcompat_conformance.pool import PoolSet
from parity.combos import Combo, choices, identity
from parity.native_gaps import NATIVE_REFUSES

MESHES = [(1, "fsdp"), (2, "fsdp"), (2, "hsdp"), (2, "hsdp-wide"), (4, "fsdp"), (4, "hsdp"), (4, "hsdp-tall")]


def check(pool: PoolSet, combo: Combo, function: str = "check_training", **kwargs: object) -> list[object]:
    return pool(combo.world).run(f"parity.single:{function}", combo=combo.to_dict(), **kwargs)


DIVIDED = [
    Combo("mlp", world, mesh, policy=policy, options=(f"factor={factor}",))
    for world, mesh in MESHES
    for factor in (1, 3, 300)
    for policy in ("fp32", "bf16", "fp16")
]


@pytest.mark.parametrize("combo", covering(DIVIDED, choices, strength=2, id=identity))
def test_divide_factor_is_the_same_on_every_mesh(pool: PoolSet, combo: Combo) -> None:
    """The sum over all ranks, divided by the factor, on FSDP and HSDP alike (RED-03); gloo cannot premultiply."""
    (option,) = combo.options
    assert min(check(pool, combo, divisor=int(option.removeprefix("factor=")))) == 3 * 8


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
def test_divide_factor_with_accumulation(pool: PoolSet, mesh: str) -> None:
    for options in ((), ("sync-always",)):
        check(pool, Combo("decoder", 4, mesh, accumulation=4, options=("factor=3", *options)), divisor=3)


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
@pytest.mark.parametrize(("world", "mesh"), [(1, "fsdp"), (2, "hsdp"), (4, "hsdp-tall")])
def test_factor_on_a_shard_axis_of_one_divides_once(pool: PoolSet, world: int, mesh: str, policy: str) -> None:
    """Native divides twice where it copies instead of reduce-scattering (fp16, or forced sums)."""
    combo = Combo("mlp", world, mesh, policy=policy, options=("factor=4", "force-sum"))
    check(pool, combo, divisor=4)


@pytest.mark.parametrize("options", [(), ("fill-unused",)])
@pytest.mark.parametrize(("world", "mesh"), [(1, "fsdp"), (2, "fsdp"), (4, "hsdp")])
def test_first_gradient_in_the_last_microbatch(pool: PoolSet, world: int, mesh: str, options: tuple[str, ...]) -> None:
    """Native mixes bf16 and fp32 gradients in one reduction there, and raises."""
    combo = Combo("late", world, mesh, policy="bf16", accumulation=4, options=options)
    assert min(check(pool, combo)) == 3 * (9 if options else 8)


@pytest.mark.parametrize("mesh", ["fsdp", "hsdp"])
def test_first_gradient_in_the_last_microbatch_without_all_reduce(pool: PoolSet, mesh: str) -> None:
    """The same with a partial sum per microbatch: a parameter without a partial joins those that have one."""
    check(pool, Combo("late", 4, mesh, policy="bf16", accumulation=4, options=("no-all-reduce",)))


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["mlp", "decoder"])
def test_integer_reshard_of_column_shards(pool: PoolSet, model: str, policy: str) -> None:
    """Native raises IndexError in backward for `Shard(1)` with `reshard_after_forward=2` on 4 ranks."""
    check(pool, Combo(model, 4, reshard=2, policy=policy, options=("columns",)))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(("world", "reshard"), [(1, True), (2, True), (2, False), (4, 2)])
def test_conversion_after_the_first_step(pool: PoolSet, world: int, reshard: bool | int, dtype: str) -> None:
    """Native keeps its gather buffers in the old dtype, and the next forward raises."""
    check(pool, Combo("mlp", world, reshard=reshard), "check_conversion", dtype=dtype)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "mesh"), [(1, "fsdp"), (2, "fsdp"), (2, "hsdp"), (4, "fsdp"), (4, "hsdp")])
def test_replicated_parameters(pool: PoolSet, world: int, mesh: str, policy: str, accumulation: int) -> None:
    """`replicate_params`: whole on every rank, averaged over all ranks. Native has no such argument."""
    check(pool, Combo("mlp", world, mesh, policy=policy, accumulation=accumulation), "check_replicated")


@pytest.mark.parametrize(("world", "mesh"), [(1, "fsdp"), (2, "fsdp"), (4, "hsdp")])
def test_mixed_dtypes_in_one_unit(pool: PoolSet, world: int, mesh: str) -> None:
    """Fp32 norms and bf16 linear layers (MPR-09). Native raises at the first forward: pytorch/pytorch#156784."""
    for accumulation in (1, 4):
        check(pool, Combo("mixed-dtypes", world, mesh, accumulation=accumulation), tolerance=2e-2)


@pytest.mark.parametrize(("world", "mesh"), [(1, "fsdp"), (2, "fsdp"), (4, "hsdp")])
def test_ignored_parameters_with_foreach_and_clipping(pool: PoolSet, world: int, mesh: str) -> None:
    """Torch's foreach functions refuse a mixture of kinds (pytorch/pytorch#183207): it steps by groups."""
    check(pool, Combo("mlp", world, mesh), "check_ignored")


@pytest.mark.parametrize(("world", "mesh"), [(2, "fsdp"), (4, "hsdp")])
def test_roots_with_a_shared_context_in_one_backward(pool: PoolSet, world: int, mesh: str) -> None:
    """Native's first root to finish clears the prefetch order of the others, and their backward raises IndexError."""
    for accumulation in (1, 4):
        check(pool, Combo("rootless", world, mesh, accumulation=accumulation, options=("share-context",)))


@pytest.mark.parametrize(("combo", "message"), NATIVE_REFUSES, ids=lambda value: getattr(value, "id", ""))
def test_native_still_refuses(pool: PoolSet, combo: Combo, message: str) -> None:
    """Why these cases are not compared with native: it raises. If this fails, move the case to the comparison."""
    results = pool(combo.world).run("parity.compare:compare", combo=combo.to_dict(), ours="native", theirs="native")
    assert all(message in (result["theirs_error"] or "") for result in results), results
