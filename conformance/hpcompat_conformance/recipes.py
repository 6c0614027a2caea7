"""The models that cases use, as data. Each framework builds them with the same parameter names and shapes.

Every layer is an affine map ``weight [out, in]``, ``bias [out]``, called ``layers.<i>`` and followed by a ReLU unless
it is the last. Inputs are ``[rows, in]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


Recipe = Chain | Branches | Tied | Probe
