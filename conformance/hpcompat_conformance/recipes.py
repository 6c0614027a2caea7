"""The models that cases use, as data. Each framework builds them with the same parameter names and shapes.

Every layer is an affine map ``weight [out, in]``, ``bias [out]``, called ``layers.<i>`` and followed by a ReLU unless
it is the last. Inputs are ``[rows, in]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Different enough that each unit of a chain is known by its number of elements.
DEFAULT_SIZES = (4, 8, 12, 16)


@dataclass(frozen=True)
class Chain:
    """Layers one after another, ``sizes`` long by one. With ``own`` the root multiplies by a parameter ``scale
    [sizes[-1]]`` of its own. ``order`` lists the layers to call, for models that call one twice or leave one out.
    The model's method ``generate`` computes what its forward does."""

    sizes: Sequence[int] = DEFAULT_SIZES
    own: bool = False
    order: Sequence[int] | None = None

    @property
    def num_inputs(self) -> int:
        """Columns of the input."""
        return self.sizes[0]


@dataclass(frozen=True)
class Branches:
    """``layers.0`` then those of ``layers.1`` and ``layers.2`` that the call names (``use=(1, 2)``), summed. All
    square."""

    width: int = 4

    @property
    def num_inputs(self) -> int:
        """Columns of the input."""
        return self.width


@dataclass(frozen=True)
class Tied:
    """Token embedding ``embed.weight [vocab, width]``, a layer ``layers.0``, and ``head.weight``, which is the same
    parameter."""

    vocab: int = 7
    width: int = 4


@dataclass(frozen=True)
class Probe:
    """One layer that notes, in ``seen``, the dtypes it is called with: a dict with keys ``input``, ``side``,
    ``weight``."""

    width: int = 8

    @property
    def num_inputs(self) -> int:
        """Columns of the input."""
        return self.width


@dataclass(frozen=True)
class Packed:
    """``layers.0`` and ``layers.1``, both square. The output is what the last layer gives, ``last [rows, width]``, and
    twice what the first gives, ``first``. ``form`` says how they are packed: ``"nested"`` for ``{"last": last, "more":
    (3, [first])}``, ``"object"`` for an object with these two attributes, of a class that no library knows."""

    form: str = "nested"
    width: int = 4

    @property
    def num_inputs(self) -> int:
        """Columns of the input."""
        return self.width


class Hidden:
    """What a model with ``form="object"`` gives."""

    def __init__(self, last: Any, first: Any) -> None:
        self.last, self.first = last, first


@dataclass(frozen=True)
class Buffered:
    """One layer, whose output is added to the buffer ``offset [width]``, float32 values with a fraction. The buffer
    ``count [1]`` is int32."""

    width: int = 8

    @property
    def num_inputs(self) -> int:
        """Columns of the input."""
        return self.width

    @property
    def offset(self) -> list[float]:
        """Not all of them are numbers of bfloat16."""
        return [1 + 2.0**-12 * index for index in range(self.width)]


Recipe = Chain | Branches | Tied | Probe | Packed | Buffered
