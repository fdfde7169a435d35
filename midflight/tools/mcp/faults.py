"""Why an MCP server fails, in one line: what it said last on its standard error, and errors of the package mcp.

Invariant: no line has a key, or a part of one, or what a terminal would act on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from pydantic import ValidationError

from midflight.redacting import redact
from midflight.tools.base import one_line

KEPT = 8192
"""Bytes of a server's standard error that are kept, the last ones."""


class BrokenMessage(Exception):
    """What came is of the protocol, and cannot be read."""

    def __init__(self) -> None:
        super().__init__("a message of the server cannot be read")


class ErrorOutput:
    """A server's standard error, read as it comes, so that the server never waits for it."""

    def __init__(self) -> None:
        self._said = b""

    @contextmanager
    def opened(self) -> Iterator[TextIO]:
        """Where a server is to write, within a running loop; what it said last is kept past the end."""
        self._said = b""
        loop = asyncio.get_running_loop()
        read, write = os.pipe()
        os.set_blocking(read, False)
        loop.add_reader(read, self._read, read, loop)
        try:
            with os.fdopen(write, "w") as errors:
                yield errors
        finally:
            for _ in range(4):  # more than a pipe holds
                self._read(read, loop)
            loop.remove_reader(read)
            os.close(read)

    def _read(self, pipe: int, loop: asyncio.AbstractEventLoop) -> None:
        try:
            said = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if not said:
            loop.remove_reader(pipe)
        self._said = (self._said + said)[-KEPT:]

    def last_line(self, keys: Sequence[str]) -> str:
        """The last line that is whole, without `keys`; empty where there is none."""
        lines = self._said.decode("utf-8", "replace").split("\n")
        if len(self._said) == KEPT:
            lines = lines[1:]  # cut, maybe within a key
        lines = [legible for line in lines if (legible := one_line(redact(line, keys)))]
        return "".join(filter(str.isprintable, lines[-1])) if lines else ""


def is_broken_message(error: ValidationError) -> bool:
    """Whether a line that is no message was meant as one; else a server only printed something."""
    return "jsonrpc" in str(error.errors(include_url=False)[0]["input"])


def reason(error: BaseException, keys: Sequence[str]) -> str:
    """The first error inside a group, on one line, without `keys`."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"its answer is not of the protocol: {place}: {first['msg']}"
    elif isinstance(error, BrokenMessage):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return one_line(redact(text, keys))
