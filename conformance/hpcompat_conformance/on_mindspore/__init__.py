"""MindSpore on the CPU as the cases see it: workers, models, tensors, collectives. Its meshes and autograd are those of
hpcompat's backend, as MindSpore has none of its own that would do."""
