"""A reduction that is queued carries its own policy: dtype, division, hook, groups. Setters change later ones only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcompat_conformance import numpy_reference as ref
from training import batch, gradients, initialize, train, wrap


class Meddler(ref.Module):
    """Calls ``meddle`` in its backward, when the reduction of the layer above is queued and not complete."""

    def __init__(self) -> None:
        super().__init__()
        self.meddle: Any = None

    def forward(self, x: ref.Value) -> ref.Value:
        x.hooks.append(lambda: self.meddle and self.meddle())
        return x


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)])
@pytest.mark.parametrize(
    "meddle",
    [
        lambda layer: layer.set_gradient_divide_factor(100.0),
        lambda layer: layer.set_reduce_op_type("sum"),
        lambda layer: layer.set_force_sum_reduction_for_comms(True),
        lambda layer: layer.set_gradient_scaling_factor(0.0),
        lambda layer: layer.set_all_reduce_hook(lambda flat: flat.fill(7)),
        lambda layer: layer.set_requires_gradient_sync(False),
        lambda layer: layer.set_requires_all_reduce(False),
        lambda layer: layer.set_reduce_scatter_max_input_buffers(8),
    ],
    ids=["divide-factor", "op-type", "force-sum", "scale", "hook", "sync", "all-reduce", "cap"],
)
def test_a_setter_does_not_change_what_is_queued(
    reference: ref.NumpyBackend, shape: tuple[int, ...], meddle: Any
) -> None:
    """Whoever completes a reduction must not look at what its group says by then."""

    def run(rank: ref.Rank, *, meddles: bool) -> Any:
        mesh = ref.init_device_mesh(shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        meddler = Meddler()
        model = initialize(ref.Sequential([ref.Linear(4, 4), meddler, ref.Linear(4, 4)]))
        wrap(model, "0", "2", mesh=mesh)
        last = model[2]
        for factor in (4.0, 2.0):  # set twice: the plan that is made is the one that counts
            last.set_gradient_divide_factor(factor)
        last.set_all_reduce_hook(lambda flat: flat.__imul__(3))
        queued: list[int] = []

        def note_and_meddle() -> None:
            queued.append(len(last._unit().comm_ctx._reductions))
            if meddles:
                meddle(last)

        meddler.meddle = note_and_meddle
        train(model, batch(rank.number))
        assert queued == [1]
        return gradients(last)

    for meddled, clean in zip(
        *(ref.World(int(np.prod(shape))).run(lambda rank, m=m: run(rank, meddles=m)) for m in (True, False)),
        strict=True,
    ):
        for name, value in clean.items():
            np.testing.assert_array_equal(meddled[name], value)
