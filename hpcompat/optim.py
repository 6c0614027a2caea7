"""Optimizers on sharded parameters: construct, step, clip, zero; the same calls on both frameworks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from typing import TYPE_CHECKING, Any

from hpcompat import registry
from hpcompat.errors import CapabilityError

if TYPE_CHECKING:
    from hpcompat.contract.backend import Backend

# Called around every `optimizer_step`, with "before_optim" or "after_optim" and the optimizer.
listeners: list[Callable[[str, Any], None]] = []


# Constructors


def AdamW(
    params: Iterable[Any],
    lr: Any = 1e-3,
    betas: tuple[Any, Any] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    **options: Any,
) -> Any:
    """AdamW over sharded parameters (``torch.optim.AdamW``: its arguments, operations and rounding points).

    On torch a ``torch.optim.AdamW`` with ``foreach=True`` unless ``foreach``, ``fused`` or ``differentiable`` is given:
    the multi-tensor operations on every device, which the MindSpore one follows to the bit. Step it with
    :func:`optimizer_step`.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or dicts with ``"params"`` and options of their own. Make the
            optimizer after wrapping: on torch, sharding replaces the parameters.
        lr, betas, eps, weight_decay, amsgrad: as in torch.
        options: ``maximize``, and what else the framework's optimizer takes.

    States have the dtype of the sharded parameter, see :func:`optimizer_step`.

    Raises:
        ValueError: no parameters, or an option out of range.
        TypeError: ``params`` holds something else.
    """
    impl, members = _with_backend(params, call="AdamW")
    return impl.optim.AdamW(members, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, **options)


def Adam(
    params: Iterable[Any],
    lr: Any = 1e-3,
    betas: tuple[Any, Any] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    **options: Any,
) -> Any:
    """Adam over sharded parameters (``torch.optim.Adam``), otherwise as :func:`AdamW`."""
    impl, members = _with_backend(params, call="Adam")
    return impl.optim.Adam(members, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, **options)


def SGD(
    params: Iterable[Any],
    lr: Any = 1e-3,
    momentum: float = 0,
    dampening: float = 0,
    weight_decay: float = 0,
    nesterov: bool = False,
    **options: Any,
) -> Any:
    """SGD over sharded parameters (``torch.optim.SGD``), otherwise as :func:`AdamW`."""
    impl, members = _with_backend(params, call="SGD")
    return impl.optim.SGD(
        members,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        **options,
    )


def _with_backend(params: Iterable[Any], *, call: str) -> tuple[Backend, list[Any]]:
    """The backend of the first parameter, and ``params`` with no iterator in it."""
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"{call} expects an iterable of parameters or of groups, but got {params!r}; pass a list")
    members = [_materialized(member, call=call) for member in params]
    first = next(_parameters_in(members), None)
    if first is None:
        raise ValueError(
            f"{call} expects parameters to optimize, but got none; a generator such as model.parameters() gives them "
            "only once"
        )
    return registry.backend_for(first), members


def _materialized(member: Any, *, call: str) -> Any:
    if not isinstance(member, Mapping):
        return member
    if "params" not in member:
        raise TypeError(f'{call} expects groups with "params", but got one with {sorted(member)}')
    params = member["params"]
    return {**member, "params": list(params) if isinstance(params, _COLLECTIONS) else params}


def _parameters_in(members: list[Any]) -> Iterator[Any]:
    for member in members:
        if isinstance(member, Mapping):
            params = member["params"]
            yield from _parameters_in(params if isinstance(params, list) else [params])
        else:
            is_named = isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)
            yield member[1] if is_named else member


# Steps


def optimizer_step(optimizer: Any, closure: Callable[[], Any] | None = None, *, scaler: Any = None) -> Any:
    """Update the parameters of ``optimizer``, each rank its shards.

    On torch, to the bit what ``optimizer.step(closure)`` does on native FSDP2 with the same optimizer on the same
    device, but on local tensors, without DTensor dispatch. That holds for the element-wise optimizers of
    ``torch.optim`` (AdamW, Adam, SGD, RMSprop, Adagrad, Adadelta, RAdam, NAdam, Adamax, Rprop, ASGD) and subclasses
    that leave ``step`` alone; any other runs its own ``step()``, which the log says once. Groups may mix sharded,
    replicated, ignored and plain parameters, meshes and dtypes, and parameters of other libraries that have
    ``_local_tensor`` or ``to_local()`` (hyper-parallel, in place of ``SkipDTensorDispatch``). Closures, schedulers,
    step hooks and ``state_dict`` work as with ``optimizer.step()``, and the two calls may take turns.

    Which kernels run: the multi-tensor (foreach) ones wherever torch would take them for DTensors, that is, on
    accelerators; the type of the parameters plays no part. On the CPU torch takes the loop over tensors by default, so
    there the multi-tensor kernels run only where they give the same bits (float32 and float64, except NAdam, RAdam and
    ASGD). ``foreach=True`` selects them everywhere, as the constructors of :mod:`hpcompat.optim` do. ``fused=True`` is
    respected, and is not bit-equal to either.

    On MindSpore, ``hpcompat.optim``'s optimizers update with torch's multi-tensor operations; MindSpore's own are
    handed the gradients of the shards. Its schedulers take its own optimizers only: for ours, set
    ``param_groups[i]["lr"]``.

    The dtype of the states is that of the sharded parameter, not that of the computation:

    ==================  ==================  ==========  =======
    sharded parameter   mp_policy           gradient    states
    ==================  ==================  ==========  =======
    float32             none                float32     float32
    float32             param_dtype=bf16    float32     float32
    bfloat16            any                 bfloat16    bfloat16
    ==================  ==================  ==========  =======

    The last row loses small updates, so Adam and its kin warn once per optimizer. ``step`` and other scalar states are
    float32. With ``apply_grad_on_fp32_main_grad`` the gradient is ``main_grad``, rounded to the parameter's dtype.

    Args:
        optimizer: of the framework, over the parameters of a wrapped model.
        closure: computes the loss and the gradients first.
        scaler: a ``torch.amp.GradScaler``: do what ``scaler.step(optimizer)`` does. Gradients are unscaled unless they
            are already, and all ranks skip the step if one of them found an infinity.

    Returns:
        What ``closure`` returned; ``None`` for a step that was skipped.

    Raises:
        TypeError: not an optimizer, or not a closure.
        ValueError: parameters that sharding has replaced, or ``closure`` together with ``scaler``.
        CapabilityError: the framework has no loss scaler.
    """
    impl = _backend_of(optimizer, call="optimizer_step")
    if closure is not None and not callable(closure):
        raise TypeError(f"optimizer_step expects closure to be callable, but got {closure!r}")
    if closure is not None and scaler is not None:
        raise ValueError(
            f"optimizer_step expects closure or scaler, but got both, {closure!r} and {scaler!r}; run the closure first"
        )
    if not listeners:
        return _step(impl, optimizer, closure, scaler)
    for listener in tuple(listeners):
        listener("before_optim", optimizer)
    result = _step(impl, optimizer, closure, scaler)
    for listener in tuple(listeners):
        listener("after_optim", optimizer)
    return result


def _step(impl: Backend, optimizer: Any, closure: Callable[[], Any] | None, scaler: Any) -> Any:
    if scaler is None:
        return impl.optim.step(optimizer, closure)
    return _scaling(impl, "scaled_step")(optimizer, scaler)


def unscale_grads_(optimizer: Any, scaler: Any) -> None:
    """Divide the gradients by the scale of ``scaler``, before clipping: ``scaler.unscale_(optimizer)`` for any mixture
    of sharded and plain parameters, with the same finding on all ranks.

    Args:
        optimizer: of the framework.
        scaler: a ``torch.amp.GradScaler``.

    Raises:
        RuntimeError: called twice in one iteration.
        ValueError: gradients in float16.
        CapabilityError: the framework has no loss scaler.
    """
    _scaling(_backend_of(optimizer, call="unscale_grads_"), "unscale_grads_")(optimizer, scaler)


def _scaling(impl: Backend, name: str) -> Callable[[Any, Any], Any]:
    found: Callable[[Any, Any], Any] | None = getattr(impl.optim, name, None)
    if found is None:
        raise CapabilityError(
            backend=impl.name, capability="loss scaling", hint="scale the loss, and divide the gradients, by hand"
        )
    return found


def _backend_of(optimizer: Any, *, call: str) -> Backend:
    impl = registry.backend_for(optimizer)
    if not impl.optim.is_optimizer(optimizer):
        raise TypeError(f"{call} expects an optimizer, but got {type(optimizer).__name__}; hpcompat.optim has some")
    return impl


# Gradients

_COLLECTIONS = (Sequence, Set, ValuesView, Iterator)


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Scale the gradients in place so that the norm of all together is at most ``max_norm``
    (``torch.nn.utils.clip_grad_norm_``).

    Every element counts once, on whatever ranks it is: sharded, replicated, HSDP, tied, ignored or tensor-parallel.
    Over which ranks parts are added up follows from each parameter's placement, one collective per group of ranks.
    Collective: all ranks pass the same parameters; one without gradients takes part. Works under CPU offload.

    On torch, for a float32 model sharded over one axis, with the bits of torch's function on DTensors. Low-precision
    gradients are accumulated in float32, where torch rounds the norm to their dtype.

    Args:
        parameters: a module, a parameter, or an iterable of parameters; what comes twice counts once. Ignored and plain
            parameters count as equal on all ranks; where their gradients differ, the largest norm counts.
        max_norm: of all gradients as one vector.
        norm_type: any ``p``, ``inf`` included.
        error_if_nonfinite: raise, and leave the gradients as they are, where the norm is not finite.
        foreach: for torch's signature; the multi-tensor kernels run where there are some.

    Returns:
        The norm **before** clipping, a plain float32 scalar (float64 if a parameter is). It may well be larger than
        ``max_norm``.

    Raises:
        RuntimeError: the norm is infinite or NaN, and ``error_if_nonfinite``.
        ValueError: ``norm_type`` is NaN.
        TypeError: something else than parameters, or ``max_norm`` or ``norm_type`` is no number.
    """
    limit = _number("max_norm", max_norm, call="clip_grad_norm_")
    order = _number("norm_type", norm_type, call="clip_grad_norm_")
    if math.isnan(order):
        raise ValueError(f"clip_grad_norm_ expects norm_type to be a number, but got {norm_type!r}")
    impl, members = _members(parameters, call="clip_grad_norm_")
    return impl.optim.clip_grad_norm_(members, limit, norm_type=order, error_if_nonfinite=bool(error_if_nonfinite))


def zero_grad(module_or_optimizer: Any, set_to_none: bool = True) -> None:
    """Clear the gradients, wherever they are: ``grad``, ``main_grad``, those accumulated without sync, and partial sums
    that wait for their all-reduce (OPT-07).

    Args:
        module_or_optimizer: a module, with all below it, or an optimizer: its parameters.
        set_to_none: drop the gradients; ``False`` keeps their tensors and fills them with zeros, on torch only.

    Raises:
        TypeError: neither a module nor an optimizer.
        CapabilityError: ``set_to_none=False`` where gradients can only be dropped.
    """
    impl = registry.backend_for(module_or_optimizer)
    if not impl.is_module(module_or_optimizer) and not impl.optim.is_optimizer(module_or_optimizer):
        raise TypeError(f"zero_grad expects a module or an optimizer, but got {type(module_or_optimizer).__name__}")
    if set_to_none:
        impl.optim.zero_grad(module_or_optimizer)
    else:
        impl.optim.zero_grad(module_or_optimizer, set_to_none=False)


def _members(parameters: Any, *, call: str) -> tuple[Backend, list[Any]]:
    """The parameters, each once, and their backend."""
    if not isinstance(parameters, _COLLECTIONS):
        impl = registry.backend_for(parameters)
        found = _of_module(impl, parameters) if impl.is_module(parameters) else [parameters]
    else:
        found = list(parameters)
        if not found and isinstance(parameters, Iterator):
            warnings.warn(
                f"{call} got an iterator with nothing left and clips nothing: model.parameters() gives its parameters "
                "only once",
                UserWarning,
                stacklevel=3,
            )
        impl = registry.backend_for(found[0]) if found else registry.get_backend()
    unique = list({id(parameter): parameter for parameter in found}.values())
    for parameter in unique:
        if not _is_tensor(impl, parameter):
            raise TypeError(f"{call} expects parameters of {impl.name}, but got {parameter!r}")
    return impl, unique


def _is_tensor(impl: Backend, value: Any) -> bool:
    """A parameter, or a tensor that is none but has a gradient."""
    if impl.is_parameter(value):
        return True
    return impl.owns(value) and not (impl.is_module(value) or impl.is_mesh(value) or impl.optim.is_optimizer(value))


def _of_module(impl: Backend, module: Any) -> list[Any]:
    return [parameter for _, parameter in impl.named_parameters(module, recurse=True)]


def _number(name: str, value: Any, *, call: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{call} expects {name} to be a number, but got {value!r}") from None
