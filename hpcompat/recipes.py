"""Ways of wrapping that trainers share, by TorchTitan's names where it has one; all of it is made of public calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpcompat.api import fully_shard
from hpcompat.module import HSDPModule
from hpcompat.policy import MixedPrecisionPolicy, OffloadPolicy
from hpcompat.registry import backend_for

RESHARD_POLICIES = ("always", "never", "default")


def get_fsdp_reshard_after_forward_policy(reshard_after_forward_policy: str, pp_enabled: bool) -> bool:
    """What ``fully_shard`` gets as ``reshard_after_forward`` (TorchTitan's function and words).

    ``"default"`` is ``True``, except under pipeline parallelism: there every microbatch would gather again.

    Raises:
        ValueError: another word.
    """
    if reshard_after_forward_policy not in RESHARD_POLICIES:
        raise ValueError(
            f"expected reshard_after_forward_policy to be one of {RESHARD_POLICIES}, "
            f"but got {reshard_after_forward_policy!r}"
        )
    if reshard_after_forward_policy == "default":
        return not pp_enabled
    return reshard_after_forward_policy == "always"


def apply_fsdp_to_decoder(
    model: Any,
    *,
    mesh: Any,
    blocks: Iterable[Any],
    embedding: Any = None,
    head: Sequence[Any] = (),
    is_tied: bool = False,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward_policy: str = "default",
    pp_enabled: bool = False,
) -> Any:
    """Wrap a decoder as trainers do: a unit for the embedding, one per block, one for what comes last, and the root.

    Args:
        model: the whole decoder, or a pipeline stage of it.
        mesh: as for ``fully_shard``.
        blocks: its layers, in the order of forward.
        embedding: the token embedding; ``None`` on a stage without one.
        head: the last modules, such as the final norm and the output projection. They are one unit, which is kept
            after forward unless the policy is ``"always"``: its backward comes at once.
        is_tied: the head's weight is the embedding's. The two are then one unit, as a parameter must belong to one.
        mp_policy: mixed precision, of all units.
        offload_policy: of all units.
        reshard_after_forward_policy: see :func:`get_fsdp_reshard_after_forward_policy`.
        pp_enabled: whether ``model`` is a stage of a pipeline.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: an unknown policy, or ``is_tied`` without both an embedding and a head.
    """
    if is_tied and (embedding is None or not head):
        raise ValueError(
            f"expected an embedding and a head with is_tied=True, but got embedding={embedding!r} and head={head!r}"
        )
    reshard = get_fsdp_reshard_after_forward_policy(reshard_after_forward_policy, pp_enabled)
    options = {"mesh": mesh, "mp_policy": mp_policy, "offload_policy": offload_policy}
    if embedding is not None and not is_tied:
        fully_shard(embedding, reshard_after_forward=reshard, **options)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    if is_tied:
        fully_shard([embedding, *head], reshard_after_forward=reshard, **options)
    elif head:
        fully_shard(list(head), reshard_after_forward=reshard_after_forward_policy == "always", **options)
    return fully_shard(model, **options)


def expert_shard_dim(num_experts: int, *, ep_degree: int, shard_degree: int) -> int:
    """The dim on which to shard the weights of experts, ``[local experts, ...]``, over ``shard_degree`` ranks.

    0, the experts themselves, as long as every rank gets one; else 1, since ranks without an expert would wait for the
    others (TorchTitan's rule). What counts is how many ranks *share* the weights: replicas, as under HSDP, hold them
    again and do not (PLC-09). Such a unit's gradients are to be divided by the number of **all**
    data-parallel ranks: ``unit.set_gradient_divide_factor(world_size)``.

    Args:
        num_experts: of the whole layer.
        ep_degree: ranks over which expert parallelism spreads them.
        shard_degree: ranks over which each part is sharded.

    Raises:
        ValueError: experts that expert parallelism cannot spread evenly.
    """
    if min(num_experts, ep_degree, shard_degree) < 1 or num_experts % ep_degree:
        raise ValueError(
            f"expected num_experts to be a multiple of ep_degree, but got {num_experts} experts, ep_degree={ep_degree} "
            f"and shard_degree={shard_degree}"
        )
    return 1 if shard_degree * ep_degree > num_experts else 0


def disable_fsdp_gradient_division(model: Any) -> None:
    """Gradients become sums over the ranks, for losses that are already divided by the global number of tokens
    (TorchTitan's function). Calls ``set_gradient_divide_factor(1.0)`` on every unit at or below ``model``.

    Raises:
        ValueError: no module of ``model`` is wrapped.
    """
    for unit in _wrapped_modules(model):
        unit.set_gradient_divide_factor(1.0)


def enable_fsdp_symm_mem(model: Any) -> None:
    """Take the communication buffers of every unit at or below ``model`` from symmetric memory (TorchTitan's function).

    Raises:
        ValueError: no module of ``model`` is wrapped.
        CapabilityError: the device has no such memory.
    """
    for unit in _wrapped_modules(model):
        unit.set_symm_mem_for_comm()


def _wrapped_modules(model: Any) -> list[HSDPModule]:
    found = [module for _, module in backend_for(model).named_modules(model) if isinstance(module, HSDPModule)]
    if not found:
        raise ValueError(
            f"expected wrapped modules at or below the model, but got none in {type(model).__name__}; "
            "call fully_shard first"
        )
    return found
