"""Negative controls: bugs that the suite has to find.

Each mutant is a function that plants one bug in hpcompat on torch, of a kind that users of such a library have met. A
suite is worth what it finds: a mutant that survives it means a missing case.
"""
