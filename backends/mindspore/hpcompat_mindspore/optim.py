"""Optimizers. They hold the parameter objects, which sharding leaves in place: nothing has to be guarded here yet."""
