"""Every model of the parity tests by name."""

from __future__ import annotations

from parity.features import FEATURES
from parity.models import MODELS, ModelCase
from parity.refused import REFUSED
from parity.tensor_parallel import TENSOR_PARALLEL

ALL_MODELS: dict[str, ModelCase] = {**MODELS, **FEATURES, **TENSOR_PARALLEL, **REFUSED}
