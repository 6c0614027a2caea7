"""SGD: torch's ``foreach`` implementation, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from mindspore import Tensor

from hpcompat_mindspore.arithmetic import Arithmetic, Ops, Value
from hpcompat_mindspore.optimizer import Due, Group, Optimizer, check_range, number_of, zeros_like


class SGD(Optimizer):
    """``torch.optim.SGD``: arguments, defaults, operations and rounding points (see ``rounding points`` in
    :mod:`hpcompat_mindspore.arithmetic`).

    State: with ``momentum``, ``momentum_buffer`` in the parameter's dtype; the first step makes it from the gradient.
    Gradients are left as they are (torch's ``foreach`` step with ``nesterov`` writes into them).

    Args:
        params: parameters, or dicts with ``"params"`` and options of their own.
        lr: learning rate, in the parameter's dtype where it meets one of 16 bits, as in torch.
        momentum: decay of the buffer; 0 keeps none.
        dampening: of a gradient before it enters the buffer.
        weight_decay: added to the gradient as a multiple of the parameter.
        nesterov: look ahead.
        maximize: ascend.
        foreach: any value gives the same.

    Raises:
        ValueError: an option out of range, no parameters, or one in two groups.
        CapabilityError: ``differentiable`` or ``fused``.
    """

    shaped_states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def check_options(self, group: Group) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, group[name])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"expected a momentum and no dampening with nesterov, but got momentum={group['momentum']!r} and "
                f"dampening={group['dampening']!r}"
            )

    def update_group(self, due: Sequence[Due], group: Group, math: Arithmetic) -> None:
        # Where a buffer of that dtype is new, torch goes on one tensor at a time.
        one_at_a_time = {one.shard.dtype for one in due if one.state.get("momentum_buffer") is None}
        for one in due:
            is_first = one.state.get("momentum_buffer") is None
            buffers: list[Tensor] = []
            if group["momentum"] != 0:
                if is_first:
                    one.state["momentum_buffer"] = zeros_like(one.shard)
                buffers = [one.state["momentum_buffer"]]
            rule = _SGDRule(group, is_first=is_first, one_at_a_time=one.shard.dtype in one_at_a_time)
            math.update([one.shard, *buffers], [one.grad], rule)


class _SGDRule:
    """One step. Numbers that do not depend on elements are Python's floats, as in torch."""

    def __init__(self, group: Group, *, is_first: bool, one_at_a_time: bool) -> None:
        self._is_first, self._one_at_a_time = is_first, one_at_a_time
        self._maximize, self._nesterov = bool(group["maximize"]), bool(group["nesterov"])
        self._lr, self._momentum = number_of(group["lr"]), number_of(group["momentum"])
        self._weight_decay, self._dampening = number_of(group["weight_decay"]), number_of(group["dampening"])

    def __call__(self, ops: Ops, param: Value, *rest: Value) -> tuple[Value, ...]:
        *buffers, grad = rest
        if self._maximize:
            grad = ops.negate(grad)
        if self._weight_decay != 0:
            grad = ops.add(grad, param, alpha=self._weight_decay)
        if buffers:
            buffer = grad
            if not self._is_first:
                decay = ops.scale if self._one_at_a_time else ops.multiply
                buffer = ops.add(decay(buffers[0], self._momentum), grad, alpha=1 - self._dampening)
            grad = ops.add(grad, buffer, alpha=self._momentum) if self._nesterov else buffer
            buffers = [buffer]
        return ops.add(param, grad, alpha=-self._lr), *buffers
