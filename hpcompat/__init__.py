"""One FSDP2-style training API over PyTorch and MindSpore. Importing it imports neither framework."""

from hpcompat.api import fully_shard, register_fsdp_forward_method, share_comm_ctx
from hpcompat.comm import AllGather, Comm, ReduceOp, ReduceScatter
from hpcompat.core.events import Event, record_events
from hpcompat.errors import CapabilityError, UserError
from hpcompat.mesh import DataParallelMeshDims, DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from hpcompat.module import HSDPModule, UnshardHandle
from hpcompat.placement import Replicate, Shard, ShardPlacementResult
from hpcompat.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

FSDPModule = HSDPModule

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CapabilityError",
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
    "Shard",
    "ShardPlacementResult",
    "UnshardHandle",
    "UserError",
    "fully_shard",
    "record_events",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
