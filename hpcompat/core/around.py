"""What happens around a module's forward, in order, the same for every framework.

forward pre-hook                        unit.pre_forward, then move and cast the inputs, then
gradient of the inputs is complete      group.post_backward, the last group first
forward post-hook                       unit.post_forward, then cast the output
gradient of an output                   unit.pre_backward of every unit that the output completes
end of backward                         the final callback that pre_backward queued

A backend derives from :class:`AroundForward` and gives the operations on one tensor.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpcompat.contract.states import ForwardEntry
from hpcompat.core.outputs import check_hidden_tensors
from hpcompat.core.tree import TensorTree, give_back

if TYPE_CHECKING:
    from hpcompat.core.param_group import ParamGroup
    from hpcompat.core.unit import Unit

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class AroundForward(ABC):
    """Forward pre-hook and post-hook of a unit's modules."""

    tree: TensorTree

    # What a backend gives

    @abstractmethod
    def is_recording(self) -> bool:
        """Whether operations are recorded for backward now."""

    @abstractmethod
    def in_backward(self) -> bool:
        """Whether a backward is running, so that a forward is a recomputation."""

    @abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """``tensor`` in ``dtype`` if it is floating; differentiable; itself where nothing changes."""

    @abstractmethod
    def watch_inputs(self, group: ParamGroup, tensors: Sequence[Any]) -> Sequence[Any]:
        """``tensors``, all of which require grad, behind a node of autograd that calls ``group.post_backward`` once
        the gradients of all of them are there.
        """

    @abstractmethod
    def watch_output(self, unit: Unit, tensor: Any) -> None:
        """Call ``unit.pre_backward`` when ``tensor``, which requires grad, gets its gradient."""

    def begin(self, unit: Unit) -> None:  # noqa: B027 - not every framework has something to do
        """Before anything else in the pre-hook."""

    def enter_root(self, unit: Unit) -> Callable[[Any], Any] | None:
        """At the start of a forward; a function that moves an input to the unit's device, if that is needed."""
        return None

    def leave_root(self, unit: Unit) -> None:  # noqa: B027
        """At the end of a forward."""

    # What happens

    def before(self, unit: Unit, index: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The forward pre-hook of module ``index`` of ``unit``."""
        self.begin(unit)
        entry = unit.pre_forward(index)
        is_first = entry is ForwardEntry.FIRST or entry is ForwardEntry.ROOT
        if is_first and unit.loans:
            unit.return_loans()
        unit.loans.append([])
        if entry is ForwardEntry.ROOT:
            move = self.enter_root(unit)
            if move is not None:
                args, kwargs = self._replace(unit, move, args, kwargs)
        policy = unit.mp_policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            cast = functools.partial(self.cast, dtype=policy.param_dtype)
            args, kwargs = self._replace(unit, cast, args, kwargs)
        if is_first and self.is_recording():
            for group in unit.groups:
                args, kwargs = self._watch_inputs(unit, group, args, kwargs)
        return args, kwargs

    def after(self, unit: Unit, index: int, output: Any) -> Any:
        """The forward post-hook of module ``index`` of ``unit``; gives what the module returns."""
        if unit.loans:
            give_back(unit.loans.pop())
        is_root = unit.is_forward_root
        records = self.is_recording()
        completed = unit.post_forward(index, in_backward=self.in_backward(), records=records)
        if is_root and completed:
            self.leave_root(unit)
        for done in completed:
            if records:
                output = self.watch_outputs(done, output)
            if done is not unit:
                output = self._cast_output(done, output)
        return self._cast_output(unit, output)

    def install(self, unit: Unit) -> None:
        """Hook every module of ``unit``. For modules that take hooks as those of torch do; else override it."""
        is_list = len(unit.modules) > 1
        for index, module in enumerate(unit.modules):
            before, after = self.hooks(unit, index)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            # In a list, members that raise must not be waited for.
            module.register_forward_hook(after, prepend=False, always_call=is_list)

    def hooks(self, unit: Unit, index: int) -> tuple[Callable[..., tuple[Args, Kwargs]], Callable[..., Any]]:
        """:meth:`before` and :meth:`after` as frameworks call hooks of module ``index``."""

        def pre_forward_hook(module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            return self.before(unit, index, args, kwargs)

        def post_forward_hook(module: Any, args: Any, output: Any) -> Any:
            return self.after(unit, index, output)

        return pre_forward_hook, post_forward_hook

    def watch_outputs(self, unit: Unit, output: Any) -> Any:
        """Have ``unit.pre_backward`` called for every tensor in ``output``."""
        tensors = self.tree.with_grad(output)
        if not isinstance(output, self.tree.tensor_type):
            check_hidden_tensors(unit, owner=self.tree.hidden_owner(output), beside_shown=bool(tensors))
        for tensor in tensors:
            self.watch_output(unit, tensor)
        return output

    def _cast_output(self, unit: Unit, output: Any) -> Any:
        dtype = unit.mp_policy.output_dtype
        return output if dtype is None else self.tree.map(functools.partial(self.cast, dtype=dtype), output)

    def _watch_inputs(self, unit: Unit, group: ParamGroup, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        inputs = self.tree.with_grad(args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        if not inputs:
            return args, kwargs
        watched = {id(tensor): tensor for tensor in inputs}
        stand_ins = dict(zip(watched, self.watch_inputs(group, list(watched.values())), strict=True))
        return self._replace(unit, lambda tensor: stand_ins.get(id(tensor), tensor), args, kwargs)

    def _replace(self, unit: Unit, fn: Callable[[Any], Any], args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if len(args) == 1 and not kwargs and isinstance(args[0], self.tree.tensor_type):
            return (fn(args[0]),), kwargs
        return self.tree.lend(fn, args, kwargs, unit.loans[-1])  # type: ignore[no-any-return]
