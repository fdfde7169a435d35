"""The errors that a user can put right. The command line prints each as one line and exits with code 2."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave is wrong; the message is one line that says what, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
