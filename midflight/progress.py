"""What a person sees while a run works, on standard error: bars, one line a training step, notes.

Invariant: on a terminal bars move in place; anywhere else every line is whole, without control codes, and few.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from midflight.rendering import losses, printable


class Bar(Protocol):
    """A count on its way to a total."""

    def advance(self, count: int = 1) -> None:
        """`count` more are done."""
        ...


class Progress:
    """Bars, step lines and notes.

    Args:
        stream: where to write; standard error by default.
        clock: seconds, for the time a bar took.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._console = Console(file=self._stream, highlight=False) if self._stream.isatty() else None
        self._live: RichProgress | None = None
        self._open_bars = 0

    @contextmanager
    def bar(self, name: str, total: int, *, passing: bool = False) -> Iterator[Bar]:
        """A bar to `total`; bars may be nested. Off a terminal: a line at most every 10 %, the last at 100 %.

        A `passing` one leaves nothing behind, and off a terminal shows nothing.
        """
        if self._console is None:
            yield _NoBar() if passing else _PlainBar(name, total, self._stream, self._clock)
            return
        if self._live is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._live = RichProgress(*columns, console=self._console)
            self._live.start()
        self._open_bars += 1
        bar = _LiveBar(self._live, name, total)
        try:
            yield bar
        finally:
            if passing:
                bar.remove()
            self._open_bars -= 1
            if self._open_bars == 0:
                self._live.stop()
                self._live = None

    def step(self, record: Mapping[str, Any], total_steps: int, eta_seconds: float) -> None:
        """One line for a training step, from its metrics record; what the record lacks is shown as a dash.

        A second one says why trajectories were lost to infrastructure failures.
        """
        self.note(step_line(record, total_steps, eta_seconds))
        reasons = record.get("infrastructure_reasons")
        if reasons:
            self.note(losses(record["infrastructure"], record["trajectories"], reasons))

    def note(self, text: str) -> None:
        """One line of text."""
        text = printable(text)
        if self._console is not None:
            self._console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)


class _LiveBar:
    def __init__(self, live: RichProgress, name: str, total: int) -> None:
        self._live = live
        self._task = live.add_task(name, total=total)

    def advance(self, count: int = 1) -> None:
        self._live.advance(self._task, count)

    def remove(self) -> None:
        self._live.remove_task(self._task)


class _NoBar:
    def advance(self, count: int = 1) -> None:
        pass


class _PlainBar:
    def __init__(self, name: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._name, self._total, self._stream, self._clock = name, total, stream, clock
        self._done = 0
        self._tenths = 0
        self._start = clock()

    def advance(self, count: int = 1) -> None:
        self._done += count
        tenths = 10 if self._total <= 0 else 10 * self._done // self._total
        if tenths > self._tenths:
            self._tenths = tenths
            seconds = duration(self._clock() - self._start)
            print(f"{self._name}: {self._done}/{self._total} ({seconds})", file=self._stream, flush=True)


def step_line(record: Mapping[str, Any], total_steps: int, eta_seconds: float) -> str:
    """`step  3/20  reward 0.412  signal 6/8  turns 3.10  tool errors 7.0%  512 tok/s  drift 2.0e-06  left 4m 05s`.

    On demonstrations: `step  3/20  loss 0.4120  demonstrations 16  tokens 312  gradient 1.20  left 4m 05s`.
    """
    step = record.get("step", "-")
    number = f"step {step!s:>{len(str(total_steps))}}/{total_steps}"
    if "demonstrations" in record:
        parts = [
            number,
            f"loss {_number(record.get('loss'), '.4f')}",
            f"demonstrations {record['demonstrations']}",
            f"tokens {_number(record.get('trained_tokens'), ',')}",
            f"gradient {_number(record.get('grad_norm'), '.2f')}",
            f"left {duration(eta_seconds)}",
        ]
        return "  ".join(parts)
    parts = [
        number,
        f"reward {_number(record.get('reward'), '.3f')}",
        f"signal {record.get('groups_with_signal', '-')}/{record.get('groups', '-')}",
        f"turns {_number(record.get('turns'), '.2f')}",
        f"tool errors {_number(record.get('tool_error_rate'), '.1%')}",
        f"{_number(record.get('tokens_per_second'), ',.0f')} tok/s",
        f"drift {_number(record.get('drift'), '.1e')}",
        f"left {duration(eta_seconds)}",
    ]
    if record.get("infrastructure"):
        parts.append(f"infrastructure failures {record['infrastructure']}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`8s`, `4m 05s`, `2h 03m`; a dash for what is not a finite time."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"
