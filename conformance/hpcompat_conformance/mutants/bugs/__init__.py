"""The mutants, a file for each theme. They import what they change when they are planted, by name: nothing here imports
a framework."""
