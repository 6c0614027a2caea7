"""The backend protocol, executable: every method in a few lines of numpy, all ranks of a world in one process.

    from hpcompat_conformance import numpy_reference as ref

    def train(rank):
        model = ref.Sequential([ref.Linear(4, 4), ref.Linear(4, 4)])
        hpcompat.fully_shard(model, mesh=ref.init_device_mesh((2,)))
        ref.backward(ref.total(model(ref.Value(np.ones((3, 4), np.float32)))))
        return [parameter.grad for _, parameter in model.named_parameters()]

    with ref.registered():
        gradients = ref.World(2).run(train)

``with ref.DryWorld(1024).rank():`` in place of ``World.run`` shows one rank of many: its schedule and its sizes. Memory
that is allocated but not filled, or freed, holds NaN, so that a schedule which reads too early or too late is seen.
"""

from hpcompat_conformance.numpy_reference.backend import NumpyBackend
from hpcompat_conformance.numpy_reference.mesh import DeviceMesh, init_device_mesh
from hpcompat_conformance.numpy_reference.module import Buffer, Linear, Module, ModuleList, Parameter, Sequential
from hpcompat_conformance.numpy_reference.ops import add, relu, total
from hpcompat_conformance.numpy_reference.registration import registered
from hpcompat_conformance.numpy_reference.tape import Value, backward, checkpoint, no_grad
from hpcompat_conformance.numpy_reference.world import Call, DryWorld, Rank, RankLost, World, current_rank

__all__ = [
    "Buffer",
    "Call",
    "DeviceMesh",
    "DryWorld",
    "Linear",
    "Module",
    "ModuleList",
    "NumpyBackend",
    "Parameter",
    "Rank",
    "RankLost",
    "Sequential",
    "Value",
    "World",
    "add",
    "backward",
    "checkpoint",
    "current_rank",
    "init_device_mesh",
    "no_grad",
    "registered",
    "relu",
    "total",
]
