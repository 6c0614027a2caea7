"""The error that ends a command with a message instead of a traceback."""


class CommandError(Exception):
    """The command cannot do what was asked; its text tells the user what to do."""
