"""Modules: a tree of named attributes, with hooks around forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcompat_conformance.numpy_reference import ops
from hpcompat_conformance.numpy_reference.tape import Value
from hpcompat_conformance.numpy_reference.world import Array

_uids = itertools.count()

BeforeForward = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
AfterForward = Callable[[Any], Any]


class Parameter(Value):
    """A leaf that a module trains. ``uid`` passes on to the shard that replaces it."""

    def __init__(self, data: Array, *, requires_grad: bool = True, uid: int | None = None) -> None:
        super().__init__(data, requires_grad=requires_grad)
        self.uid = next(_uids) if uid is None else uid
        self.main_grad: Array | None = None  # see MixedPrecisionPolicy.apply_grad_on_fp32_main_grad


class Buffer:
    """State that is not trained."""

    def __init__(self, data: Array) -> None:
        self.data = data


class Module:
    """Parameters, buffers and child modules are its attributes; ``hooks`` run around forward, the first outermost."""

    def __init__(self) -> None:
        self.hooks: list[tuple[BeforeForward, AfterForward]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"expected {type(self).__name__} to have a forward of its own")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for before, _ in self.hooks:
            args, kwargs = before(args, kwargs)
        output = self.forward(*args, **kwargs)
        for _, after in reversed(self.hooks):
            output = after(output)
        return output

    def members(self, kind: type) -> Iterator[tuple[str, Any]]:
        """The attributes of ``kind``, by name."""
        return ((name, value) for name, value in vars(self).items() if isinstance(value, kind))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below, each once, parents first."""
        seen: set[Module] = set()

        def visit(module: Module, name: str) -> Iterator[tuple[str, Module]]:
            if module not in seen:
                seen.add(module)
                yield name, module
                for attribute, child in module.members(Module):
                    yield from visit(child, f"{name}.{attribute}" if name else attribute)

        return visit(self, prefix)

    def named_parameters(self, *, recurse: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Every place of every parameter."""
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, parameter in module.members(Parameter):
                yield f"{prefix}.{name}" if prefix else name, parameter


class ModuleList(Module):
    """Modules named by their positions; it has no forward."""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        vars(self).update((str(index), module) for index, module in enumerate(modules))

    def __iter__(self) -> Iterator[Any]:
        return (module for _, module in self.members(Module))

    def __getitem__(self, index: int | slice) -> Any:
        picked = list(self)[index]
        return type(self)(picked) if isinstance(index, slice) else picked


class Sequential(ModuleList):
    """One module after the other."""

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x


class Linear(Module):
    """``x @ weight.T + bias``, for ``x`` of shape ``[batch, num_in]``."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = True, dtype: Any = np.float32) -> None:
        super().__init__()
        self.weight = Parameter(np.zeros((num_out, num_in), dtype))
        self.bias = Parameter(np.zeros(num_out, dtype)) if bias else None

    def forward(self, x: Value) -> Value:
        product = ops.matmul(x, self.weight)
        return product if self.bias is None else ops.add_row(product, self.bias)
