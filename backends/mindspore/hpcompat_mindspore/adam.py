"""Adam and AdamW: torch's ``foreach`` implementation, operation by operation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import mindspore
from mindspore import Parameter

from hpcompat_mindspore.arithmetic import Arithmetic, Ops, Value
from hpcompat_mindspore.optimizer import (
    Due,
    Group,
    Optimizer,
    State,
    check_range,
    number_of,
    scalar,
    shard_of,
    zeros_like,
)

logger = logging.getLogger("hpcompat")


class Adam(Optimizer):
    """``torch.optim.Adam``: arguments, defaults, operations and rounding points (see ``rounding points`` in
    :mod:`hpcompat_mindspore.arithmetic`).

    States: ``step`` (a float32 scalar), ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``, ``max_exp_avg_sq``, all in
    the parameter's dtype as in torch. In bfloat16 these lose small updates, which a warning in the log says once.

    Args:
        params: parameters, or dicts with ``"params"`` and options of their own.
        lr: learning rate.
        betas: decay of the two averages.
        eps: added to the denominator, in the parameter's dtype: 0 in float16 for the default.
        weight_decay: added to the gradient as a multiple of the parameter.
        amsgrad: divide by the largest second average so far.
        foreach: any value gives the same.
        maximize: ascend.
        decoupled_weight_decay: shrink the parameter instead, as :class:`AdamW` does.

    Raises:
        ValueError: an option out of range, no parameters, or one in two groups.
        CapabilityError: ``capturable``, ``differentiable`` or ``fused``.
    """

    shaped_states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self._has_warned = False
        super().__init__(params, defaults)

    def check_options(self, group: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, group[name])
        for index, beta in enumerate(group["betas"]):
            check_range(f"betas[{index}]", beta, below=1.0)

    def new_state(self, parameter: Parameter, group: Group) -> State:
        shard = shard_of(parameter)
        if shard.dtype == mindspore.bfloat16 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s keeps its averages in bfloat16, the dtype of parameter %r, as torch's does: updates below 1/256 of "
                "an average are lost. Keep the parameters in float32 and compute in bfloat16 with "
                "MixedPrecisionPolicy(param_dtype=bfloat16) to have float32 averages",
                type(self).__name__,
                parameter.name,
            )
        names = self.shaped_states if group["amsgrad"] else self.shaped_states[:2]
        return {"step": scalar(0.0), **{name: zeros_like(shard) for name in names}}

    def update_group(self, due: Sequence[Due], group: Group, math: Arithmetic) -> None:
        names = self.shaped_states if group["amsgrad"] else self.shaped_states[:2]
        for one in due:
            step = number_of(one.state["step"]) + 1.0
            one.state["step"] = scalar(step)
            if group["amsgrad"] and "max_exp_avg_sq" not in one.state:
                one.state["max_exp_avg_sq"] = zeros_like(one.shard)  # switched on later
            math.update([one.shard, *(one.state[name] for name in names)], [one.grad], _AdamRule(group, step=step))


class AdamW(Adam):
    """``torch.optim.AdamW``: :class:`Adam` whose weight decay shrinks the parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
        )

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True  # whatever an Adam has saved


class _AdamRule:
    """One step. Numbers that do not depend on elements are Python's floats, as in torch."""

    def __init__(self, group: Group, *, step: float) -> None:
        self._maximize, self._is_decoupled = bool(group["maximize"]), bool(group["decoupled_weight_decay"])
        self._weight_decay, self._eps = number_of(group["weight_decay"]), number_of(group["eps"])
        self._lr = number_of(group["lr"])
        self._beta1, self._beta2 = (number_of(beta) for beta in group["betas"])
        self._step_size = -(self._lr / (1 - self._beta1**step))
        self._correction = (1 - self._beta2**step) ** 0.5

    def __call__(self, ops: Ops, param: Value, exp_avg: Value, exp_avg_sq: Value, *rest: Value) -> tuple[Value, ...]:
        *largest, grad = rest
        if self._maximize:
            grad = ops.negate(grad)
        if self._weight_decay != 0:
            if self._is_decoupled:
                param = ops.multiply(param, 1 - self._lr * self._weight_decay)
            else:
                grad = ops.add(grad, param, alpha=self._weight_decay)
        exp_avg = ops.lerp(exp_avg, grad, weight=1 - self._beta1)
        exp_avg_sq = ops.multiply(exp_avg_sq, self._beta2)
        exp_avg_sq = ops.addcmul(exp_avg_sq, grad, grad, value=1 - self._beta2)
        largest = [ops.maximum(value, exp_avg_sq) for value in largest]
        root = ops.sqrt(largest[0] if largest else exp_avg_sq)
        denominator = ops.add_number(ops.divide(root, self._correction), self._eps)
        param = ops.addcdiv(param, exp_avg, denominator, value=self._step_size)
        return param, exp_avg, exp_avg_sq, *largest
