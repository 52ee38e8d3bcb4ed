"""What all commands share."""


class CommandError(Exception):
    """The command cannot do what was asked. The message is for the person who typed it."""
