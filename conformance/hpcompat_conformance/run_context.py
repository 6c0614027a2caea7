"""What a case is given: an implementation, its place in the world, and the sentences that cases are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcompat_conformance.framework import Array, Collective, Framework
from hpcompat_conformance.impl import Api, Implementation
from hpcompat_conformance.recipes import Recipe, Tied
from hpcompat_conformance.values import batch_values, token_values

BATCH_ROWS = 2
ROUGHNESS = np.float32(0.1)
VERBS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all-reduce"}


@dataclass
class Context:
    """One run of one case on one rank."""

    implementation: Implementation
    rank: int
    world_size: int
    seed: int
    _units: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def api(self) -> Api:
        """The implementation's public names."""
        return self.implementation.api

    @property
    def framework(self) -> Framework:
        """Tensors and modules."""
        return self.implementation.framework

    # --- making things ---

    def model(self, recipe: Recipe, *, dtype: str | None = None) -> Any:
        """The same model on every rank, not sharded; in float32 unless another dtype is named."""
        model = self.framework.model(recipe, seed=self.seed)
        if dtype is not None:
            self.framework.cast(model, dtype)
        return model

    def mesh(self) -> Any:
        """One axis over all ranks: FSDP."""
        return self.framework.mesh((self.world_size,))

    def mesh_2d(self, num_replicas: int) -> Any:
        """Axes ``replicate`` x ``shard``: HSDP."""
        shape = (num_replicas, self.world_size // num_replicas)
        return self.framework.mesh(shape, axis_names=("replicate", "shard"))

    def shard(
        self,
        model: Any,
        *,
        units: Sequence[str] = (),
        mesh: Any = None,
        root: Mapping[str, Any] | None = None,
        by_unit: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """``fully_shard`` on the submodules ``units`` and then on the model, all with the same options; ``by_unit`` and
        ``root`` have those that differ there. Notes which parameters each unit got, for `schedule`."""
        mesh = self.mesh() if mesh is None else mesh
        self._units = self._parameters_by_unit(model, units)
        for path in units:
            own = (by_unit or {}).get(path, {})
            self.api.fully_shard(self.framework.child(model, path), mesh=mesh, **{**options, **own})
        self.api.fully_shard(model, mesh=mesh, **{**options, **(root or {})})
        return model

    def replicate(self, model: Any, *, units: Sequence[str] = (), mesh: Any = None, **options: Any) -> Any:
        """``replicate`` instead of ``fully_shard``."""
        mesh = self.mesh() if mesh is None else mesh
        self._units = self._parameters_by_unit(model, units)
        for path in (*units, ""):
            self.api.replicate(self.framework.child(model, path), mesh=mesh, **options)
        return model

    def inputs(self, recipe: Recipe, *, step: int = 0, rank: int | None = None, rough: bool = False) -> Any:
        """This rank's input of that step or microbatch, or another rank's. ``rough`` ones are no integers: sums of them
        depend on the order in which they are added up."""
        rank = self.rank if rank is None else rank
        if isinstance(recipe, Tied):
            tokens = token_values((BATCH_ROWS, 3), vocab=recipe.vocab, rank=rank, step=step, seed=self.seed)
            return self.framework.tensor(tokens)
        shape = (BATCH_ROWS, recipe.num_inputs)
        values = batch_values(shape, rank=rank, step=step, seed=self.seed)
        return self.framework.tensor(values * ROUGHNESS if rough else values)

    def policy(
        self,
        *,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        output_dtype: str | None = None,
        cast_forward_inputs: bool = True,
    ) -> Any:
        """A mixed-precision policy with dtypes by name."""
        names = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "output_dtype": output_dtype}
        dtypes = {key: None if name is None else self.framework.dtype(name) for key, name in names.items()}
        return self.api.MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast_forward_inputs)

    # --- running things ---

    def train(self, model: Any, inputs: Any, *, scale: float = 1.0, **forward_options: Any) -> None:
        """Forward, loss times ``scale``, and backward."""
        self.framework.backward(self.framework.loss(model(inputs, **forward_options)) * scale)

    def optimizer_step(self, optimizer: Any) -> None:
        """Step as the implementation says to: by its own ``optimizer_step`` if it has one."""
        step = getattr(self.api, "optimizer_step", None)
        if step is None:
            optimizer.step()
        else:
            step(optimizer)

    def clip(self, model: Any, max_norm: float, **options: Any) -> float:
        """``clip_grad_norm_`` over the parameters of a model. Gives the norm before clipping."""
        parameters = list(self.framework.parameters(model).values())
        return self.framework.number(self.api.clip_grad_norm_(parameters, max_norm, **options))

    def record(self) -> AbstractContextManager[list[Collective]]:
        """Collect the collectives that this rank issues inside the block."""
        return self.framework.collectives()

    # --- looking at things ---

    def gradients(self, model: Any) -> dict[str, Array | None]:
        """Global gradients by name; None where a parameter has none."""
        parameters = self.framework.parameters(model)
        found = {name: self.framework.gradient(parameter) for name, parameter in parameters.items()}
        return {name: None if grad is None else self.framework.full(grad) for name, grad in found.items()}

    def values(self, model: Any) -> dict[str, Array]:
        """Global values of the parameters by name."""
        return {name: self.framework.full(p) for name, p in self.framework.parameters(model).items()}

    def present_gradients(self, model: Any) -> dict[str, Array]:
        """Those of `gradients` that are there."""
        return {name: grad for name, grad in self.gradients(model).items() if grad is not None}

    def states(self, model: Any, optimizer: Any) -> dict[str, Array]:
        """Global optimizer states by ``<name of the state> of <name of the parameter>``."""
        return {
            f"{state} of {name}": self.framework.full(value)
            for name, parameter in self.framework.parameters(model).items()
            for state, value in self.framework.optimizer_state(optimizer, parameter).items()
        }

    def sharded(self, model: Any) -> dict[str, bool]:
        """By parameter: whether it is registered in its sharded form."""
        return {name: self.framework.is_sharded(p) for name, p in self.framework.parameters(model).items()}

    def true_gradients(
        self,
        recipe: Recipe,
        *,
        steps: Iterable[int] = (0,),
        ranks: Sequence[int] | None = None,
        divide_by: float | None = None,
        train: Callable[[Any, Any, int], None] | None = None,
        **forward_options: Any,
    ) -> dict[str, Array]:
        """The truth: unsharded, on this rank alone, over the inputs of ``ranks`` (default: all) and these steps, added
        up and divided by ``divide_by``, or by the number of those ranks. ``train(model, inputs, rank)`` replaces
        `train`. Parameters that get no gradient are left out."""

        def train_alike(model: Any, inputs: Any, rank: int) -> None:
            self.train(model, inputs, **forward_options)

        model = self.model(recipe)
        ranks = range(self.world_size) if ranks is None else ranks
        total: dict[str, Array] = {}
        for step in steps:
            for rank in ranks:
                self.framework.zero_grad(model)
                (train or train_alike)(model, self.inputs(recipe, step=step, rank=rank), rank)
                for name, grad in self.gradients(model).items():
                    if grad is not None:
                        total[name] = total.get(name, np.float64(0)) + grad.astype(np.float64)
        divisor = len(ranks) if divide_by is None else divide_by
        return {name: (grad / divisor).astype(np.float32) for name, grad in total.items()}

    # --- schedules ---

    def schedule(self, log: Iterable[Collective], *, shard_size: int | None = None) -> list[str]:
        """Collectives in words, as `steps` writes them. A unit is known by its number of elements, padded as
        `padded_elements` says; what fits no unit is shown by its number."""
        shard_size = self.world_size if shard_size is None else shard_size
        full = {padded_elements(shapes, shard_size): path for path, shapes in self._units.items() if shapes}
        part = {count // shard_size: path for count, path in full.items()}
        words = []
        for event in log:
            path = (part if event.kind == "all_reduce" else full).get(event.num_elements)
            unit = f"<{event.num_elements} elements>" if path is None else path.removeprefix("layers.") or "root"
            words.append(f"{VERBS.get(event.kind, event.kind)} {unit} over {event.group_size}")
        return words

    def _parameters_by_unit(self, model: Any, units: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {path: [] for path in (*units, "")}
        for name, parameter in self.framework.parameters(model).items():
            owner = max((path for path in units if name.startswith(path + ".")), key=len, default="")
            found[owner].append(self.framework.shape(parameter))
        return found


def steps(text: str, *, over: int) -> list[str]:
    """``"gather 0, reduce 0"`` -> ``["gather 0 over 4", "reduce 0 over 4"]``. A bar separates forward from backward
    for the reader; a step that says its own ``over`` keeps it."""
    words = [word.strip() for word in text.replace("|", ",").split(",") if word.strip()]
    return [word if " over " in word else f"{word} over {over}" for word in words]


def padded_elements(shapes: Iterable[Sequence[int]], shard_size: int) -> int:
    """Elements of a unit's flat buffer: the first dim of each parameter is padded to a multiple of the shard axis."""
    return sum(-(-shape[0] // shard_size) * shard_size * int(np.prod(shape[1:], dtype=np.int64)) for shape in shapes)
