"""The fault matrix: a step that raises, at every place where a step can, leaves no trace in the steps after it.

A *cell* is one place (`points`), in one unit of the model, on all ranks or on one, in one way to train (`settings`). A
step fails there; then come ``reset_iter_state``, ``zero_grad`` and further steps, which must be those of a run that
never had the failed batch: losses, gradients, parameters and optimizer states to the bit, and the scheduler's events
(`cell`). Everything here is written once for all frameworks; a framework gives a `kit`.

``python -m fault_matrix --help``, in this folder's parent, prints the matrix.
"""
