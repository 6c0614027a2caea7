"""Gradients of a param group between autograd and their reduction: which travel together, which are missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

# A gradient, as the backend's reduction takes it, and its dtype.
Gradient = tuple[Any, Any]


class ReducedParam(Protocol):
    """What a backend's parameter gives for it."""

    @property
    def name(self) -> str: ...
    @property
    def is_trainable(self) -> bool: ...
    @property
    def orig_dtype(self) -> Any: ...
    @property
    def reduce_dtype(self) -> Any:
        """``None``: the gradient's own."""
        ...

    def take_gradient(self, *, fill_unused: bool) -> Gradient | None:
        """The gradient that is due, or zeros where other ranks may have one; the caller's from then on."""
        ...

    def zero_gradient(self) -> Gradient: ...
    def drop_gradients(self) -> None:
        """Forget unsharded, accumulated and partially reduced gradients."""
        ...


Param = TypeVar("Param", bound=ReducedParam)


class GradientBucket(Generic[Param]):
    """Gradients with one reduce dtype and one original dtype."""

    __slots__ = ("grads", "orig_dtype", "overflow_risk", "params", "reduce_dtype")

    def __init__(self, reduce_dtype: Any, orig_dtype: Any, *, overflow_risk: bool) -> None:
        self.reduce_dtype = reduce_dtype
        self.orig_dtype = orig_dtype
        self.overflow_risk = overflow_risk
        self.params: list[Param] = []
        self.grads: list[Any] = []


class GroupGradients(Generic[Param]):
    """The part of a backend's ``GroupTensors`` that is about order: a base class for it."""

    # In the others a sum over many ranks may overflow.
    wide_dtypes: ClassVar[Sequence[Any]]
    params: list[Param]

    def take_gradients(self, *, fill_unused: bool) -> list[GradientBucket[Param]]:
        """Every gradient that is due, in buckets; the parameters no longer hold them."""
        return self._buckets((param, param.take_gradient(fill_unused=fill_unused)) for param in self.params)

    def missing_gradients(self, buckets: Sequence[GradientBucket[Param]]) -> tuple[str, ...]:
        """Names of the trainable parameters that are in none of ``buckets``."""
        trainable = [param for param in self.params if param.is_trainable]
        if sum(len(bucket.params) for bucket in buckets) >= len(trainable):
            return ()
        there = {param for bucket in buckets for param in bucket.params}
        return tuple(param.name for param in trainable if param not in there)

    def zero_gradients(self, missing: Collection[str]) -> list[GradientBucket[Param]]:
        """What :meth:`take_gradients` gives where all trainable parameters but the ``missing`` ones have gradients of
        zeros.
        """
        present = [param for param in self.params if param.is_trainable and param.name not in missing]
        return self._buckets((param, param.zero_gradient()) for param in present)

    def drop_gradients(self) -> None:
        for param in self.params:
            param.drop_gradients()

    def _buckets(self, gradients: Iterable[tuple[Param, Gradient | None]]) -> list[GradientBucket[Param]]:
        buckets: dict[tuple[Any, Any], GradientBucket[Param]] = {}
        for param, gradient in gradients:
            if gradient is None:
                continue
            grad, dtype = gradient
            key = (param.reduce_dtype or dtype, param.orig_dtype)
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = GradientBucket(*key, overflow_risk=key[0] not in self.wide_dtypes)
            bucket.params.append(param)
            bucket.grads.append(grad)
        return list(buckets.values())
