"""Two implementations of `fully_shard` measured against each other in the same processes; see `step_time.py`."""
