"""Errors the command line prints as one line: what a user can put right (code 2), and a run that had to stop (1)."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave is wrong; the message is one line that says what, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class TrainingStopped(RuntimeError):
    """Training cannot go on with numbers it can vouch for; the message is one line. What was saved stays."""
