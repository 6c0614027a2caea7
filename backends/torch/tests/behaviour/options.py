"""Options that must not change a single bit: fusion of collectives, buffers, resharding, prefetching."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from behaviour.models import WIDTH, assert_same_bits, gradients, loss_of, mlp, parameters, sizes_of, wrap
from behaviour.registry import behaviour
from hpcompat import MixedPrecisionPolicy

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
POLICIES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": {"param_dtype": torch.float16}}


def random_mlp() -> nn.Sequential:
    """With values that are not exact."""
    torch.manual_seed(1)
    model = mlp()
    for layer in model[::2]:
        layer.reset_parameters()
    return model


def trained(
    *, policy: str = "fp32", prepare: Any = None, accumulate: int = 1, **options: Any
) -> dict[str, torch.Tensor]:
    """Parameters and last gradients after three steps on random batches."""
    model = wrap(random_mlp(), mp_policy=MixedPrecisionPolicy(**POLICIES[policy]), **options)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        for index in range(accumulate):
            model.set_requires_gradient_sync(index == accumulate - 1)
            loss_of(model, torch.randn(3, WIDTH, generator=generator)).float().backward()
        optimizer.step()
    return {**parameters(model), **{f"{name}.grad": value for name, value in gradients(model).items()}}


@behaviour(each=[{"policy": policy, "accumulate": n} for policy in POLICIES for n in (1, 3)])
def fusion_changes_no_bit(policy: str, accumulate: int) -> None:
    assert_same_bits(
        trained(policy=policy, accumulate=accumulate, comm_fusion=False),
        trained(policy=policy, accumulate=accumulate, comm_fusion=True),
    )


@behaviour(each=[{"policy": policy, "zero_copy": value} for policy in POLICIES for value in (False, True)])
def zero_copy_changes_no_bit(policy: str, zero_copy: bool) -> None:
    assert_same_bits(trained(policy=policy, comm_fusion_zero_copy=zero_copy), trained(policy=policy))


@behaviour(each=[{"reshard": True}, {"reshard": False}])
def resharding_changes_no_bit(reshard: bool) -> None:
    assert_same_bits(trained(reshard_after_forward=reshard), trained())


def prefetch_all(model: Any) -> None:
    """Every layer gathers all others, in forward and in backward."""
    layers = list(model[::2])
    for layer in layers:
        layer.set_modules_to_forward_prefetch([other for other in layers if other is not layer])
        layer.set_modules_to_backward_prefetch([other for other in layers if other is not layer])


@behaviour()
def prefetching_changes_no_bit() -> None:
    assert_same_bits(trained(prepare=prefetch_all), trained())


@behaviour()
def more_buffers_change_no_bit() -> None:
    assert_same_bits(trained(prepare=lambda model: model.set_reduce_scatter_max_input_buffers(3)), trained())


@behaviour()
def asynchronous_unshards_change_no_bit() -> None:
    assert_same_bits(trained(prepare=lambda model: model._set_unshard_async_op(True)), trained())


@behaviour()
def separate_reduce_scatter_groups_change_no_bit() -> None:
    assert_same_bits(trained(prepare=lambda model: model.set_separate_reduce_scatter_group()), trained())


@behaviour()
def process_group_memory_changes_no_bit() -> None:
    assert_same_bits(trained(prepare=take_process_group_memory), trained())


def take_process_group_memory(model: Any) -> None:
    for layer in model[::2]:
        layer.set_allocate_memory_from_process_group_for_comm(True)


@behaviour(2)
def fusion_is_one_collective_per_unit() -> None:
    """Without it, one per parameter: eight in forward, eight reductions."""
    counts = {}
    for fused in (True, False):
        model = wrap(mlp(), comm_fusion=fused, reshard_after_forward=False)
        with sizes_of("all_gather") as gathers, sizes_of("reduce_scatter") as reductions:
            loss_of(model, torch.ones(3, WIDTH)).backward()
        counts[fused] = (len(gathers), len(reductions))
        assert sum(numel for numel, _ in gathers) == 4 * WIDTH + 4 + 3 * 7 + 3 + 2 * 5 + 2 + 3 + 1
    assert counts == {True: (4, 4), False: (8, 8)}


@behaviour(2, each=[{"zero_copy": True}, {"zero_copy": False}])
def zero_copy_keeps_a_unit_in_one_buffer(zero_copy: bool) -> None:
    """Which it then gathers as it is."""
    model = wrap(mlp(), comm_fusion_zero_copy=zero_copy)
    layer = model[0]
    weight, bias = (parameter.to_local().untyped_storage() for parameter in layer.parameters())
    assert (weight.data_ptr() + weight.nbytes() == bias.data_ptr()) is zero_copy
