"""The scheduler: every decision about when to gather, wait, free, reduce and prefetch.

Nothing here knows a framework. Tensors, streams and autograd are reached through the protocols of
:mod:`hpcompat.contract`, and a file is named after the noun it holds.
"""
