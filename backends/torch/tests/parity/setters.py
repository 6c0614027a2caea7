"""What the options of a combination call on the wrapped modules: once after wrapping, or around every microbatch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity.combos import Combo

Setter = Callable[[ModuleType, nn.Module, list[Any], str], None]


def each(method: str, *args: Any) -> Setter:
    """Call `method` on every unit."""

    def call(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
        for unit in units:
            getattr(unit, method)(*args)

    return call


def divide(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    for unit in units:
        unit.set_gradient_divide_factor(float(value))


def prefetch_next(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    """Every unit but the root gathers the next two in forward and the previous two in backward."""
    inner = units[1:]
    for index, unit in enumerate(inner):
        unit.set_modules_to_forward_prefetch(inner[index + 1 : index + 3])
        unit.set_modules_to_backward_prefetch(inner[max(index - 2, 0) : index][::-1])


def halve(value: Tensor) -> None:
    """A hook that changes what it is given, so that whether, when and how often it runs shows in the numbers."""
    value.mul_(0.5)


def hook_parameters(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: halve(parameter.grad._local_tensor))


def share_context(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    source.share_comm_ctx(units)


def register_generate(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    source.register_fsdp_forward_method(module, "generate")


class CustomAllGather:
    """The communication protocol of `set_custom_all_gather`, by way of a list of tensors instead of one."""

    def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        parts = list(output_tensor.chunk(group.size()))
        return dist.all_gather(parts, input_tensor.clone(), group=group, async_op=async_op)


class CustomReduceScatter(CustomAllGather):
    """The protocol of `set_custom_reduce_scatter`, by way of an all-reduce; only sums and averages."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        whole = input_tensor.clone()
        dist.all_reduce(whole, op=op, group=group)
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])


def custom_communication(source: ModuleType, module: nn.Module, units: list[Any], value: str) -> None:
    for unit in units:
        unit.set_custom_all_gather(CustomAllGather())
        unit.set_custom_reduce_scatter(CustomReduceScatter())


AFTER_WRAP: dict[str, Setter] = {
    "factor": divide,
    "force-sum": each("set_force_sum_reduction_for_comms", True),
    "no-unshard-in-backward": each("set_unshard_in_backward", False),
    "fill-unused": each("set_reduce_scatter_unused_params", True),
    "setter-reshard": each("set_reshard_after_forward", True),
    "prefetch": prefetch_next,
    "reduce-hook": each("set_all_reduce_hook", halve),
    "parameter-hook": hook_parameters,
    "custom-comm": custom_communication,
    "share-context": share_context,
    "separate-group": each("set_separate_reduce_scatter_group", True),
    "two-buffers": each("set_reduce_scatter_max_input_buffers", 2),
    "async-unshard": each("_set_unshard_async_op", True),
    "method": register_generate,
}


def after_wrap(source: ModuleType, combo: Combo, module: nn.Module) -> None:
    """Setters that are called once, right after wrapping."""
    units = [child for child in module.modules() if isinstance(child, source.FSDPModule)]
    for option in combo.options:
        name, _, value = option.partition("=")
        if name in AFTER_WRAP:
            AFTER_WRAP[name](source, module, units, value)


def before_microbatch(combo: Combo, units: list[Any], *, is_last: bool) -> None:
    """Setters that follow the microbatch. Plain accumulation turns the whole gradient sync off until the last."""
    if combo.accumulation > 1:
        for unit in units:
            set_sync(combo, unit, is_last=is_last)
    if "manual-unshard" in combo.options:
        for handle in [unit.unshard(async_op=True) for unit in units]:
            handle.wait()
    if "manual-reshard" in combo.options:
        for unit in units:
            unit.unshard()
        for unit in units:
            unit.reshard()


def set_sync(combo: Combo, unit: Any, *, is_last: bool) -> None:
    if "sync-always" not in combo.options and "no-all-reduce" not in combo.options:
        unit.set_requires_gradient_sync(is_last)
    if "no-all-reduce" in combo.options:
        unit.set_requires_all_reduce(is_last)
    if "keep-unsharded" in combo.options:
        unit.set_reshard_after_backward(is_last)
    if "last-backward" in combo.options:
        unit.set_is_last_backward(is_last)
