"""Torch as the cases see it: workers, models, tensors, collectives. Nothing here knows an implementation."""
