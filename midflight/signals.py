"""SIGTERM and SIGHUP do what Ctrl-C does: KeyboardInterrupt is raised where SIGINT would. A second kills at once."""

from __future__ import annotations

import signal
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_by = signal.SIGINT


def catch() -> None:
    """Take SIGTERM and SIGHUP from here on; one that the caller ignores, as nohup does with SIGHUP, stays ignored."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def interrupted_by() -> signal.Signals:
    """The signal behind a KeyboardInterrupt; its exit code is 128 + its number, as shells have it."""
    return _by


def _interrupt(number: int, _: FrameType | None) -> None:
    global _by
    _by = signal.Signals(number)
    for other in _ENDING:
        if signal.getsignal(other) is _interrupt:
            signal.signal(other, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own while it runs: it cancels, then raises
