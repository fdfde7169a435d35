"""Errors meant for a user: one line that names the key, the value and what to do."""


class UserError(ValueError):
    """Something the user gave is wrong. The command line prints the message and exits with 2."""
