"""Optimizers: ours, and how those of MindSpore step with the gradients of shards.

[Note: MindSpore's optimizers on the CPU]
Seen with 2.10.0: ``mint.optim.Adam`` and ``SGD`` run there and change nothing, ``mint.optim.AdamW`` has no kernel and
``FusedAdamW`` fails. They are refused. ``nn.Optimizer`` and ``mindspore.experimental.optim`` work in float32, most of
them in float16, and none in bfloat16. None of them follows torch's rounding points, and ``nn.AdamWeightDecay`` is
another algorithm than AdamW: it has no bias correction. Those with states cannot be made where a shard is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.experimental import optim as experimental

from hpcompat.errors import CapabilityError
from hpcompat_mindspore import autograd
from hpcompat_mindspore.adam import Adam as Adam
from hpcompat_mindspore.adam import AdamW as AdamW
from hpcompat_mindspore.arithmetic import is_host
from hpcompat_mindspore.autograd import executor
from hpcompat_mindspore.mpi import progress
from hpcompat_mindspore.norm import clip_grad_norm_ as clip_grad_norm_
from hpcompat_mindspore.optimizer import Optimizer, drop_gradients
from hpcompat_mindspore.optimizer import gradient_of as gradient_of
from hpcompat_mindspore.param import Shown, param_of
from hpcompat_mindspore.sgd import SGD as SGD

_FOREIGN = (nn.Optimizer, experimental.Optimizer)
# Of nn.Optimizer: with groups, a tuple with one for each parameter as well.
_OPTIONS = frozenset({"learning_rate", "weight_decay"})


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is one of ours, an ``nn.Optimizer``, or one of ``mint.optim``."""
    return isinstance(value, (Optimizer, *_FOREIGN))


def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Step on this rank's shards.

    MindSpore's own optimizers are handed the gradients of the shards, zeros for a parameter that has none, as
    ``value_and_grad`` would give.

    Returns:
        What ``closure``, which computes the gradients, returned.

    Raises:
        CapabilityError: an optimizer that does not work on the CPU.
        RuntimeError: one of MindSpore's steps while a parameter is unsharded, or was made before sharding.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer.step(closure)
    if not isinstance(optimizer, _FOREIGN):
        raise TypeError(f"expected an optimizer, but got {optimizer!r}; hpcompat.optim has some")
    loss = closure() if closure is not None else None
    _check_runs_here(optimizer)
    parameters = tuple(optimizer.parameters)
    _check_shards(optimizer, parameters)
    _run(optimizer, tuple(_gradient_for(parameter) for parameter in parameters))
    return loss


def init_state(optimizer: Any) -> None:
    """Make the states that first steps would make, for a checkpoint to be loaded into; no step is taken. MindSpore's
    own optimizers have theirs from the start.
    """
    if isinstance(optimizer, Optimizer):
        optimizer.init_state()


def optimizer_state(optimizer: Any, parameter: Parameter) -> Mapping[str, Any]:
    """What ``optimizer`` keeps for ``parameter``; one of ours has nothing before its first step."""
    if isinstance(optimizer, Optimizer):
        return optimizer.state.get(parameter, {})
    parameters = tuple(optimizer.parameters)
    place = next((index for index, other in enumerate(parameters) if other is parameter), None)
    if place is None:
        return {}
    return {name: states[place] for name, states in _states_of(optimizer, parameters)}


def _states_of(optimizer: Any, parameters: tuple[Parameter, ...]) -> Iterator[tuple[str, ParameterTuple]]:
    """Those of MindSpore's own optimizers, which keep a tuple of each kind in the order of the parameters."""
    for name, states in vars(optimizer).items():
        if name in _OPTIONS:
            continue
        is_per_parameter = isinstance(states, ParameterTuple) and len(states) == len(parameters)
        if is_per_parameter and not any(one is other for one, other in zip(states, parameters, strict=True)):
            yield name, states


def zero_grad(target: Any, *, set_to_none: bool = True) -> None:
    """Drop the gradients of a cell or of an optimizer's parameters: ``grad``, ``main_grad``, and those that still wait
    for their reduction.

    Raises:
        CapabilityError: ``set_to_none`` is False.
    """
    if not set_to_none:
        raise CapabilityError(
            backend="mindspore", capability="zero_grad(set_to_none=False)", hint="gradients can only be dropped"
        )
    for parameter in _parameters_of(target):
        drop_gradients(parameter)


def _parameters_of(target: Any) -> Iterator[Parameter]:
    if is_optimizer(target):
        yield from target.parameters
        return
    if not isinstance(target, nn.Cell):
        raise TypeError(f"expected a cell or an optimizer, but got {target!r}")
    for _, cell in target.cells_and_names():
        yield from (parameter for parameter in cell._params.values() if parameter is not None)


# MindSpore's own optimizers


def _check_runs_here(optimizer: Any) -> None:
    """[Note: MindSpore's optimizers on the CPU]"""
    kind = type(optimizer)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("mindspore.mint.optim")]
    if bases and is_host():
        raise CapabilityError(
            backend="mindspore",
            capability=f"mint.optim.{bases[0].__name__} on the CPU",
            hint="it changes no parameter there or has no kernel; take hpcompat.optim's",
        )


def _check_shards(optimizer: Any, parameters: tuple[Parameter, ...]) -> None:
    for parameter in parameters:
        param = param_of(parameter)
        if param is not None and param.shown is not Shown.SHARD:
            raise RuntimeError(
                f"expected {type(optimizer).__name__} to step on shards, but got {param.name!r} unsharded; call "
                "reshard() on its module first"
            )
    for _, states in _states_of(optimizer, parameters):
        for state, parameter in zip(states, parameters, strict=True):
            if tuple(state.shape) not in (tuple(parameter.shape), ()):
                param, kind = param_of(parameter), type(optimizer).__name__
                advice = f"{kind} does not update element by element: take hpcompat.optim's"
                if param is not None and tuple(state.shape) == param.layout.shape:
                    advice = f"create {kind} after wrapping"
                raise RuntimeError(
                    f"expected a state of the shard's shape, {tuple(parameter.shape)}, but got {state.name!r} of "
                    f"shape {tuple(state.shape)}; {advice}"
                )


def _gradient_for(parameter: Parameter) -> Tensor:
    grad = gradient_of(parameter)
    if grad is None:
        return ops.zeros(tuple(parameter.shape), parameter.dtype)
    return grad if grad.dtype == parameter.dtype else grad.astype(parameter.dtype)


def _run(optimizer: Any, grads: tuple[Tensor, ...]) -> None:
    progress()
    executor.sync()
    autograd.forget_shapes()
    try:
        with autograd.no_grad():
            optimizer(grads)
        executor.sync()  # errors of operators come up here
    except (RuntimeError, TypeError) as error:
        if not is_host():
            raise
        dtypes = sorted({str(parameter.dtype) for parameter in optimizer.parameters})
        raise CapabilityError(
            backend="mindspore",
            capability=f"{type(optimizer).__name__} of {', '.join(dtypes)} on the CPU",
            hint=f"MindSpore said: {_reason(error)}; take hpcompat.optim's",
        ) from error
    finally:
        autograd.resume_recording()


def _reason(error: Exception) -> str:
    """The line of MindSpore's text that says most. Lines of dashes and headings stand around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    unsupported = [line for line in lines if "unsupported" in line.lower()]
    return next(iter([*unsupported, *lines]), type(error).__name__)
