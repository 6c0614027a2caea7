"""One FSDP2-style training API over PyTorch and MindSpore. Importing it imports neither framework."""

from hpcompat.api import fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx
from hpcompat.comm import AllGather, Comm, ReduceOp, ReduceScatter
from hpcompat.core.events import Event, record_events
from hpcompat.distributed import (
    agree,
    all_reduce_scalar,
    barrier,
    destroy_process_group,
    device_type,
    get_backend_name,
    get_rank,
    get_world_size,
    init_device_mesh,
    init_process_group,
    is_initialized,
)
from hpcompat.errors import CapabilityError, CollectiveError, UserError
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from hpcompat.module import HSDPModule, ReplicateModule, UnshardHandle
from hpcompat.optim import clip_grad_norm_, optimizer_step, unscale_grads_, zero_grad
from hpcompat.placement import Replicate, Shard, ShardPlacementResult
from hpcompat.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hpcompat.record import record
from hpcompat.trace import trace
from hpcompat.training import (
    backward,
    enable_mindspore_backward_compat,
    from_numpy,
    full_tensor,
    load_local_state_dict,
    manual_seed,
    named_parameters,
    no_grad,
    parameters,
    to_numpy,
    value_and_grad,
)

FSDPModule = HSDPModule

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CapabilityError",
    "CollectiveError",
    "Comm",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "Event",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceOp",
    "ReduceScatter",
    "Replicate",
    "ReplicateModule",
    "Shard",
    "ShardPlacementResult",
    "UnshardHandle",
    "UserError",
    "agree",
    "all_reduce_scalar",
    "backward",
    "barrier",
    "clip_grad_norm_",
    "destroy_process_group",
    "device_type",
    "enable_mindspore_backward_compat",
    "from_numpy",
    "full_tensor",
    "fully_shard",
    "get_backend_name",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "is_initialized",
    "load_local_state_dict",
    "manual_seed",
    "named_parameters",
    "no_grad",
    "optimizer_step",
    "parameters",
    "record",
    "record_events",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "to_numpy",
    "trace",
    "unscale_grads_",
    "value_and_grad",
    "zero_grad",
]
