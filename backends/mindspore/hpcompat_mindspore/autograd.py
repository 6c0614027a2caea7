"""MindSpore's autograd as the hooks need it. Most of it is private; :mod:`probe` checks that it is there.

[Note: one immortal callback]
A function given to ``queue_backward_final_callback`` is kept by the engine. If backward raises, the engine drops it
later without holding the interpreter lock; where that was the last reference, the process crashes in the next forward
(seen with 2.10.0). So the engine only ever gets ``_run_final_callbacks``, which lives as long as this module, and the
callbacks themselves wait in a list, marked with the backward that queued them.

[Note: two ways to run backward]
``backward(loss)`` works as in torch: gradients are added to ``parameter.grad``. ``mindspore.value_and_grad``, called by
ours or by the user, is functional: a call returns its own gradients and adds nothing to those of an earlier call. Hooks
and final callbacks run alike in both; :func:`is_functional` tells them apart.

[Note: remembered shapes]
MindSpore's older operators (``ops.assign``, ``nn.SGD``, ``ops.BiasAdd``, ...) remember the shape and dtype of a tensor
they have met, by its identity, and go on with those when the tensor shows other data. It forgets them when a graph of
``value_and_grad`` ends, so an empty one is made wherever parameters have switched between shard and whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, ops
from mindspore._c_expression import run_backward
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor

Callback = Callable[[], None]

# By the number of the backward that queued it, and whether it shall run after all that are not last.
_final_callbacks: list[tuple[int, bool, Callback]] = []
_always_records = False
_in_our_backward = False
_in_our_value_and_grad = False


# Recording


def is_recording() -> bool:
    """Whether operations are recorded for backward now."""
    return bool(executor.requires_grad())


def start_recording() -> None:
    """Record operations from now on, outside ``value_and_grad`` too, as torch does. ``no_grad`` still switches it off.

    Needed once, before the first forward, for :func:`backward`. Not for ``value_and_grad``, and
    ``nn.TrainOneStepCell`` does not work while it is on: MindSpore looks for a graph of its own then.
    """
    global _always_records
    _always_records = True
    executor.set_grad_flag(True)


def stop_recording() -> None:
    """Record inside ``value_and_grad`` only, as MindSpore does by itself."""
    global _always_records
    _always_records = False
    executor.set_grad_flag(False)


def resume_recording() -> None:
    """After MindSpore has switched recording off by itself: when a ``value_and_grad`` ends, or after some errors."""
    if _always_records and not executor.grad_flag():
        executor.set_grad_flag(True)


@contextmanager
def recording() -> Iterator[None]:
    """Record inside the block, whatever was set before."""
    before = executor.grad_flag()
    executor.set_grad_flag(True)
    try:
        yield
    finally:
        executor.set_grad_flag(before)


def no_grad() -> AbstractContextManager[Any]:
    return mindspore._no_grad()  # type: ignore[no-any-return]


def requires_grad(tensor: Tensor) -> bool:
    """Whether backward would reach ``tensor``."""
    return bool(tensor._requires_grad)


def forget_shapes() -> None:
    """[Note: remembered shapes]"""
    is_on = executor.grad_flag()
    executor.new_graph(_identity, _NO_DATA)
    executor.end_graph(_identity, _NO_DATA, _NO_DATA)
    executor.set_grad_flag(is_on)


def _identity(value: Tensor) -> Tensor:
    return value


_NO_DATA = Tensor(0.0, mindspore.float32)


# Backward


def in_backward() -> bool:
    return _current_backward() != -1


def is_functional() -> bool:
    """Whether the running backward belongs to ``value_and_grad``. [Note: two ways to run backward]"""
    return not _in_our_backward


def returns_sharded_gradients() -> bool:
    """Whether our own ``value_and_grad`` runs, which takes gradients from ``parameter.grad`` itself."""
    return _in_our_value_and_grad


def _current_backward() -> int:
    return int(executor.get_current_autodiff_engine_id())


def queue_final_callback(callback: Callback, *, is_last: bool = False) -> None:
    """Run ``callback`` when the running backward ends, in order, those that are last after the others.

    [Note: one immortal callback]
    """
    current = _current_backward()
    if not any(number == current for number, _, _ in _final_callbacks):
        _final_callbacks.clear()  # of a backward that raised
        executor.queue_backward_final_callback(_run_final_callbacks)
    _final_callbacks.append((current, is_last, callback))


def _run_final_callbacks() -> None:
    callbacks = sorted(_final_callbacks, key=lambda entry: entry[1])
    _final_callbacks.clear()
    for _, _, callback in callbacks:
        callback()


def backward(tensor: Tensor, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
    """Run backward from ``tensor``, as ``torch.Tensor.backward`` does; gradients are added to ``parameter.grad``.

    Gradients of parameters that no unit manages are added up by MindSpore in ``parameter._grad``. It does that wrongly
    where the first of them is a view, so clear them after every backward, or wrap the module.

    Raises:
        ValueError: ``tensor`` has several elements and there is no ``gradient``, or one of another shape.
        RuntimeError: nothing was recorded, or nothing that leads to ``tensor`` requires grad.
    """
    global _in_our_backward
    if not requires_grad(tensor):
        raise RuntimeError(
            "expected a tensor that was computed from parameters while operations were recorded, but got one that "
            "does not require grad; call enable_mindspore_backward_compat() once, before the first forward"
        )
    if gradient is None:
        if tensor.size != 1:
            raise ValueError(
                f"expected a scalar to run backward from, but got shape {tensor.shape}; pass gradient, or take the mean"
            )
        gradient = ops.ones_like(tensor)
    gradient = _fitting(gradient, tensor)
    before, _in_our_backward = _in_our_backward, True
    try:
        run_backward((tensor,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)
    finally:
        _in_our_backward = before
        resume_recording()
        forget_shapes()


def _fitting(gradient: Tensor, tensor: Tensor) -> Tensor:
    """``gradient`` in the dtype of ``tensor``, in which backward starts."""
    if not isinstance(gradient, Tensor):
        raise TypeError(f"expected gradient to be a tensor, but got {gradient!r}")
    if gradient.shape != tensor.shape:
        raise ValueError(
            f"expected a gradient of the shape of the tensor to run backward from, {tuple(tensor.shape)}, but got "
            f"{tuple(gradient.shape)}"
        )
    return gradient if gradient.dtype == tensor.dtype else gradient.astype(tensor.dtype)


def value_and_grad(
    fn: Callable[..., Any], weights: Sequence[Parameter], *, has_aux: bool = False
) -> Callable[..., tuple[Any, tuple[Tensor | None, ...]]]:
    """As ``mindspore.value_and_grad(fn, None, weights, has_aux)``, for modules that may be sharded.

    The returned function gives ``(value, gradients)``: for a sharded parameter the reduced gradient of this rank's
    shard, which is ``parameter.grad`` as well; ``None`` where there is none yet because gradient sync is off.
    """
    members = tuple(weights)

    def checked(*args: Any, **kwargs: Any) -> Any:
        value = fn(*args, **kwargs)
        outputs = value if isinstance(value, tuple) else (value,)
        for output in outputs[:1] if has_aux else outputs:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"expected fn to return tensors to differentiate, but got {output!r}; pass has_aux=True for a "
                    "loss and more"
                )
        return value

    run = mindspore.value_and_grad(checked, None, list(members), has_aux=has_aux)

    def value_and_sharded_grad(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
        global _in_our_value_and_grad
        before, _in_our_value_and_grad = _in_our_value_and_grad, True
        try:
            for member in members:
                if "grad" in vars(member):
                    member.grad = None
            value, grads = run(*args, **kwargs)
        finally:
            _in_our_value_and_grad = before
            resume_recording()
        pairs = zip(members, grads, strict=True)
        return value, tuple(member.grad if "grad" in vars(member) else grad for member, grad in pairs)

    return value_and_sharded_grad


def enable_backward_compat() -> None:
    """Give tensors ``tensor.backward()`` and parameters ``parameter.grad``, as in torch, and record from now on."""
    start_recording()
    if not hasattr(Tensor, "backward"):
        Tensor.backward = _tensor_backward
    if not hasattr(Parameter, "grad"):
        Parameter.grad = property(get_gradient, set_gradient)


def disable_backward_compat() -> None:
    """Undo :func:`enable_backward_compat`."""
    stop_recording()
    if Tensor.__dict__.get("backward") is _tensor_backward:
        del Tensor.backward
    if isinstance(Parameter.__dict__.get("grad"), property):
        del Parameter.grad


def _tensor_backward(tensor: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
    backward(tensor, gradient, retain_graph=retain_graph)


def get_gradient(parameter: Parameter) -> Tensor | None:
    """``parameter.grad``, whether or not the class has that property; of a plain parameter, the engine's."""
    own = vars(parameter)
    return own.get("grad", parameter._grad)  # type: ignore[no-any-return]


def set_gradient(parameter: Parameter, value: Tensor | None) -> None:
    own = vars(parameter)
    if "grad" in own:
        own["grad"] = value
    else:
        parameter._grad = value


# Nodes


class _Watch(_Function):
    """Identity; its backward runs once all gradients of its outputs have arrived, and calls a function."""

    @staticmethod
    def forward(ctx: Any, callback: Callback, *inputs: Tensor) -> Any:
        ctx.callback = callback
        return inputs if len(inputs) > 1 else inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return (None, *grads)


def watch(tensors: Sequence[Tensor], callback: Callback) -> tuple[Tensor, ...]:
    """``tensors`` behind one node of the graph that calls ``callback`` when backward has passed everything after it."""
    if not tensors:
        return ()
    outputs = _Watch.apply(callback, *tensors)
    return outputs if isinstance(outputs, tuple) else (outputs,)
