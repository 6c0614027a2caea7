"""The suite's cases, a file for each theme. They are written once for all frameworks: nothing here imports one."""
