"""What a training script calls besides sharding: gradients, parameters, numpy; the same calls on both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hpcompat import registry

# Gradients

_WEIGHTS = "pass list(hpcompat.parameters(model)), or [parameter] for one"


def backward(loss: Any, gradient: Any = None, *, retain_graph: bool = False) -> None:
    """Run backward from ``loss``: gradients are reduced over the ranks and added to ``parameter.grad``, a shard's to a
    shard.

    Args:
        loss: a scalar; a tensor of any shape with ``gradient``.
        gradient: what backward starts from, of the shape of ``loss``; by default 1.
        retain_graph: allow another backward through the same operations.

    Raises:
        ValueError, RuntimeError: ``loss`` is no scalar and there is no ``gradient``, or it depends on no parameter.
    """
    registry.backend_for(loss).training.backward(loss, gradient, retain_graph=retain_graph)


def value_and_grad(
    fn: Callable[..., Any], weights: Sequence[Any], *, has_aux: bool = False
) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """A function that calls ``fn`` and also gives the gradients (``mindspore.value_and_grad``, with sharded weights).

    Args:
        fn: returns a loss, or a tuple of a loss and more.
        weights: parameters. Make it after ``fully_shard``, which on torch replaces parameters.
        has_aux: only the first value that ``fn`` returns is differentiated; otherwise their sum is.

    Returns:
        A function with the arguments of ``fn`` that returns ``(value, gradients)``. A gradient is this rank's part of
        the reduced one, the same tensor as ``parameter.grad``, which is replaced, not added to; ``None`` for a weight
        that was not used, or whose unit does not reduce yet (``set_requires_gradient_sync(False)``). To other
        parameters that ``fn`` uses, torch adds their gradients as ``backward`` does, and MindSpore does nothing.

    Raises:
        ValueError: there are no weights.
        TypeError: ``weights`` are not parameters, or ``fn`` cannot be called or returns something else than tensors.
    """
    # A parameter is iterable too, over its rows.
    if hasattr(weights, "shape") or not isinstance(weights, Iterable):
        raise TypeError(f"expected weights to be a list of parameters, but got {type(weights).__name__}; {_WEIGHTS}")
    members = tuple(weights)
    if not members:
        raise ValueError(f"expected weights to differentiate by, but got none; {_WEIGHTS}")
    if not callable(fn):
        raise TypeError(f"expected fn to be callable, but got {fn!r}")
    impl = registry.backend_for(members[0])
    for index, member in enumerate(members):
        if not impl.is_parameter(member):
            raise TypeError(
                f"expected weights to be parameters, but got a {type(member).__name__} at {index}; {_WEIGHTS}"
            )
    return impl.training.value_and_grad(fn, members, has_aux=has_aux)


def enable_mindspore_backward_compat() -> None:
    """Give MindSpore's tensors ``loss.backward()`` and its parameters ``.grad``, as torch's have. Call it once, before
    the first forward. Under torch there is nothing to do.
    """
    registry.get_backend().training.enable_backward_compat()


def no_grad() -> AbstractContextManager[Any]:
    """A context in which nothing is recorded for backward."""
    return registry.get_backend().training.no_grad()


def manual_seed(seed: int) -> None:
    """Seed the framework's generators. The two frameworks draw different numbers from the same seed: make weights that
    both shall have with numpy.

    Raises:
        TypeError: ``seed`` is not an int.
    """
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"expected seed to be an int, but got {seed!r}")
    registry.get_backend().training.manual_seed(seed)


# Parameters


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """Qualified names and parameters of ``module``; a parameter in several places once, under its first name.

    Running statistics, which MindSpore keeps as parameters, are not among them.
    """
    impl = registry.backend_for(module)
    seen: dict[int, Any] = {}  # alive, so that their identities are
    for name, parameter in impl.named_parameters(module, recurse=True):
        if id(parameter) not in seen:
            seen[id(parameter)] = parameter
            yield name, parameter


def parameters(module: Any) -> Iterator[Any]:
    """The parameters of :func:`named_parameters`."""
    return (parameter for _, parameter in named_parameters(module))


def full_tensor(parameter: Any, value: Any = None) -> Any:
    """The whole of a sharded parameter, or of a ``value`` sharded like it: its gradient, an optimizer state.

    Collective over the ranks that hold the parameter. A new tensor, except that plain parameters and their values come
    back as they are, and so does a scalar, such as the ``step`` of an optimizer's state.
    """
    return registry.backend_for(parameter).training.full_tensor(parameter, value)


def load_local_state_dict(module: Any, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load what each rank has saved for itself: plain tensors of the shapes of this rank's parts.

    They fit the mesh and the placements they were saved with alone, and nothing can be said about those that do not but
    their shapes. ``module.load_state_dict`` takes whole values, on any mesh. Values for what is not sharded, and those
    that know their place in the whole (DTensors, a state dict's on MindSpore), are taken by both.

    Args:
        module: any module of the model, wrapped or not.
        state_dict: names and values.
        strict: the names must be those of the module.

    Returns:
        What ``module.load_state_dict`` returns.

    Raises:
        StateDictError: a value has another shape than this rank's part. Nothing is loaded then.
        TypeError: ``state_dict`` is no mapping.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected state_dict to be a dict of names and values, but got {state_dict!r}")
    return registry.backend_for(module).training.load_local_state_dict(module, state_dict, strict=strict)


# Numpy


def to_numpy(tensor: Any) -> Any:
    """A copy as a numpy array; of a sharded tensor this rank's shard. bfloat16, unknown to numpy, becomes float32."""
    return registry.backend_for(tensor).training.to_numpy(tensor)


def from_numpy(array: Any, *, dtype: Any = None, backend: str | None = None) -> Any:
    """A tensor with a copy of ``array`` on this process's device, in ``dtype`` of the framework or the array's own."""
    return registry.get_backend(backend).training.from_numpy(array, dtype=dtype)
