"""hyper-parallel's public code as the cases see it: its own meshes, placements and distributed tensors."""
