"""What a backend is: its protocols, and the data that crosses the seam between it and the scheduler.

Who writes a backend reads this folder. :mod:`hpcompat.contract.backend` is what the entry point gives;
:mod:`hpcompat.contract.scheduler` what goes back and forth while a model trains, in the states of
:mod:`hpcompat.contract.states`; the other files are one room of a backend each. Nothing here imports what stands above:
neither the scheduler nor the API.
"""
