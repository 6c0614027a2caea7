"""What all optimizers of this backend share: parameter groups, states, closures, state dicts. As torch's, by its names.

An optimizer holds the parameter objects, which sharding leaves in place, and works on the shards, whatever the
parameters show; so it may be made before or after wrapping, as long as it has no state yet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor

from hpcompat.errors import CapabilityError, StateDictError
from hpcompat_mindspore.arithmetic import Arithmetic, arithmetic, is_host
from hpcompat_mindspore.autograd import get_gradient, set_gradient
from hpcompat_mindspore.param import param_of
from hpcompat_mindspore.tensors import is_floating, numpy_dtype

Group = dict[str, Any]
State = dict[str, Any]

# Options of torch's that choose among its implementations. There is one here, which follows ``foreach``.
_NOT_HERE = ("fused", "capturable", "differentiable")


# Parameters


def gradient_of(parameter: Parameter) -> Tensor | None:
    """The gradient to step with: ``parameter.grad``, else ``main_grad``; the engine's for one that no unit manages."""
    grad = get_gradient(parameter)
    return vars(parameter).get("main_grad") if grad is None else grad


def drop_gradients(parameter: Parameter) -> None:
    """``parameter.grad``, ``main_grad``, and what still waits for its reduction."""
    own = vars(parameter)
    own.update({name: None for name in ("grad", "main_grad") if name in own})
    parameter._grad = None
    param = param_of(parameter)
    if param is not None:
        param.drop_gradients()


def shard_of(parameter: Parameter) -> Tensor:
    """What an optimizer changes: the shard, whatever the parameter shows; a plain parameter itself."""
    param = param_of(parameter)
    return parameter if param is None else param.shard


def members_of(parameters: Parameter | Iterable[Parameter]) -> list[Parameter]:
    """``parameters``, each once.

    Raises:
        TypeError: something else is among them.
    """
    members = [parameters] if isinstance(parameters, Parameter) else list(parameters)
    for member in members:
        if not isinstance(member, Parameter):
            raise TypeError(f"expected parameters, but got {member!r}; pass model.trainable_params()")
    return list({id(member): member for member in members}.values())


def _without_names(given: Any) -> tuple[list[str], list[Any]]:
    """The names of pairs, and the parameters."""
    members = [given] if isinstance(given, Parameter) else list(given)
    pairs = [member for member in members if isinstance(member, tuple) and len(member) == 2]
    if not pairs:
        return [], members
    if len(pairs) != len(members):
        raise TypeError("expected parameters or (name, parameter) pairs, but got both; name all of them or none")
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


# Optimizers


class Due(NamedTuple):
    """What one parameter's step is made of. All have one dtype and shape, but for ``step``."""

    shard: Tensor
    grad: Tensor
    state: State


class Optimizer:
    """Base of :class:`hpcompat_mindspore.adam.Adam` and the others.

    ``param_groups`` is a list of dicts with ``"params"`` and the options, which may change at any time (``"lr"`` by a
    scheduler); ``state`` maps a parameter to a dict of tensors. A state has the parameter's dtype and the shard's shape
    (``step``: a float32 scalar) and is made when the parameter first has a gradient.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or dicts with ``"params"`` and options that differ from
            ``defaults``.
        defaults: options.

    Raises:
        ValueError: there are no parameters, or one is in two groups.
        TypeError: something else than parameters, or one that is not floating.
    """

    # Of the states that have the shape of the shard.
    shaped_states: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        for option in _NOT_HERE:
            if defaults.get(option):
                raise CapabilityError(
                    backend="mindspore",
                    capability=f"{option} optimizers",
                    hint=f"the step runs operation by operation, but got {option}={defaults[option]!r}; leave it out",
                )
        self.defaults = defaults
        self.state: defaultdict[Parameter, State] = defaultdict(dict)
        self.param_groups: list[Group] = []
        if isinstance(params, Parameter):
            raise TypeError(f"expected an iterable of parameters or of groups, but got {params!r}; pass a list")
        given = list(params)
        if not given:
            raise ValueError("expected parameters to optimize, but got none; pass model.trainable_params()")
        for group in given if isinstance(given[0], dict) else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise TypeError(f'expected a dict with "params" and options, but got {param_group!r}')
        if isinstance(param_group["params"], set):
            raise TypeError("expected parameters in an order that is the same on all ranks, but got a set; pass a list")
        names, members = _without_names(param_group["params"])
        group = {**self.defaults, **param_group, "params": members_of(members)}
        if names:
            group["param_names"] = names
        known = {id(parameter) for other in self.param_groups for parameter in other["params"]}
        for parameter in group["params"]:
            if id(parameter) in known:
                raise ValueError(
                    f"expected every parameter in one group, but got {parameter.name!r} in several; take it out"
                )
            if not is_floating(parameter.dtype):
                raise TypeError(f"expected floating parameters, but got {parameter.name!r} of {parameter.dtype}")
        if len({"param_names" in other for other in (*self.param_groups, group)}) > 1:
            raise ValueError(f"expected names for the parameters of all groups or of none, but got {names}")
        self.check_options(group)
        self.param_groups.append(group)

    def __repr__(self) -> str:
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return f"{type(self).__name__}({options})"

    # For the optimizers to define

    def check_options(self, group: Group) -> None:
        """Raise ValueError for an option out of range."""

    def new_state(self, parameter: Parameter, group: Group) -> State:
        """What ``state`` holds before the first step."""
        return {}

    def update_group(self, due: Sequence[Due], group: Group, math: Arithmetic) -> None:
        """One step of those parameters of ``group`` that have a gradient, in place."""
        raise NotImplementedError

    # Steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, in the memory that its shard lives in.

        Args:
            closure: computes the loss and the gradients first.

        Returns:
            What ``closure`` returned.
        """
        loss = closure() if closure is not None else None
        math = arithmetic()
        for group in self.param_groups:
            pairs = [(parameter, gradient_of(parameter)) for parameter in group["params"]]
            due = [self._due(parameter, grad, group) for parameter, grad in pairs if grad is not None]
            self.update_group(due, group, math)
        return loss

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Step with the gradients that ``value_and_grad`` returned, in the order of the parameters, as ``nn.Optimizer``
        does. They are the parameters' gradients from then on.
        """
        parameters = self.parameters
        if len(grads) != len(parameters):
            raise ValueError(f"expected one gradient per parameter, {len(parameters)}, but got {len(grads)}")
        for parameter, grad in zip(parameters, grads, strict=True):
            set_gradient(parameter, grad)
        self.step()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those of all groups, in order."""
        return tuple(parameter for group in self.param_groups for parameter in group["params"])

    def _due(self, parameter: Parameter, grad: Tensor, group: Group) -> Due:
        shard = shard_of(parameter)
        if tuple(grad.shape) != tuple(shard.shape):
            raise ValueError(
                f"expected a gradient of {parameter.name!r} of the shard's shape, {tuple(shard.shape)}, but got "
                f"{tuple(grad.shape)}; let backward set it, or cut it"
            )
        state = self._state_of(parameter, group)
        for name in self.shaped_states:
            value = state.get(name)
            if value is not None and (value.dtype, tuple(value.shape)) != (shard.dtype, tuple(shard.shape)):
                raise ValueError(
                    f"expected {name} of {parameter.name!r} to be {shard.dtype} of shape {tuple(shard.shape)} as the "
                    f"shard is, but got {value.dtype} of shape {tuple(value.shape)}: the parameter was sharded or cast "
                    "after a step; create the optimizer anew"
                )
        # A main_grad keeps the reduce dtype.
        return Due(shard, grad if grad.dtype == shard.dtype else copy_in(grad, shard.dtype), state)

    def _state_of(self, parameter: Parameter, group: Group) -> State:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter, group))
        return state

    def init_state(self) -> None:
        """Make the states that first steps would make, for a checkpoint to be loaded into. No parameter changes."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._state_of(parameter, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, those that still wait for their reduction included."""
        if not set_to_none:
            raise CapabilityError(
                backend="mindspore", capability="zero_grad(set_to_none=False)", hint="gradients can only be dropped"
            )
        for parameter in self.parameters:
            drop_gradients(parameter)

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {index: {name: tensor}}, "param_groups": [{"params": [index, ...], ...}]}``, torch's structure.

        The tensors are the live ones, of this rank's shards.
        """
        indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        return {
            "state": {indices[id(parameter)]: dict(state) for parameter, state in self.state.items() if state},
            "param_groups": [
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": [indices[id(parameter)] for parameter in group["params"]],
                }
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over copies of the states, in the parameters' dtypes, and the options of the groups.

        Values are tensors or arrays, of the shard's or the whole shape (which is cut).

        Raises:
            StateDictError: other groups, or a state of another shape.
        """
        saved = [dict(group) for group in state_dict["param_groups"]]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            raise StateDictError(
                f"expected parameter groups of {sizes} parameters, but got {[len(group['params']) for group in saved]}"
            )
        indices = [index for group in saved for index in group["params"]]
        parameters = dict(zip(indices, self.parameters, strict=True))
        states: defaultdict[Parameter, State] = defaultdict(dict)
        for index, state in state_dict["state"].items():
            if index not in parameters:
                raise StateDictError(f"expected states of the parameters {indices}, but got one of {index!r}")
            parameter = parameters[index]
            states[parameter] = {name: _loaded(parameter, name, value) for name, value in state.items()}
        self.state = states
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in other.items() if key != "params"})


def _loaded(parameter: Parameter, name: str, value: Any) -> Any:
    """A copy of a state's value for ``parameter``."""
    if name == "step":
        return scalar(number_of(value))
    if not isinstance(value, Tensor | np.ndarray):
        return value
    # Not cut by an operation of MindSpore: see ``operations of MindSpore`` in the arithmetic.
    data = value.asnumpy() if is_host() and isinstance(value, Tensor) else value
    shard, param = shard_of(parameter), param_of(parameter)
    if tuple(data.shape) != tuple(shard.shape):
        if param is None or tuple(data.shape) != param.layout.shape:
            raise StateDictError(
                f"expected {name} of {parameter.name!r} to have shape {tuple(shard.shape)}, but got {tuple(data.shape)}"
            )
        data = param.cut(data)
    return copy_in(data, shard.dtype)


# Numbers


def scalar(number: float) -> Tensor:
    """A float32 scalar, as ``step`` is."""
    return Tensor(np.array(number, np.float32))


def zeros_like(tensor: Tensor) -> Tensor:
    """Of the same shape and dtype, in memory of its own."""
    if is_host():
        return Tensor.from_numpy(np.zeros(tuple(tensor.shape), tensor.asnumpy().dtype))
    return mindspore.ops.zeros(tuple(tensor.shape), tensor.dtype)


def copy_in(data: Any, dtype: Any) -> Tensor:
    """A copy of a tensor or array, in ``dtype``."""
    if is_host():
        array = data.asnumpy() if isinstance(data, Tensor) else data
        return Tensor.from_numpy(np.array(array.astype(numpy_dtype(dtype)), order="C"))
    tensor = data if isinstance(data, Tensor) else Tensor(data)
    return tensor.astype(dtype).copy()


def number_of(value: Any) -> float:
    """An option as a float: a scheduler may have made it a tensor."""
    return float(value.asnumpy()) if isinstance(value, Tensor) else float(value)


def check_range(name: str, value: Any, *, low: float = 0.0, below: float | None = None) -> None:
    """Raise ValueError unless ``value`` is at least ``low`` and, if there is a limit, less than ``below``."""
    number = number_of(value)
    if not low <= number or (below is not None and not number < below):
        limit = "" if below is None else f" and less than {below}"
        raise ValueError(f"expected {name} to be at least {low}{limit}, but got {value!r}")
