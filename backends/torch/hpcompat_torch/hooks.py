"""Module hooks and autograd, translated into calls of the scheduler's unit and param groups.

[Note: post-backward]
A group's post-backward must run when the gradients of the module's inputs are ready, not later: a residual connection
around the module would delay a plain tensor hook. So each input that requires grad gets a node of its own. For one
input, a view and a hook on it, which cost a third of a Python autograd function; for several, one function whose
backward waits for all of them. If the module changes that view in place, the hook is lost and the final callback runs
the post-backward instead.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hpcompat.core.around import AroundForward
from hpcompat.core.state_dict import after_reading, before_loading, before_reading
from hpcompat.core.tree import TensorTree
from hpcompat.core.unit import unit_of
from hpcompat.module import HSDPModule
from hpcompat_torch import loading, private
from hpcompat_torch.native_view import NativeModule, NativeReplicateModule, StateView, refuse_unknown_methods, state_of
from hpcompat_torch.param import ShardedParam, clear_gradient
from hpcompat_torch.streams import has_streams
from hpcompat_torch.tensors import cast_floating

if TYPE_CHECKING:
    from hpcompat.contract.scheduler import HookedGroup, HookedUnit

logger = logging.getLogger("hpcompat")


def install(unit: HookedUnit) -> None:
    """Hooks on every module of ``unit``: forward, state dict, load."""
    AROUND.install(unit)
    for group in unit.groups:
        holders = dict.fromkeys(module for param in group.tensors.params for module, _ in param.places)  # type: ignore[attr-defined]
        for module in holders:
            module.register_state_dict_pre_hook(before_reading(group))
            module.register_state_dict_post_hook(after_reading(group, shard_of=_shard_of))
            module.register_load_state_dict_pre_hook(before_loading(group))
            module.register_load_state_dict_post_hook(_rebind_hook(group))


def _shard_of(param: ShardedParam, value: torch.Tensor) -> torch.Tensor:
    """With ``keep_vars`` the parameter itself."""
    return param.sharded_param if value.requires_grad else param.sharded_param.detach()


def _rebind_hook(group: HookedGroup) -> Callable[..., None]:
    def rebind_hook(*args: Any, **kwargs: Any) -> None:
        group.tensors.rebind(flatten=False)  # type: ignore[attr-defined]

    return rebind_hook


# Forward


class _PostBackward(torch.autograd.Function):
    """Identity whose backward runs a group's post-backward once all gradients have arrived. [Note: post-backward]"""

    @staticmethod
    def forward(ctx: Any, group: HookedGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        for grad in grads:
            _gather_for_double_backward(ctx.group.unit, grad)
        ctx.group.post_backward()
        return (None, *grads)


def _with_post_backward(group: HookedGroup, tensor: torch.Tensor) -> torch.Tensor:
    viewed = tensor.view_as(tensor)

    def post_backward(grad: torch.Tensor) -> None:
        _gather_for_double_backward(group.unit, grad)
        group.post_backward()

    viewed.register_hook(post_backward)
    return viewed


def _gather_for_double_backward(unit: HookedUnit, grad: torch.Tensor) -> None:
    """Under ``create_graph=True`` a backward through a unit's backward comes in at the gradients of its inputs."""
    if grad is not None and grad.requires_grad:
        grad.register_hook(lambda _: unit.pre_backward())


class _PreBackward(torch.autograd.Function):
    """Identity whose backward runs a unit's pre-backward: for outputs inside a transform of ``torch.func``, which say
    that they need no gradient although the transform's own outputs may.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(unit: HookedUnit, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[HookedUnit, torch.Tensor], output: torch.Tensor) -> None:
        ctx.unit = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.unit.pre_backward()
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:
        return _PreBackward.apply(ctx.unit, tangent)  # type: ignore[no-any-return]


def _warn_about_view(unit: HookedUnit) -> None:
    warnings.warn(
        f"the output of unit {unit.fqn!r} ({type(unit.modules[0]).__name__}) is a view: changing it in place (x += "
        "y) drops the hook that gathers the parameters for backward. Use out-of-place operations, or return "
        "output.clone()",
        UserWarning,
        stacklevel=4,
    )


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward ends."""
    private.queue_callback(callback)


class TorchAround(AroundForward):
    """What :mod:`hpcompat.core.around` asks of torch."""

    tree = TensorTree(
        torch.Tensor,
        requires_grad=lambda tensor: tensor.requires_grad,
        atoms=(torch.dtype, torch.device, torch.Size),
        opaque=(nn.Module,),
        packed={PackedSequence: (lambda packed: packed.data, lambda packed, data: packed._replace(data=data))},
    )

    def is_recording(self) -> bool:
        return torch.is_grad_enabled()

    def in_backward(self) -> bool:
        return private.graph_task_id() != -1

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cast_floating(tensor, dtype)

    def enter_root(self, unit: HookedUnit) -> Callable[[Any], Any] | None:
        if not has_streams(unit.device):
            return None
        return lambda tensor: tensor.to(unit.device, non_blocking=True)

    def watch_inputs(self, group: HookedGroup, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(tensors) == 1:
            return [_with_post_backward(group, tensors[0])]
        return _PostBackward.apply(group, *tensors)  # type: ignore[no-any-return]

    def watch_output(self, unit: HookedUnit, tensor: torch.Tensor) -> None:
        if tensor._base is not None:
            _warn_about_view(unit)
        tensor.register_hook(lambda grad: unit.pre_backward())

    def watch_outputs(self, unit: HookedUnit, output: Any) -> Any:
        output = super().watch_outputs(unit, output)
        if not private.is_in_functorch():
            return output

        def behind_node(tensor: torch.Tensor) -> torch.Tensor:
            may_need_grad = tensor.is_floating_point() or tensor.is_complex()
            return _PreBackward.apply(unit, tensor) if may_need_grad and not tensor.requires_grad else tensor  # type: ignore[no-any-return]

        return self.tree.map(behind_node, output)


AROUND = TorchAround()


# Module methods


class TorchModuleMixin(NativeModule):  # type: ignore[misc, valid-type]
    """What a wrapped ``nn.Module`` does differently; stands between ``HSDPModule`` and the original class."""

    def _get_fsdp_state(self) -> StateView:
        return state_of(self)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unit = unit_of(self)
        if unit is None:
            return super(NativeModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.to_sharded_for_loading()
        # Past torch's own FSDPModule, which would look for a state of its own.
        result = super(NativeModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for group in unit.groups:
            group.tensors.rebind(flatten=True)  # type: ignore[attr-defined]
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; also drops ``main_grad`` and gradients that still wait for their reduction
        (OPT-07).
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in loading.units_below(self):  # type: ignore[arg-type]
            for group in unit.groups:
                for param in group.tensors.params:  # type: ignore[attr-defined]
                    clear_gradient(param.sharded_param, set_to_none=set_to_none)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; a value for a sharded parameter is a DTensor, or a plain tensor of the
        global shape (every rank passes the whole tensor). Parts that each rank has saved for itself are loaded by
        :func:`hpcompat.load_local_state_dict`.

        Raises:
            StateDictError: a value has another shape. Nothing is loaded then.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"Expected state_dict to be dict-like, names and values, but got {state_dict!r}")
        loading.reshard_below(self)  # type: ignore[arg-type]
        loaded = loading.shards_of(self, state_dict, assign=assign)  # type: ignore[arg-type]
        if hasattr(state_dict, "_metadata"):
            loaded = _WithMetadata(loaded)
            loaded._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return super().load_state_dict(loaded, strict=strict, assign=assign)  # type: ignore[misc]


refuse_unknown_methods(TorchModuleMixin, ours=HSDPModule)


class TorchReplicateMixin(TorchModuleMixin, NativeReplicateModule):  # type: ignore[misc, valid-type]
    """:class:`TorchModuleMixin` for a module of ``replicate``."""


class _WithMetadata(dict[str, Any]):
    """A state dict that carries torch's version metadata."""

    _metadata: Any
