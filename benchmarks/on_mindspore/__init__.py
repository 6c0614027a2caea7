"""A step of sharded MindSpore training on the CPU, divided into model, MPI and our own code."""
