"""What a case may ask of a framework, so that it is written once for all of them.

Numbers go in and come out as numpy arrays; dtypes are named by strings such as ``"bfloat16"``, which numpy lacks (such
values come out as float32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hpcompat_conformance.recipes import Recipe

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Collective:
    """One collective as one rank issued it, over the group of ``ranks``. ``num_elements`` counts the larger of input
    and output."""

    kind: str
    ranks: tuple[int, ...]
    num_elements: int
    dtype: str

    @property
    def group_size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)


class Optimizer(Protocol):
    """The two calls that all optimizers of all frameworks have."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


class Framework(Protocol):
    """Modules, parameters and tensors are the framework's own objects, opaque to a case."""

    name: str
    capabilities: frozenset[str]  # dtypes, by name, that it computes and communicates in; other words

    def versions(self) -> Mapping[str, str]:
        """Names and versions of the packages in use."""

    def dtype(self, name: str) -> Any:
        """The framework's dtype object."""

    def dtype_of(self, tensor: Any) -> str:
        """The name of a tensor's dtype."""

    def tensor(self, array: Array, *, dtype: str | None = None, requires_grad: bool = False) -> Any:
        """A new tensor on the CPU; without ``dtype``, with the array's."""

    def array(self, tensor: Any) -> Array:
        """The values of a plain tensor."""

    def mesh(self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None) -> Any:
        """A CPU device mesh over ranks 0, 1, ... in row-major order."""

    def mesh_that_adds_up(
        self, shape: Sequence[int], *, axis_names: Sequence[str] | None = None
    ) -> AbstractContextManager[Any]:
        """A mesh over groups that, inside the block, add up where they are asked for an average, without an error, as
        some transports do. Needs the capability ``"a transport that adds up"``."""

    def shard(self, dim: int) -> Any:
        """The placement that splits a tensor's dim ``dim``."""

    def model(self, recipe: Recipe, *, seed: int) -> Any:
        """A module made after the recipe, its parameters filled by `values.parameter_values`."""

    def meta_model(self, recipe: Recipe) -> Any:
        """A module made after the recipe on the meta device: shapes without values."""

    def materialize(self, module: Any) -> None:
        """Give a module on the meta device memory on the CPU, by whatever way the framework documents."""

    def child(self, module: Any, path: str) -> Any:
        """The submodule at a dotted path; the module itself for ``""``."""

    def set_requires_grad(self, module: Any, value: bool) -> None:
        """Freeze or unfreeze all parameters of a module."""

    def cast(self, module: Any, dtype: str) -> None:
        """Give all parameters of a module that is not wrapped yet another dtype."""

    def set_value(self, parameter: Any, full: Array) -> None:
        """Overwrite a parameter that is not sharded yet."""

    def buffers(self, module: Any) -> Mapping[str, Any]:
        """The buffers by dotted name: plain tensors."""

    def parameters(self, module: Any) -> Mapping[str, Any]:
        """The registered parameters by dotted name, in registration order, each object once."""

    def state_dict(self, module: Any) -> Mapping[str, Any]:
        """The state dict by dotted name."""

    def load_state_dict(self, module: Any, values: Mapping[str, Array]) -> None:
        """Load full values into a sharded module, by whatever way the framework documents."""

    def shape(self, parameter: Any) -> tuple[int, ...]:
        """The global shape."""

    def is_sharded(self, parameter: Any) -> bool:
        """Whether this is the distributed form, of which a rank holds its part (with an axis of size 1, that is
        all)."""

    def local(self, parameter: Any) -> Array:
        """This rank's part of a parameter, gradient or state-dict value."""

    def full(self, parameter: Any) -> Array:
        """The global value. A collective: all ranks must call it."""

    def gradient(self, parameter: Any) -> Any | None:
        """The gradient on this rank, as the optimizer would find it."""

    def set_gradient(self, parameter: Any, full: Array) -> None:
        """Make this rank's part of a global gradient the parameter's."""

    def number(self, scalar: Any) -> float:
        """The value of a scalar that is the same on all ranks, such as a norm. A collective."""

    def loss(self, output: Any) -> Any:
        """Half the sum of squares of the output, in float32."""

    def backward(self, loss: Any, gradient: Any = None) -> None:
        """Run backward from a scalar, or from a tensor of any shape with the gradient to begin with."""

    def no_grad(self) -> AbstractContextManager[Any]:
        """A context without gradients."""

    def zero_grad(self, module: Any) -> None:
        """Clear the gradients of all parameters."""

    def optimizer(self, module: Any, *, kind: str, lr: float, multi_tensor: bool = False, **options: Any) -> Optimizer:
        """``kind`` is ``"sgd"`` or ``"adamw"``; ``options`` such as ``weight_decay`` by torch's names, the framework's
        defaults for the rest. ``multi_tensor`` asks for the kernels that take many tensors at once."""

    def optimizer_state(self, optimizer: Any, parameter: Any) -> Mapping[str, Any]:
        """What an optimizer keeps for a parameter, by torch's names; empty before the first step."""

    def load_optimizer_state(self, optimizer: Any, values: Sequence[Mapping[str, Array]]) -> None:
        """Load the global states of all parameters, in the optimizer's order, into an optimizer that has none."""

    def on_forward(
        self, module: Any, *, before: Callable[[], None] | None = None, after: Callable[[Any], None] | None = None
    ) -> None:
        """Call ``before()`` before and ``after(output)`` after each forward of a module, by hooks of the framework that
        come after those that the module has."""

    def on_gradient(self, tensor: Any, function: Callable[[Any], None]) -> None:
        """Call ``function(gradient)`` when backward has the gradient of a tensor or an unsharded parameter."""

    def collectives(self) -> AbstractContextManager[list[Collective]]:
        """Record the collectives that this rank issues."""

    # What custom communication objects are made of: the framework's own collectives, on plain flat tensors.

    def empty(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """A new tensor; dtype and device are the framework's objects."""

    def all_gather(self, output: Any, input: Any, *, group: Any, async_op: bool) -> Any:
        """What a unit does by default. Returns a work object if ``async_op``."""

    def reduce_scatter(self, output: Any, input: Any, *, group: Any, op: Any, async_op: bool) -> Any:
        """Likewise."""

    def ranks_of(self, group: Any) -> tuple[int, ...]:
        """The global ranks of a process group."""

    def shares_memory(self, left: Any, right: Any) -> bool:
        """Whether two plain tensors lie in the same memory."""

    def scale(self, tensor: Any, factor: float) -> None:
        """Multiply a plain tensor in place."""
