"""SIGTERM and SIGHUP do what Ctrl-C does: KeyboardInterrupt is raised where SIGINT would. A second kills at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

AGAIN_SECONDS = 0.05
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_by = signal.SIGINT


def catch() -> None:
    """Take SIGTERM and SIGHUP from here on; one that the caller ignores, as nohup does with SIGHUP, stays ignored."""
    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    if sys.unraisablehook is not _unraisable:
        global _passed_on
        _passed_on, sys.unraisablehook = sys.unraisablehook, _unraisable


def interrupted_by() -> signal.Signals:
    """The signal behind a KeyboardInterrupt; its exit code is 128 + its number, as shells have it."""
    return _by


_passed_on = sys.unraisablehook


def _unraisable(told: Any) -> None:
    """Send the signal again that came in a destructor or a callback: Python drops what is raised there."""
    if told.exc_type is not KeyboardInterrupt or threading.current_thread() is not threading.main_thread():
        _passed_on(told)
        return
    number = signal.SIGINT
    if signal.getsignal(number) is signal.SIG_IGN:
        number = _by
        signal.signal(number, _interrupt)
    timer = threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number))
    timer.daemon = True
    timer.start()


def _interrupt(number: int, _: FrameType | None) -> None:
    global _by
    _by = signal.Signals(number)
    for other in _ENDING:
        if signal.getsignal(other) is _interrupt:
            signal.signal(other, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)  # asyncio has a handler of its own while it runs: it cancels, then raises
