"""The MindSpore backend: parameters whose data switches between shard and whole, MPI on the CPU, hccl on Ascend."""
